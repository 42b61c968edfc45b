"""Writes the generated pages: `make docs` (or `python -m docs.generate`)."""

import dataclasses
import inspect
import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks import adaptive, claims, credit, laboratory, mismatch, moe, recipes, servers_page, studies
from benchmarks.gpu import factors, plan_page
from benchmarks.gpu import page as gpu_page
from benchmarks.gpu import smollm2 as smollm2_gpu
from benchmarks.gpu.exact.page import exact_blocks
from benchmarks.gpu.figures import figures
from benchmarks.health import page as health_page
from benchmarks.objectives import RESULTS, performance_page
from benchmarks.peers.page import document, load_results
from benchmarks.routing import routing_section
from benchmarks.step.page import engine_section, step_section
from benchmarks.step.page import load_results as measured
from benchmarks.trust.page import trust_page
from benchmarks.turns import turns_section
from legato import parts
from legato.algorithms.catalogue import algorithm_names, entry
from legato.algorithms.cautions import cautions
from legato.cli.explain import LEGEND, SLOTS, ratio_words, trust_words
from legato.config import document as configuration
from legato.config import peers
from legato.core.parts import lookup
from legato.core.parts import names as part_names
from legato.diagnostics.metrics import definitions as metrics
from legato.diagnostics.metrics import run as run_metrics
from legato.health import rules

ROOT = Path(__file__).parents[1]


def pages() -> dict[str, str]:
    """Return the text of every page that is generated wholly or in part, by path."""
    return {
        "docs/metrics.md": metrics.document() + run_metrics.document() + "\n",
        "docs/configuration.md": configuration.document(),
        "src/legato/config/names.py": configuration.names_module(),
        "docs/resume.md": resume_page(),
        "docs/algorithms.md": algorithms_page(),
        "docs/performance.md": performance(),
        "docs/experiments/smollm2.md": smollm2_gpu.experiment_page(json.loads(smollm2_gpu.RESULTS.read_text())),
        "docs/experiments/mismatch.md": mismatch.experiment_page(json.loads(mismatch.RESULTS.read_text())),
        "docs/experiments/lab.md": laboratory.experiment_page(laboratory.load_results()),
        "docs/experiments/health.md": health_page.experiment_page(health_page.load_results()),
        "docs/health.md": rules.document(),
        "docs/experiments/moe.md": moe.experiment_page(moe.load_results()),
        "docs/experiments/adaptive-clip.md": adaptive.experiment_page(adaptive.load_results()),
        "docs/experiments/credit.md": credit.experiment_page(credit.load_results()),
        **studies.experiment_pages(),
        **studies.figures(),
        "docs/claims.md": claims.page(),
        "src/legato/config/recipe_runs.json": recipes.record_text(),
        "docs/parts.md": parts_page(),
        "docs/peers.md": document(load_results()),
        "docs/trust.md": trust_page(),
        "docs/migrating.md": migrating_page((ROOT / "docs/migrating.md").read_text()),
        "docs/exact.md": fill_blocks((ROOT / "docs/exact.md").read_text(), exact_blocks()),
        "docs/experts.md": fill_blocks((ROOT / "docs/experts.md").read_text(), {"decoding": gpu_page.experts_block()}),
        "docs/plan.md": fill_blocks((ROOT / "docs/plan.md").read_text(), plan_page.plan_blocks()),
        "docs/serve.md": fill_blocks((ROOT / "docs/serve.md").read_text(), {"serve": servers_page.serve_block()}),
        "docs/ahead.md": fill_blocks((ROOT / "docs/ahead.md").read_text(), {"ahead": servers_page.ahead_block()}),
        "docs/engines.md": fill_blocks(
            (ROOT / "docs/engines.md").read_text(),
            {"vllm": servers_page.vllm_block(), "sglang": servers_page.sglang_block()},
        ),
        "docs/scaling.md": fill_blocks((ROOT / "docs/scaling.md").read_text(), plan_page.scaling_blocks()),
        **moe.figures(moe.load_results()),
        **figures((gpu_page.load_results() or {"sections": {}})["sections"]),
    }


