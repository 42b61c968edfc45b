"""`legato doctor`: diagnoses a run, or the log of another trainer. User code named by a run is not imported.

Settings of TRL and verl are translated to the equivalent algorithm here; the cautions of `legato explain` for that algorithm
become findings.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from legato.algorithms.algorithm import Algorithm
from legato.algorithms.catalogue import entry, is_published
from legato.algorithms.cautions import cautions
from legato.algorithms.override import override
from legato.config import lora_lr
from legato.config.from_trl import AGGREGATES, UNCLIPPED
from legato.config.load import load
from legato.config.peers import TRL
from legato.core.parts import nearest
from legato.diagnostics.words import count
from legato.errors import InputError
from legato.health import foreign
from legato.health.actions import inapplicable_rules
from legato.health.explain import (
    Diagnosis,
    Record,
    explain,
    has_gaps,
    rank,
    rules_with_enough_steps,
    rules_with_metrics,
    steps_of,
)
from legato.health.rules import RULES
from legato.records.directory import RunDirectory
from legato.run.missing import check_log

DEFAULTS: dict[str, Any] = {
    name: TRL[name].default
    for name in (
        *("importance_sampling_level", "epsilon", "epsilon_high", "loss_type", "num_iterations"),
        *("gradient_accumulation_steps", "steps_per_generation", "use_peft", "learning_rate"),
    )
}
"""The settings of TRL that findings depend on, with the defaults of TRL for those that are not given."""

_AGGREGATES_OF_VERL = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
}
"""loss_agg_mode of verl -> loss_type of TRL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The result of `examine`."""

    title: str
    facts: tuple[str, ...]
    found: tuple[Diagnosis, ...]
    judged: int
    """Rules whose numbers were recorded."""
    tested: int
    """Rules that also had enough steps to be tested."""
    steps: int
    rules: int = len(RULES)


def examine(path: Path, words: Sequence[str] = (), columns: Mapping[str, str] | None = None) -> Examination:
    """Diagnose a run directory, or the log of another trainer with its settings as words (epsilon=0.2)."""
    check_log(path)
    if path.name == "metrics.jsonl" and (path.parent / "config.toml").is_file():
        path = path.parent
    if (path / "metrics.jsonl").is_file() and (path / "config.toml").is_file():
        if words or columns:
            raise InputError(
                f"expected no words and no --column for a run of Legato, got some ({path}); they are for other logs"
            )
        return _examine_run(RunDirectory.open(path))
    if path.suffix == ".toml":
        raise InputError(
            f"expected a run directory or a log (trainer_state.json, .jsonl, .csv), got {path}, which is a configuration;"
            f" train with it first: legato train {path}"
        )
    log = foreign.find_log(path)
    if log is None:
        inside = _runs_in(path)
        if inside:
            listed = ", ".join(map(str, inside[:20])) + (" ..." if len(inside) > 20 else "")
            raise InputError(f"{path} is no run itself but holds {count(len(inside), 'run')}; name one of them: {listed}")
        raise InputError(
            f"{path} is no run directory (config.toml, metrics.jsonl) and holds no trainer_state.json; name the file itself,"
            " as in: legato doctor logs/metrics.csv --column reward/mean=reward"
        )
    records = foreign.read_log(log, columns)
    diagnoses = [_in_terms_of_trl(each) for each in (*explain(records), *(_trl_findings(words, records) if words else []))]
    return _summarize(str(log), _facts(records), diagnoses, records)


def _runs_in(path: Path) -> list[Path]:
    """The run directories in a folder; those of a comparison are nested deeper."""
    candidates = (file.parent for pattern in ("*", "*/*", "*/*/*") for file in sorted(path.glob(f"{pattern}/metrics.jsonl")))
    return [folder for folder in candidates if (folder / "config.toml").is_file()]


def _summarize(
    title: str, facts: Sequence[str], diagnoses: Sequence[Diagnosis], records: Sequence[Record], warming: int = 0
) -> Examination:
    return Examination(
        title=title,
        facts=tuple(facts),
        found=tuple(rank(diagnoses)),
        judged=len(rules_with_metrics(records)),
        tested=len(rules_with_enough_steps(records, warming)),
        steps=len(steps_of(records)),
    )


def _in_terms_of_trl(diagnosis: Diagnosis) -> Diagnosis:
    return replace(
        diagnosis,
        says=foreign.add_trl_names(diagnosis.says),
        causes=tuple(foreign.add_trl_names(each) for each in diagnosis.causes),
        tries=tuple(foreign.add_trl_names(each) for each in diagnosis.tries),
    )


def _examine_run(directory: RunDirectory) -> Examination:
    records: list[Record] = [*directory.metrics(), *directory.health.read()]
    if not steps_of(records):
        raise InputError(f"{directory.path} holds no step: the run ended before its first was done, or has only begun")
    facts, diagnoses = _facts(records), list[Diagnosis]()
    warming, ignored, lr = 0, tuple[str, ...](), None
    names: dict[str, Any] = {"algorithm": "unknown algorithm", "model": "unknown model"}
    try:
        resolved = load([directory.config_path])
    except InputError as error:
        facts.append(f"its settings could not be read: {str(error).splitlines()[0]}")
    else:
        names = {"algorithm": resolved.algorithm.name, "model": resolved.config.policy.model}
        training = resolved.config.training
        updates = training.updates_per_step * training.epochs_per_step
        warming, ignored, lr = training.warm_up_steps, inapplicable_rules(resolved.algorithm), training.lr
        diagnoses = setting_findings(resolved.algorithm, updates, records, "training.updates_per_step")
        diagnoses += lora_findings(lr if resolved.config.policy.lora is not None else None)
    diagnoses += explain(
        records,
        settled=warming,
        ignored=ignored,
        run=str(directory.path),
        checkpoints=directory.checkpoint_steps(),
        lr=lr,
    )
    start = {**names, **next((record for record in records if record.get("kind") == "start"), {})}
    title = f"{directory.name}: {start['algorithm']} on {start['model']}"
    return _summarize(title, facts, diagnoses, records, warming)


def _facts(records: Sequence[Record]) -> list[str]:
    steps = steps_of(records)
    rewards = _finite(steps, "reward/mean")
    newest = max(int(step["step"]) for step in steps)
    facts = [f"{count(len(steps), 'row' if has_gaps(steps) else 'step')} recorded, to step {newest}"]
    if rewards:
        many = max(1, min(20, len(rewards) // 4))
        first, last = sum(rewards[:many]) / many, sum(rewards[-many:]) / many
        facts.append(
            f"reward {first:.3g} over the first {many} of them, {last:.3g} over the last, at best {max(rewards):.3g}"
        )
    if any(record.get("kind") == "start" for record in records):
        reasons = [str(record.get("reason")) for record in records if record.get("kind") == "end"]
        facts.append(f"ended: {reasons[-1]}" if reasons else "no end recorded: the run goes on, or was killed")
    return facts


def _finite(steps: Sequence[Record], key: str) -> list[float]:
    values = (step.get(key) for step in steps)
    return [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]


def setting_findings(algorithm: Algorithm, updates: float, records: Sequence[Record], option: str) -> list[Diagnosis]:
    """Findings about settings: cautions that the published algorithm does not have, and a clip that never takes effect."""
    published = set(cautions(entry(algorithm.name).value)) if is_published(algorithm.name) else set()
    clipped = _finite(steps_of(records), "clip/tokens")
    evidence = (f"clipped on average: {sum(clipped) / len(clipped):.2%} of the tokens",) if clipped else ()
    findings = [
        Diagnosis(name="settings", level="warning", says=sentence, evidence=evidence, lasting=True)
        for sentence in cautions(algorithm)
        if sentence not in published
    ]
    if updates <= 1 and algorithm.objective.ratio.name != "none" and algorithm.objective.trust:
        findings.append(
            Diagnosis(
                name="settings",
                level="warning",
                says="One update per rollout: the policy that is updated is the one that sampled, every ratio is 1 and the"
                " trust region never acts. The choice between a token ratio and a sequence ratio is then no choice.",
                evidence=evidence,
                causes=("each batch of rollouts is used for one optimizer step",),
                tries=(f"{option} = 4, as in the GSPO paper, for ratios to matter", "or take it for what it is: REINFORCE"),
                lasting=True,
            )
        )
    return findings


def lora_findings(lr: float | None) -> list[Diagnosis]:
    """The finding that adapters are trained with a learning rate for all weights. `lr` None: there are no adapters."""
    if lr is None or lr >= lora_lr.LOWEST_USUAL:
        return []
    return [
        Diagnosis(
            name="settings",
            level="warning",
            says="LoRA with a learning rate for all weights: adapters need about ten times as much, and learn little here.",
            evidence=(f"the learning rate is {lr:g}",),
            causes=("the learning rate of a full fine-tuning was kept",),
            tries=("training.lr = 1e-5, or up to 1e-4 while the ratio stays in its band",),
            lasting=True,
        )
    ]


def _trl_findings(words: Sequence[str], records: Sequence[Record]) -> list[Diagnosis]:
    settings = _settings(words)
    trl = {**DEFAULTS, **settings}
    level = trl["importance_sampling_level"]
    if level not in ("token", "sequence"):
        raise InputError(f"expected 'token' or 'sequence', got {level!r} (importance_sampling_level)")
    low = _positive("epsilon", trl["epsilon"])
    high = low if trl["epsilon_high"] is None else _positive("epsilon_high", trl["epsilon_high"])
    loss = trl["loss_type"]
    if loss not in AGGREGATES:
        raise InputError(f"expected a loss_type of TRL, got {loss!r}; {nearest(str(loss), AGGREGATES)}")
    changes: dict[str, Any] = {"aggregate": AGGREGATES[loss]}
    if loss == "dr_grpo":
        changes["aggregate.constant"] = 1.0  # max_completion_length; no finding depends on its size
    if loss in UNCLIPPED:
        changes |= {"objective.ratio.level": level} if loss != "vespo" else {}
        algorithm = override(entry(loss).value, changes)
    else:
        changes |= {"objective.trust.clip.low": low, "objective.trust.clip.high": high}
        algorithm = override(entry("gspo" if level == "sequence" else "grpo").value, changes)
    accumulated = _positive("gradient_accumulation_steps", trl["gradient_accumulation_steps"])
    generated = trl["steps_per_generation"]
    each = accumulated if generated is None else _positive("steps_per_generation", generated)
    updates = _positive("num_iterations", trl["num_iterations"]) * each / accumulated
    findings = setting_findings(algorithm, updates, records, "steps_per_generation / gradient_accumulation_steps")
    if str(trl["use_peft"]).lower() in ("true", "1", "1.0"):
        logged = _finite(steps_of(records), "optimizer/lr")
        rate = _positive("learning_rate", trl["learning_rate"])
        findings += lora_findings(rate if "learning_rate" in settings else max(logged, default=rate))
    return findings


def _settings(words: Sequence[str]) -> dict[str, Any]:
    """Settings of TRL from words. Those of verl are translated."""
    settings: dict[str, Any] = {}
    batches: dict[str, float] = {}
    for word in words:
        name, _, text = word.partition("=")
        last = name.rpartition(".")[2]
        if last in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            settings |= dict([_setting(f"{'epsilon_high' if last == 'clip_ratio_high' else 'epsilon'}={text}")])
        elif last == "loss_mode":
            losses = {"sapo": "sapo", "cispo": "cispo"}
            settings |= {"loss_type": losses[text]} if text in losses else {}
            settings["importance_sampling_level"] = "sequence" if text == "gspo" else "token"
        elif last == "loss_agg_mode":
            if text not in _AGGREGATES_OF_VERL:
                raise InputError(f"expected a loss_agg_mode of verl, got {text!r}; {nearest(text, _AGGREGATES_OF_VERL)}")
            settings.setdefault("loss_type", _AGGREGATES_OF_VERL[text])
        elif last == "ppo_epochs":
            settings |= dict([_setting(f"num_iterations={text}")])
        elif last in ("train_batch_size", "ppo_mini_batch_size"):
            batches[last] = _positive(last, _setting(f"epsilon={text}")[1])
        else:
            settings |= dict([_setting(word)])
    if len(batches) == 2:
        settings["steps_per_generation"] = max(1.0, batches["train_batch_size"] / batches["ppo_mini_batch_size"])
    elif batches:
        raise InputError(f"expected train_batch_size and ppo_mini_batch_size, got only {next(iter(batches))}; give both")
    return settings


def _setting(word: str) -> tuple[str, Any]:
    name, sign, text = word.partition("=")
    if not sign or name not in DEFAULTS:
        raise InputError(f"expected a setting of TRL such as epsilon=0.2, got {word!r}; {nearest(name, DEFAULTS)}")
    if text in ("None", "none", "null", ""):
        return name, DEFAULTS[name]
    try:
        return name, float(text)
    except ValueError:
        return name, text


def _positive(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or not value > 0:
        raise InputError(f"expected a number above 0, got {value!r} ({name})")
    return float(value)
