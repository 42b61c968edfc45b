"""Generated pages are current, every Python block of a page runs, and what a page names exists."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import legato
from benchmarks.gpu import ranks
from docs.generate import pages
from legato.algorithms.catalogue import algorithm_names, entry
from legato.config.document import options
from legato.config.load import load
from legato.rollouts.engine import Limits, Request
from legato.rollouts.registry import EngineOptions
from legato.rollouts.sampling import Sampling

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
WRITTEN = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("choosing", "concepts", "extending", "first-run", "troubleshooting")),
]
"""Pages written by hand that name many options, metrics and messages."""


@pytest.mark.parametrize("path", sorted(pages()))
def test_the_generated_page_is_current(path: str) -> None:
    assert (ROOT / path).read_text() == pages()[path], f"{path} is out of date: run make docs"


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_readme_can_be_read_in_a_minute() -> None:
    assert len(README.splitlines()) <= 115
    (example,) = examples("README.md")
    assert len([line for line in example.splitlines() if line.strip()]) <= 10


def test_the_readme_and_the_recipe_promise_the_same_time() -> None:
    command = next(line for line in README.splitlines() if line.startswith("make train"))
    machine = next(line for line in (ROOT / "recipes/tiny.toml").read_text().splitlines() if line.startswith("# Machine:"))
    promised = machine.rpartition(", ")[2].rstrip(".")
    assert promised.endswith("minutes") and f"in {promised};" in command


def test_the_readme_counts_algorithms_as_they_are() -> None:
    names = algorithm_names()
    unchecked = [name for name in names if not entry(name).verified]
    assert f"In {len(unchecked)} of the {len(names)} algorithms" in README
    assert f"GSPO, GRPO, DAPO, PPO and {len(names) - 4} more" in README


def test_the_measured_figures_of_the_readme_are_those_of_the_stored_files() -> None:
    results = ROOT / "benchmarks" / "results"
    parts = json.loads((results / "gpu.json").read_text())["sections"]["B8"]["parts"]
    ours, trl = (parts[name]["seconds"]["step"] for name in ("Legato", "TRL defaults"))
    assert f"takes {ours:.2f} s" in README and f"`generate` {trl:.2f} s: {trl / ours:.1f} times" in README
    our_peak, their_peak = (parts[name]["peak_gib"] for name in ("Legato", "TRL defaults"))
    assert f"peak of {our_peak:.1f} GiB where\n  TRL has {their_peak:.1f}" in README
    smollm2 = json.loads((results / "smollm2-gpu.json").read_text())
    first, last = (100 * smollm2["evaluations"][place]["eval/accuracy_sampled"] for place in (0, -1))
    assert f"from {first:.1f} to {last:.1f} % on held-out additions" in README
    assert f"in {smollm2['seconds']:.0f} s on" in README
    planned = json.loads((results / "plan.json").read_text())["shapes"]
    one_line = " ".join(README.split())
    eight, away, lora = (planned[name] for name in ("8b-8bit", "8b-offload", "8b-lora"))
    assert f"took {eight['seconds']['step']:.1f} s on one H200 with an 8-bit optimizer" in one_line
    assert f"a peak of {eight['peak_gib']:.1f} GiB, {away['seconds']['step']:.1f} s with an offloaded one" in one_line
    assert f"at {away['peak_gib']:.1f} GiB, and {lora['seconds']['step']:.1f} s by LoRA" in one_line
    assert f"at {lora['peak_gib']:.1f} GiB" in one_line
    compared = ranks.compare(ranks.load_results(ranks.RESULTS))

    def slower(shape: str) -> str:
        own = [each for each in compared if each.name == f"layers over one process, {shape}"]
        return " and ".join(f"{100 * each.ratio - 100:.0f}" for each in own)

    assert f"a 1.7B shape {slower('1.7B')} % slower in two runs where layers are" in one_line
    assert f"(a 0.6B shape {slower('0.6B')} %)" in one_line
    assert "Where there is memory to keep them it costs at most 5 %." in one_line
    assert all(each.high <= 1.05 for each in newest_of_kept(compared).values())
    limits = " ".join((ROOT / "docs" / "plan.md").read_text().partition("## Limits")[2].split())
    assert f"{slower('1.7B')} % longer at 1.7B, in two runs, and {slower('0.6B')} % at 0.6B" in limits
    rows = re.findall(
        r"^\| [\d.]+B \| (\w+) \|.* ([\d.]+)x \| \d+ \|$", (ROOT / "docs/performance.md").read_text(), re.MULTILINE
    )
    usual, nano = ([ratio for kind, ratio in rows if (kind == "nano") == is_nano] for is_nano in (False, True))
    assert f"{min(usual, key=float)} to {max(usual, key=float)} times as many" in README
    assert f"{nano[0]} times as many on nano-vLLM's benchmark" in README
    (equal,) = re.findall(r"the same numbers \((\d+ comparisons)\)", (ROOT / "docs/peers.md").read_text())
    assert f"the same numbers in all {equal}" in README
    watch = (ROOT / "docs/experiments/health.md").read_text()
    assert "**10 of 10** fresh seeds" in watch and "on 10 of 10 fresh seeds" in README
    assert "**1 false alarm in 2,500 healthy steps**" in watch and "1 false alarm in 2,500 healthy steps" in README
    assert "56 of 75 faulty runs raised an alarm" in watch and "Of 75 runs with 14 kinds of fault it noticed 56" in README


def page_text(name: str) -> str:
    return " ".join((ROOT / "docs" / name).read_text().split())


def test_the_figures_of_the_first_run_are_those_of_its_stored_run() -> None:
    page = (ROOT / "docs" / "first-run.md").read_text()
    stored = json.loads((ROOT / "benchmarks/results/first-run.json").read_text())
    assert f"({stored['date']}, torch {stored['torch'].partition('+')[0]}," in page
    commands = [
        line for block in re.findall(r"^```\w*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) for line in block.splitlines()
    ]
    assert all(each["command"] in commands for each in stored["commands"])
    run, evaluated = (
        next(each for each in stored["commands"] if each["command"].startswith(words))
        for words in ("legato train first.toml", "legato eval")
    )
    assert f"The 40 steps took {run['seconds']:.0f} s" in page
    memory, numerics, last, *table = (line.strip() for line in run["lines"])
    assert memory in page and numerics in page and all(line in page for line in table) and len(table) == 3
    quoted = re.search(r"`(step 40/40 .*?) \.\.\. (held-out sampled \S+) \.\.\. (clipped \S+)`", page)
    assert quoted is not None and all(part in last for part in quoted.groups())
    for name in ("avg@4", "pass@4"):
        (line,) = (line for line in evaluated["lines"] if name in line)
        value, low, high = re.findall(r"([\d.]+)%", line)
        assert f"{value} % for {name} ({low} to {high})" in page


def test_the_figures_of_the_dashboard_page_are_those_of_the_stored_files() -> None:
    page, results = page_text("dashboard.md"), ROOT / "benchmarks" / "results"
    few, every = (json.loads((results / f"{name}.json").read_text()) for name in ("dashboard", "dashboard-all"))
    slowest = {key: max(each[key] for each in few["opened"]) for key in few["opened"][0]}
    fastest = min(each["figures_seconds"] for each in few["opened"])
    assert (
        f"{few['metrics_gigabytes']:.1f} GB of metrics, the page is painted after {slowest['first_paint_seconds']:.1f} s"
        in page
    )
    assert f"all runs are listed after {slowest['list_seconds']:.1f} s" in page
    figures = f"{fastest:.0f} to {slowest['figures_seconds']:.0f} s"
    assert f"after {slowest['sketches_seconds']:.1f} s and as plotly's figures after {figures}" in page
    assert f"the server holds {slowest['server_megabytes']:.0f} MB" in page
    assert f"it holds {every['all_chosen']['server_megabytes']:.0f} MB" in page
    assert f"load {few['load_of_the_machine']:.0f}," in page and f"load {every['load_of_the_machine']:.0f}," in page


def test_figures_that_pages_and_decisions_repeat_are_those_of_the_stored_files() -> None:
    """The first is in a page written by hand, the second in one that is made from a stored file."""
    repeated = {
        ("choosing.md", "ended 38.3 points above `gspo` (97.5 % +2.5 to +74.1, 5 seeds)"): (
            "experiments/credit.md",
            "turn-gspo ended above gspo (+38.3 points, 97.5 % +2.5 to +74.1, 5 seeds)",
        ),
        ("choosing.md", "its lead was 11.6 points (+5.5 to +17.7, 12 seeds) larger"): (
            "experiments/length-trained.md",
            "| GSPO's lead, 600 tokens minus 44 | +0.116 | +0.0552 to +0.177 |",
        ),
        ("choosing.md", "with 609 tokens GSPO ended 8.9 points above GRPO"): (
            "experiments/length-trained.md",
            "end at grpo 30.6 %, gspo 39.6 %",
        ),
        ("choosing.md", "no difference between GRPO and GSPO (3 seeds, +5.0 points, -20 to +30"): (
            "experiments/moe.md",
            "gspo and grpo cannot be told apart (+5.0 points, 95 % -20.1 to +30.1, 3 seeds)",
        ),
        ("choosing.md", "GSPO lost 3 points and GRPO 36"): ("experiments/mismatch-study.md", "| fp8-like | +36.3 ("),
        ("concepts.md", "GSPO left 27.7 % of the tokens"): (
            "experiments/lab.md",
            "GSPO as published left 27.7% of the tokens",
        ),
        ("concepts.md", "would clip 37 to 46 % of the responses"): (
            "performance.md",
            "| 4096 | 0.0e+00, 0.0% | 0.0e+00, 0.0% | 1.7e-03, 36.7% |",
        ),
        ("decisions/0007-the-head-goes-by-rows.md", "by at most 1.8e-05"): ("performance.md", "| 1.12 | 0.11 | 1.8e-05 |"),
        ("decisions/0007-the-head-goes-by-rows.md", "by up to 3.4e-02"): ("performance.md", "| 1.18 | 4.64 | 3.4e-02 |"),
        ("decisions/0012-copies-for-one-call.md", "202 tokens a second in place of 172"): (
            "performance.md",
            "| engine, no copies of the weights | 172 |",
        ),
        ("decisions/0012-copies-for-one-call.md", "317 in place of 207"): (
            "performance.md",
            "| engine | 202 | 2.64 | 317 |",
        ),
        ("decisions/0020-the-engine-is-the-trainer.md", "0.91 to 0.97 times"): (
            "exact.md",
            "| 1.7B | 1.66x | 1.43x | 0.91x | 0.97x |",
        ),
        ("decisions/0020-the-engine-is-the-trainer.md", "a step of 0.6B is 5 % shorter"): (
            "exact.md",
            "On beside off: step -5.0 %",
        ),
    }
    for (page, figure), (source, stored) in repeated.items():
        assert figure in page_text(page), (page, figure)
        assert stored in page_text(source), (source, stored)
    compared, scaling = ranks.compare(ranks.load_results(ranks.RESULTS)), page_text("scaling.md")
    kept = newest_of_kept(compared)
    (commit,) = {each.commit for each in kept.values()}
    most = {shape: 100 * each.high - 100 for shape, each in kept.items()}
    assert (
        f"cost at most {most['0.6B']:.1f} % at 0.6B and {most['1.7B']:.1f} % at 1.7B by the intervals of {commit}" in scaling
    )
    again = next(each for each in compared if each.name == "plain again over plain, 0.6B")
    assert f"the two around it were {100 * again.low - 100:.1f} to {100 * again.high - 100:.1f} % apart" in scaling


def newest_of_kept(compared: Sequence[ranks.Comparison]) -> dict[str, ranks.Comparison]:
    """The newest comparison of FSDP2 that keeps layers with one process, by shape."""
    kept = [each for each in compared if each.name.startswith(f"{ranks.KEPT} over one process")]
    return {each.name.rpartition(" ")[2]: each for each in reversed(kept)}


@pytest.mark.parametrize("name", ["8b-8bit", "8b-offload", "8b-lora"])
def test_the_recipes_of_8b_name_what_was_measured_of_their_shape(name: str) -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "plan.json").read_text())["shapes"][name]
    head = (ROOT / "recipes" / f"qwen3-{name}.toml").read_text().partition("\n\n")[0]
    assert f"measured on an H200: {result['peak_gib']:.1f} GiB and {result['tokens_per_second']:,.0f} tokens/s" in head


def test_the_sizes_of_upcycled_smollm2_follow_from_its_shape() -> None:
    """30 layers of width 576 with an MLP of 1536, of 134.5 million parameters; 16 bytes each with gradient and Adam."""
    page = (ROOT / "docs" / "upcycling.md").read_text()
    dense, mlp = 134_515_008, 30 * 3 * 576 * 1536
    for experts in (4, 8, 16):
        whole, active = (dense + (count - 1) * mlp + 30 * 576 * experts for count in (experts, 2))
        sizes = f"{whole / 1e6:,.1f}M | {active / 1e6:.1f}M | {16 * whole / 1e9:.1f} GB"
        assert f"| {experts} experts, 2 a token | {sizes} |" in page


def test_the_training_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(examples("README.md")[0], names)
    run = names["run"]
    assert 0 <= run.accuracy <= 1
    assert (run.model_folder / "config.json").is_file()
    assert (run.directory / "report.html").is_file()


def test_the_examples_of_the_library_page_run() -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    loss, adaptive = examples("docs/library.md")
    exec(loss, names)
    assert torch.isfinite(names["logits"].grad).all()
    exec(adaptive, names)
    assert names["state"]["auto-clip"]["updates"] == 3


def test_the_part_of_the_parts_page_clips(tmp_path: Path) -> None:
    (code,) = examples("docs/parts.md")
    (tmp_path / "my_clip.py").write_text(code)
    own = legato.algorithm(
        "grpo", {"objective.trust": [f"{tmp_path}/my_clip.py:MyClip"], "objective.trust.my-clip.over": 0.1}
    )
    new = torch.tensor([[0.09, 0.11]]).log1p().double()
    ones = torch.ones(1, 2)
    outcome = legato.loss(
        own, logprobs=new, old_logprobs=torch.zeros_like(new), advantages=ones[:, 0].double(), mask=ones > 0
    )
    assert (outcome.coefficients != 0).tolist() == [[True, False]]


def test_the_engine_of_the_engines_page_answers() -> None:
    names: dict[str, Any] = {}
    exec(examples("docs/engines.md")[0], names)
    policy = SimpleNamespace(tokenizer=SimpleNamespace(eos_token_id=1))
    engine = names["MyEngine"]().build(policy, EngineOptions())
    requests = [Request(prompt=torch.tensor([5]), seeds=(1, 2))]
    engine.submit(requests, Sampling(), Limits(max_response_tokens=4, end_tokens=(1,)))
    (finished,) = engine.poll()
    assert [response.text for response in finished.responses] == ["5", "5"]


@pytest.mark.parametrize("page", ["docs/engines.md", "docs/tools.md"])
def test_the_recipes_of_a_page_load(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert blocks
    for number, text in enumerate(blocks):
        (tmp_path / f"{number}.toml").write_text(text)
        load([tmp_path / f"{number}.toml"])


def spans(page: Path) -> list[str]:
    """The inline code of a page."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_every_option_and_metric_a_page_names_exists(page: Path) -> None:
    known = {option.path for option in options()}
    tables = {path.rpartition(".")[0] for path in known} | {"reward.components.NAME"}
    free = re.compile(r"algorithm\.|task\.(prompt|answer|path|largest)$")  # checked by the algorithm and by the kind of task
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    for span in spans(page):
        for path in re.findall(r"\b(?:task|reward|policy|rollouts|training|evaluation|health|output)\.[a-z_.A-Z]+", span):
            if not path.endswith((".py", ".md", ".toml", ".html", ".json", ".jsonl")):
                assert path in known | tables or free.match(path), f"{page.name}: {path}"
        for key in re.findall(r"^(?:clip|ratio|groups|length|update|router|noise|drift|mismatch)/[a-z_]+", span):
            assert re.search(rf"`{key}`|`{key.rsplit('_', 1)[0]}`", metrics), f"{page.name}: {key}"


def test_every_message_of_the_troubleshooting_page_is_printed_somewhere() -> None:
    sources = [path.read_text() for path in (ROOT / "src" / "legato").rglob("*") if path.suffix in (".py", ".toml")]
    # Strings over several lines are joined, and what is put into a message is cut out of it.
    texts = [re.sub(r"\{[^{}]*\}", "...", re.sub(r'"\s*\n\s*f?"', "", source)) for source in sources]
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    symptoms = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    messages = [message for symptom in symptoms for message in re.findall(r"`([^`]+)`", symptom)]
    pieces = {piece.strip() for message in messages for piece in re.split(r"\.\.\.|\b[NM0-9]+\b", message)}
    checked = [piece for piece in pieces if len(piece) > 15 and not piece.startswith(("legato: command", "pip install"))]
    assert len(checked) >= 12
    for piece in checked:
        assert any(piece in text for text in texts), piece