def performance() -> str:
    """Return the page of all benchmarks that have been run, from their result files."""
    sections = [performance_page(json.loads(RESULTS.read_text()))]
    sections_by_name = (
        ("engine", engine_section),
        ("turns", turns_section),
        ("routing", routing_section),
        ("step", step_section),
    )
    for name, section in sections_by_name:
        results = measured(name)
        if results is not None:
            sections.append(section(results).rstrip("\n") + "\n\n")
    on_gpu = gpu_page.load_results()
    if on_gpu is not None:
        sections.append(gpu_page.gpu_section(on_gpu))
    routed = measured("routing-gpu")
    if routed is not None:
        sections.append(routing_section(routed))
    return "\n".join(sections)


_COLUMNS = """\
- *ratio*: the tokens over which new and old policy are compared. log r of a sequence is the mean of its token
  log-ratios, of a product their sum; "group" compares a response with the others to its prompt. "detached": the
  ratio is a constant weight on log pi. "gradient by token": each token gets the gradient of its own log-prob.
- *trust region*: the part that bounds the ratio, with its distances below and above 1, or its cap or threshold.
  "smooth damping" is the part `kernel`: a smooth function of the ratio that goes to 0, without an edge.
- *aggregate*: how the terms of the tokens become one loss. *advantage*: how rewards become advantages. Each part:
  [parts.md](parts.md)."""


def algorithms_table() -> list[str]:
    """The table of algorithms, one row each."""
    lines = ["| name | ratio | trust region | aggregate | advantage | paper |", "|---|---|---|---|---|---|"]
    for name in algorithm_names():
        described = entry(name)
        value = described.value
        star = "" if described.verified else " *"
        words = (ratio_words(value), trust_words(value), value.aggregate.name, value.advantage.name, described.paper)
        lines.append(f"| `{name}`{star} | " + " | ".join(words) + " |")
    return lines


def algorithms_page() -> str:
    """Return the page of algorithms: formula, parts, paper and cautions of each."""
    lines = [
        "# Algorithms",
        "",
        "Generated by `make docs` from `src/legato/algorithms`; do not edit.",
        "",
        f"{LEGEND} `*`: not verified in every constant.",
        "",
        *_COLUMNS.splitlines(),
        "",
        *algorithms_table(),
    ]
    for name in algorithm_names():
        described = entry(name)
        lines += ["", f"## {name}", "", f"{described.title} ({described.paper}).", ""]
        lines += ["```", *described.formula.splitlines(), "```"]
        if described.remarks:
            lines += ["", described.remarks]
        lines += ["", *(f"- {caution}" for caution in cautions(described.value))]
    return "\n".join(lines) + "\n"


_OWN_PARTS = """\
## Parts of your own

A slot also takes your own class as `file.py:Name` or `module:Name`: in a recipe, on the command line, in
`legato.algorithm` and in `legato explain my_clip.py:MyClip`. Everything a part needs is imported from `legato.parts`:

```python
{example}
```

```toml
[algorithm]
name = "gspo"
"objective.trust" = ["my_clip.py:MyClip"]
"objective.trust.my-clip.over" = 0.1
```

A path is relative to the directory in which the run is started. The path of a field holds the name of the part. Without
`@part` the name is made from the class: `MyClip` becomes `my-clip`. The run records the file and its SHA-256 in the
`start` line of metrics.jsonl and in its checkpoints; `legato resume` loads the file again and refuses it if it has
changed, unless you pass `--allow-changes`. A run refuses a class defined in a notebook or in the script itself, since
that cannot be loaded again.

`python -m pytest tests/contracts --part my_clip.py:MyClip` checks that a part keeps the promises of its slot.

### What the example uses

- **`apply(region, context)`** returns the region with this part's bound on the ratio. Trust parts act one after the
  other, in the order in which `objective.trust` lists them; each gets the region that the part before it returned.
- **`region.log_value`** is log r after the trust parts so far: `[B, 1]` where a response has one ratio with one
  gradient, otherwise `[B, T]`. The loss uses exp of it. `region.log_ratio` is log r as the ratio part computed it and
  stays unchanged. Bound `log_value` with `by_sign` (above where A > 0, below where A < 0) or `bounded` (both sides
  whatever A is): a value that is cut off has zero gradient. To drop tokens instead, return `leave_out(region,
  dropped)`.
- **`context`** holds what a part may read. `context.signals` are the tensors of the call: `logprobs`, `advantages`,
  and `old_logprobs`, `sampler_logprobs`, `ref_logprobs`, `entropy` ... Only the first two are always there: a part
  that reads another names it, as in `def needs(self): return ("sampler_logprobs",)`. Values outside the mask may be
  NaN; `context.signals.mask.select(values)` sets them to 0. `context.segments` are the tokens, turns or responses
  over which the ratio is averaged (`size()`, `sum`, `mean`), `context.sequences` the whole responses,
  `context.counts` the tokens and responses of the whole update, and `context.state` the state of all adaptive parts
  by name.
- **`role`** is what the part does: `"clip"` bounds the ratio, `"gate"` puts a smooth function of the ratio in its
  place, and `"drop"`, the default, leaves tokens or responses out. A gate beside a clip or beside another gate is
  refused.
- **`bounds(state)`** states the band, or returns None where there is none (the default). A run measures the noise of
  the ratio against the band, writes both into the `probe` line of metrics.jsonl (the band as bounds on log r), and
  counts clipped ratios against it. `Bounds(low=, high=)` are distances of r from 1; with `logarithmic=True` they are
  distances of log r from 0, and `of="tokens"` says that the log-ratio of each token is bounded before the mean is
  taken. `lower` and `upper` are the bounds on log r either way.
- **`Bounds(fields=("under", "over"))`** names the fields of the part that hold the two distances, the lower one
  first. A recovery multiplies these fields by `health.clip_factor` to tighten the clip, and tables and cautions show
  them. Without `fields` the band cannot be tightened.
- **`state`** is always None for a part without a state, such as the one above. An adaptive trust region sets `adapts
  = True` and defines `initial()`, its first state (numbers by name), and `advance(state, sums, first)`, the state for
  the next update. Its `bounds` gets its current state during training, and None where the algorithm is only described
  (`legato explain`): None then means `self.initial()`. Its `apply` reads `context.state[self.name]`. `auto-clip` in
  `src/legato/objectives/adaptive.py` is an example.

### Compositions of your own

A new composition of parts is either a Python value, `legato.Algorithm(name="mine", advantage=..., objective=...,
aggregate=...)`, or a recipe with a new name that sets `advantage`, `objective.ratio` and `aggregate`."""


def _example() -> str:
    """The file of the docstring of `legato.parts`."""
    return inspect.cleandoc((parts.__doc__ or "").split("# my_clip.py\n")[1].split("\nA recipe names")[0])


def parts_page() -> str:
    """Return the page of parts, each with its fields."""
    lines = [
        "# Parts",
        "",
        "Generated by `make docs` from the declarations in `src/legato`; do not edit. A field is set by its path, as in",
        '`legato.algorithm("gspo", {"objective.corrections.tis.cap": 2.0})`, which also adds the part if it is not there.',
        "",
        *_OWN_PARTS.format(example=_example()).splitlines(),
    ]
    for kind, slot in SLOTS.items():
        lines += ["", f"## {slot}"]
        for name in part_names(kind):
            part = lookup(kind, name)
            if not part.__module__.startswith("legato."):
                continue  # registered by somebody else in this process
            lines += ["", f"### {name}", "", " ".join((part.__doc__ or "").split())]
            fields = dataclasses.fields(part)
            if fields:
                lines += ["", "| field | default | allowed | |", "|---|---|---|---|"]
            for field in fields:
                allowed = field.metadata["rule"].expected
                cells = (f"`{field.name}`", str(field.default), allowed, field.metadata["says"])
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def resume_page() -> str:
    """Return the page on resuming, with the options that may change."""
    lines = [
        "# Resuming a run",
        "",
        "Generated by `make docs` from the declarations of the options (`resume=`); do not edit.",
        "",
        "`legato resume RUN` continues from the newest checkpoint whose files match the hashes in its manifest. A",
        "checkpoint that does not match is reported and the one before it is used. On a CPU the result equals the",
        "uninterrupted run to the bit: weights, optimizer, rollouts, and all metrics except times. A run that was",
        "interrupted during its warm-up has no checkpoint yet: `legato resume` says so and prints the command that starts",
        "it again. [endings.md](endings.md) lists the signals that save, the exit codes, and what errors and full disks do.",
        "",
        "`legato resume RUN --step N` goes back to the checkpoint of step N, of those that are kept (`output.keep_last` and",
        "the best; where an alarm acts, also the newest healthy one). Metrics, findings, rollouts, checkpoints and evidence",
        "of later steps are moved to `RUN/given-up/`. Without a change the run would repeat the same steps.",
        "",
        "`legato resume RUN path=value` changes an option:",
        "",
        "- *free*: options on the length of the run and on its output. The updates do not change.",
        "- *flag*: the run would train differently from here on; needs `--allow-changes`.",
        "- *refused*: the saved state would not fit, or held-out problems would have been trained on.",
        "",
        "Each checkpoint holds the configuration and hashes of the run's other inputs, and a resumed run compares them with",
        "what it finds:",
        "",
        "- `config.toml`: an edited option counts as a changed option, as above. A deleted file is written again.",
        "- Your own files with parts, tasks, rewards, environments or engines, and the files that options of tasks and",
        "  rewards name. The run stores absolute paths and can be resumed from any directory. Modules that",
        "  your files import are not compared, nor are objects given in Python.",
        "- The model folder, where the run reads it again: under LoRA, and for the reference of a KL term.",
        "- `RUN/reference/`, where a KL term compares with a warmed-up model or one given in Python. A damaged or missing",
        "  one is refused.",
        "",
        "Any other change needs `--allow-changes` once. A run of an older version without these hashes goes on, with a note",
        "that names the inputs that could not be checked. On a CPU the number of threads changes how sums are rounded: one",
        "that is resumed with another number says so, and is not equal to the bit.",
        "",
        "Records do not hold a run up. If `metrics.jsonl` or `health.jsonl` is damaged, emptied or deleted, the readable",
        "records stay, the damaged file is kept as `metrics-damaged-1.jsonl`, and the run says which steps it lost.",
        "",
        "`eval`, `sample`, `mismatch` and `lab` warn if the newest checkpoint is damaged and an older one is used.",
        "`legato export` then exits with code 2, unless `--allow-older` is given.",
        "",
        "| option | in a resumed run |",
        "|---|---|",
    ]
    for option in configuration.options():
        lines.append(f"| `{option.path}` | {option.resume} |")
    return "\n".join(lines) + "\n"


def migrating_page(page: str) -> str:
    """Return the page on migrating with the tables of options written again."""
    return fill_blocks(page, {trainer: "\n".join(_keys(trainer, keys)) for trainer, keys in peers.tables()})


def fill_blocks(page: str, blocks: Mapping[str, str]) -> str:
    """Return a page written by hand with its generated blocks, each between two comments, written again."""
    for name, text in blocks.items():
        opening = f"<!-- {name}: generated by `make docs` -->\n"
        before, rest = page.split(opening)
        page = before + opening + text + "\n" + rest[rest.index("<!-- end -->") :]
    return page


_ANSWERS = {
    "translated": "Translated",
    "no effect": "Nothing to set: results do not depend on it here",
    "left out": "Left out, and told",
    "refused": "Refused: it would train differently, and there is no counterpart",
}


def _keys(trainer: str, keys: Mapping[str, peers.Key]) -> list[str]:
    """The tables of the options of one trainer."""
    lines: list[str] = []
    for answer, heading in _ANSWERS.items():
        rows = {name: key for name, key in keys.items() if key.answer == answer}
        if not rows:
            continue
        lines += ["", f"### {heading}", "", f"| {trainer} | default | here | |", "|---|---|---|---|"]
        for name, key in rows.items():
            default = "unset" if key.default is None else f"`{json.dumps(key.default)}`"
            ours = f"`{key.ours}`" if key.ours else ""
            lines.append(f"| `{name}` | {default} | {ours} | {key.says} |")
    return [*lines, ""]


if __name__ == "__main__":
    factors.main()  # first: the pages of plans are calculated with these factors
    for path, text in pages().items():
        (ROOT / path).parent.mkdir(exist_ok=True)
        (ROOT / path).write_text(text)
        print(f"wrote {path}")
