"""Translates a configuration of TRL's GRPO (`GRPOConfig`, or the file of `trl grpo --config`) into options of ours.

    translation = read_trl(Path("config.json"))
    translation.options    {"training.lr": 1e-06, ...}: TRL's defaults too, where ours differ
    translation.notes      every difference of meaning, in words
    translation.recipe()   the options as TOML

`peers.py` holds the answer to each option of TRL. No torch is imported here.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import tomli_w

from legato.config import lora_lr
from legato.config.peers import OLD_NAMES, TRL, VERSIONS
from legato.config.sources import Layer, from_words
from legato.diagnostics.words import count
from legato.errors import InputError, nearest

AGGREGATES = {
    "grpo": "sequence-mean",
    "sapo": "sequence-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "cispo": "token-mean",
    "vespo": "token-mean",
    "dr_grpo": "sequence-sum-over-constant",
    "luspo": "sequence-sum",
}
"""loss_type of TRL -> our aggregate."""

UNCLIPPED = ("sapo", "cispo", "vespo")
"""Values of loss_type that replace the clip, like our algorithms of those names; epsilon is not a clip range there."""

_OWN_REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"kind": "math-verify"},
    "think_format_reward": {"kind": "format", "pattern": r"(?s)<think>(?!.*<think>).*</think>.*"},
}
"""Rewards that come with TRL, by their names in a file for `trl grpo`."""

_PUNISHMENT = "get_soft_overlong_punishment"
"""A reward of TRL that is `reward.overlong` here; its component is called "overlong"."""

_OPTIMIZERS = {
    **dict.fromkeys(["adamw_torch", "adamw_torch_fused", "adamw_hf"], "adamw"),
    **dict.fromkeys(["adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"], "adamw-8bit"),
}

_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
}

_NOTHING: tuple[Any, ...] = (None, "", [], {}, False)
_FIELDS_OF_A_WHOLE_CONFIG = 100
"""A configuration with as many options of TRL is a whole GRPOConfig or its `to_json_string()`, and not written by hand."""
_LONGEST_PROMPT = 1024
"""TRL has no limit on prompts; a pack needs one."""


@dataclass(frozen=True, kw_only=True)
class Translation:
    """Options of ours that mean what a configuration of TRL means."""

    options: Mapping[str, Any]
    """Dotted path -> value."""
    origins: Mapping[str, str]
    """Dotted path -> the option of TRL it comes from."""
    notes: Sequence[str]
    """Differences of meaning, and what was left out."""
    reward_weights: Sequence[float] | None = None
    """For rewards that are given in Python as a list."""
    reward_names: Sequence[str] | None = None
    """The component names of that list, in its order; None: no list is given."""
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    source: str = "TRL"

    def for_data(self, problems: int | None, *, plain_text: bool) -> "Translation":
        """The translation for data of so many training problems: epochs become steps. Plain text gets no chat template."""
        return translate(
            self.settings, self.source, problems=problems, plain_text=plain_text, reward_names=self.reward_names
        )

    def for_rewards(self, names: Sequence[str]) -> "Translation":
        """The translation for a list of rewards given in Python, by their component names."""
        return translate(self.settings, self.source, reward_names=names)

    def layer(self) -> Layer:
        """The options with their origins, for `load`."""
        layer = Layer()
        for path, value in self.options.items():
            origin = f"{self.source}: {self.origins[path]}"
            layer.put(_keys(path), value, lambda _, origin=origin: origin)  # type: ignore[misc]
        return layer

    def recipe(self, words: Sequence[str] = ()) -> str:
        """A TOML file with these options and the notes; `words` are options that come on top."""
        layer, above = self.layer(), from_words(words)
        for name, value in above.tree.items():
            layer.put((name,), value, above.origin)
        lines = [f"# Translated by Legato from {self.source}, an option of TRL {VERSIONS['TRL']} behind each value."]
        lines += [f"# - {note}" for note in self.notes]
        for section, table in layer.tree.items():
            lines += ["", f"[{section}]"]
            for path, value in _leaves(table, () if section != "algorithm" else None):
                key = ".".join(path) if section != "algorithm" else path[0] if "." not in path[0] else f'"{path[0]}"'
                lines.append(f"{key} = {_toml(value)}  # {layer.origin((section, *path)).removeprefix(f'{self.source}: ')}")
        return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A value on one line of TOML."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return tomli_w.dumps({"value": value}).strip().removeprefix("value = ")


def _leaves(table: Mapping[str, Any], prefix: tuple[str, ...] | None) -> list[tuple[tuple[str, ...], Any]]:
    """(keys, value) of a table and the tables in it; `prefix` None: the keys of this table are whole paths."""
    leaves: list[tuple[tuple[str, ...], Any]] = []
    for name, value in table.items():
        if isinstance(value, dict) and prefix is not None:
            leaves += _leaves(value, (*prefix, name))
        else:
            leaves.append(((*(prefix or ()), name), value))
    return leaves


def _keys(path: str) -> tuple[str, ...]:
    section, _, rest = path.partition(".")
    return (section, rest) if section == "algorithm" else tuple(path.split("."))


def read_trl(source: Any) -> Translation:
    """The translation of a `GRPOConfig`, a mapping, or a JSON or YAML file."""
    if isinstance(source, str | Path):
        path = Path(source)
        return translate(_read_file(path), str(path))
    if isinstance(source, Mapping):
        return translate(source, "TRL")
    if dataclasses.is_dataclass(source) and not isinstance(source, type):
        return translate(_settings_of(source), type(source).__name__)
    raise InputError(
        f"expected a GRPOConfig, a mapping or the path of a JSON or YAML file, got {type(source).__name__} (trl)"
    )


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if path.suffix in (".yaml", ".yml"):
        tree = _read_yaml(path, text)
    else:
        try:
            tree = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise InputError(f"expected an object with options of TRL, got a {type(tree).__name__} ({path})")
    return tree


def _read_yaml(path: Path, text: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise InputError(f"{path}: YAML needs pyyaml; pip install pyyaml, or write the options as JSON") from None
    try:
        # YAML 1.1 takes 1e-6 for a text; everybody who writes it means the number.
        return _numbers(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from None


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value)
    return float(value) if is_number else value


def _settings_of(config: Any) -> dict[str, Any]:
    """The fields of a dataclass. Unknown fields that have their default are left out: other versions have more."""
    settings = {}
    for each in dataclasses.fields(config):
        value = getattr(config, each.name, None)
        factory = each.default_factory
        default = each.default if factory is dataclasses.MISSING else factory()
        if each.name in TRL or not _same(value, default):
            settings[each.name] = value
    return settings


def distinct_names(names: Sequence[str]) -> list[str]:
    """The names, where one that came before gets its place in the list as an ending: fmt, fmt-2."""
    distinct: list[str] = []
    for name in names:
        distinct.append(name if name not in distinct else f"{name}-{len(distinct) + 1}")
    return distinct


def translate(
    settings: Mapping[str, Any],
    source: str = "TRL",
    *,
    problems: int | None = None,
    plain_text: bool = False,
    reward_names: Sequence[str] | None = None,
) -> Translation:
    """Options of ours for options of TRL by name. All that cannot be translated is raised in one InputError."""
    plain = {name: value.value if isinstance(value, Enum) else value for name, value in settings.items()}
    # transformers writes <HUB_TOKEN> and the like in place of secrets, set or not.
    plain = {name: None if value == f"<{str(name).upper()}>" else value for name, value in plain.items()}
    renamed = {old: new for old, new in OLD_NAMES.items() if old in plain and new not in plain}
    plain = {renamed.get(name, name): value for name, value in plain.items()}
    # Older versions wrote options that are gone by now; those that are switched off ask for nothing.
    unknown_and_off = [name for name, value in plain.items() if name not in TRL and value in (None, False, "", -1, [], {})]
    plain = {name: value for name, value in plain.items() if name not in unknown_and_off}
    job = _Job(settings=plain, source=source, problems=problems, reward_names=reward_names)
    for old, new in renamed.items():
        job.notes.append(f"{old} is called {new} in TRL {VERSIONS['TRL']}")
    if unknown_and_off:
        job.notes.append(
            f"left out, since they are off and TRL {VERSIONS['TRL']} does not have them: {', '.join(unknown_and_off)}"
        )
    unknown = [name for name in plain if name not in TRL]
    if unknown and len(plain) - len(unknown) >= _FIELDS_OF_A_WHOLE_CONFIG:
        # Nobody typed them: a newer TRL or transformers has more fields, and nobody can take them out of an object.
        named = ", ".join(f"{name} = {plain[name]!r}" for name in unknown)
        job.notes.append(
            f"left out, since TRL {VERSIONS['TRL']} does not have them: {named}; look them up in your version: one that"
            " changes training has no counterpart here"
        )
        job.settings = {name: value for name, value in plain.items() if name in TRL}
    else:
        job.faults += [f"{source}: expected options of TRL {VERSIONS['TRL']}, got {n!r}; {_near(n)}" for n in unknown]
    job.faults += [
        f"{source}: {name} = {value!r} cannot be translated: {TRL[name].says}"
        for name, value in plain.items()
        if name in TRL and TRL[name].answer == "refused" and not _same(value, TRL[name].default)
    ]
    if not job.faults:
        for part in (_model, _batch, _optimizer, _sampling, _algorithm, _objective, _reward, _data, _output):
            part(job)
        if plain_text:
            job.put("policy.chat", "never", "prompts that are text get no chat template in TRL")
        _leftovers(job)
    if job.faults:
        raise InputError("\n".join(job.faults))
    return Translation(
        options=job.options,
        origins=job.origins,
        notes=job.notes,
        reward_weights=job.get("reward_weights"),
        reward_names=reward_names,
        settings=plain,
        source=source,
    )


def _near(name: str) -> str:
    return nearest(name, TRL).partition(" Known:")[0] if "did you mean" in nearest(name, TRL) else "drop it"


def _same(value: Any, default: Any) -> bool:
    return bool(value == default) or (_is_nothing(value) and _is_nothing(default))


def _is_nothing(value: Any) -> bool:
    return any(value is each or (type(value) is type(each) and value == each) for each in _NOTHING)


@dataclass(kw_only=True)
class _Job:
    """A translation under way."""

    settings: Mapping[str, Any]
    source: str
    problems: int | None
    reward_names: Sequence[str] | None
    options: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def get(self, name: str) -> Any:
        value = self.settings.get(name)
        return TRL[name].default if value is None else value

    def has(self, name: str) -> bool:
        """Whether an option was set to something else than TRL's default."""
        return self.settings.get(name) is not None and not _same(self.settings[name], TRL[name].default)

    def put(self, path: str, value: Any, origin: str) -> None:
        self.options[path], self.origins[path] = value, origin

    def copy(self, name: str, path: str | None = None, change: Callable[[Any], Any] = lambda value: value) -> None:
        """Set our option to the value of TRL's."""
        value = self.get(name)
        if value is None:
            return
        try:
            self.put(path or TRL[name].ours, change(value), self.describe(name))
        except (TypeError, ValueError, OverflowError):
            self.faults.append(f"{self.source}: expected a {change.__name__}, got {value!r} ({name})")

    def describe(self, *names: str) -> str:
        """The names for the origin of an option, without those that were not set if another one was."""
        present = [name for name in names if self.settings.get(name) is not None]
        return ", ".join(present) or f"default of TRL's {', '.join(names)}"

    def choose(self, name: str, known: Mapping[str, Any]) -> Any:
        """What stands for the value of an option in a table; a fault and None if it is not there."""
        value = self.get(name)
        if value in known:
            return known[value]
        self.faults.append(f"{self.source}: expected one of {', '.join(known)}, got {value!r} ({name}); choose one of them")
        return None

    def number(self, name: str) -> float:
        """A finite number; 1 and a fault if it is not."""
        value = self.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        self.faults.append(f"{self.source}: expected a number, got {value!r} ({name})")
        return 1.0

    def count(self, name: str) -> int:
        """A whole number of at least 1; 1 and a fault if it is not."""
        value = self.get(name)
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and value == int(value) >= 1
        ):
            return int(value)
        self.faults.append(f"{self.source}: expected a whole number of at least 1, got {value!r} ({name})")
        return 1


def _model(job: _Job) -> None:
    job.copy("model_name_or_path")
    if job.has("trust_remote_code"):
        job.copy("trust_remote_code")
    if job.has("use_cpu"):
        job.put("policy.device", "cpu", "use_cpu")
    dtype = job.get("dtype") if job.has("dtype") else None
    for name, value in (job.get("model_init_kwargs") or {}).items():
        if name in ("dtype", "torch_dtype"):
            dtype = str(value).removeprefix("torch.")
        elif name == "trust_remote_code":
            job.put("policy.trust_remote_code", bool(value), "model_init_kwargs")
        elif name not in ("attn_implementation", "use_cache", "device_map"):
            job.faults.append(
                f"{job.source}: model_init_kwargs: expected dtype, trust_remote_code or attn_implementation, got {name!r}"
            )
    if job.settings.get("bf16") is False and not job.has("fp16"):
        dtype = "float32"
    if dtype == "float16":
        job.notes.append("dtype = float16: there is no float16 here; bfloat16 weights with float32 masters are used")
        dtype = "bfloat16"
    if dtype is not None:
        job.put("policy.dtype", dtype, "dtype" if job.has("dtype") else "bf16, model_init_kwargs")
    if job.get("use_peft"):
        job.put("policy.lora.rank", job.count("lora_r"), job.describe("lora_r"))
        job.copy("lora_alpha", change=float)
        targets = job.get("lora_target_modules")
        targets = [] if targets in (None, "all-linear") else [targets] if isinstance(targets, str) else list(targets)
        job.put("policy.lora.targets", targets, job.describe("lora_target_modules"))
        if not targets:
            job.notes.append(
                "lora_target_modules is not set: adapters stand on every linear layer, MLP included; peft chooses fewer"
            )
        if job.number("learning_rate") < lora_lr.LOWEST_USUAL:
            job.notes.append(
                f"learning_rate = {job.number('learning_rate'):g} with adapters: that is a rate for all weights; about 1e-5"
                " is usual with LoRA (training.lr)"
            )
    limit = job.get("max_prompt_length")
    if limit is None and job.get("vllm_max_model_length") is not None:
        limit = job.count("vllm_max_model_length") - job.count("max_completion_length")
    if limit is not None:
        job.put("policy.max_prompt_tokens", limit, job.describe("max_prompt_length", "vllm_max_model_length"))
        job.notes.append(f"a problem whose prompt has more than {limit} tokens is left out (policy.too_long)")
    else:
        job.put("policy.max_prompt_tokens", _LONGEST_PROMPT, "TRL has no limit")
        job.put("policy.too_long", "error", "TRL has no limit")
        job.notes.append(
            f"TRL has no limit on prompts; here policy.max_prompt_tokens is one, {_LONGEST_PROMPT} unless you set it: a"
            " longer prompt ends the run with an error (policy.too_long)"
        )


def _batch(job: _Job) -> None:
    """prompts_per_step, updates_per_step, epochs_per_step and steps."""
    group, device = job.count("num_generations"), job.count("per_device_train_batch_size")
    accumulated, iterations = job.count("gradient_accumulation_steps"), job.count("num_iterations")
    slices = job.count("steps_per_generation") if job.get("steps_per_generation") is not None else accumulated
    processes = 1
    if job.get("generation_batch_size") is not None:
        whole = job.count("generation_batch_size")
        if job.get("steps_per_generation") is None:
            slices = max(1, whole // device)
        # A GRPOConfig that was made holds both: what is left over is the number of processes.
        processes = max(1, whole // (device * slices))
        if whole != device * slices * processes:
            job.faults.append(
                f"{job.source}: expected a multiple of per_device_train_batch_size x steps_per_generation ="
                f" {device * slices}, got {whole} (generation_batch_size); change one of them"
            )
    # Several generations before one update see the same weights: together they are one larger step.
    merged = slices < accumulated and accumulated % slices == 0
    if slices % accumulated and not (merged and iterations == 1):
        job.faults.append(
            f"{job.source}: steps_per_generation = {slices} and gradient_accumulation_steps = {accumulated} do not fit: the"
            " first must be a multiple of the second for an update to come from one batch of rollouts; change one of them"
        )
        return
    updates = 1 if merged else slices // accumulated
    responses = processes * device * max(slices, accumulated)
    if responses % group:
        job.faults.append(
            f"{job.source}: expected a multiple of num_generations = {group}, got {responses} responses a step"
            " (per_device_train_batch_size x steps_per_generation); change one of them"
        )
        return
    prompts = responses // group
    if prompts < updates:
        job.faults.append(
            f"{job.source}: {updates} updates a step need at least {updates} prompts, got {prompts}"
            f" ({responses} responses / num_generations = {group}): an update takes whole groups here; raise"
            " per_device_train_batch_size or lower steps_per_generation"
        )
        return
    job.put("rollouts.samples_per_prompt", group, job.describe("num_generations"))
    job.put("training.prompts_per_step", prompts, job.describe("per_device_train_batch_size", "num_generations"))
    job.put("training.updates_per_step", updates, job.describe("steps_per_generation", "gradient_accumulation_steps"))
    job.put("training.epochs_per_step", iterations, job.describe("num_iterations"))
    job.notes.append(
        f"a step samples {responses} responses = {count(prompts, 'prompt')} x {group}, for"
        f" {count(updates * iterations, 'update')}, as TRL does with {processes} process{'es' if processes > 1 else ''};"
        " with others multiply training.prompts_per_step"
    )
    if updates > 1:
        job.notes.append("TRL shuffles the responses of a step over its updates; here an update takes whole groups")
    most = job.number("max_steps")
    if most > 0:
        steps = math.ceil(most / (updates * iterations))
        job.put("training.steps", steps, f"max_steps, in updates: {updates * iterations} a step")
    elif job.problems is not None:
        steps = max(1, math.ceil(job.number("num_train_epochs") * job.problems / prompts))
        job.put("training.steps", steps, f"{job.describe('num_train_epochs')}, of {job.problems} problems")
    else:
        job.notes.append(
            f"num_train_epochs = {job.number('num_train_epochs'):g}: training.steps is epochs x problems / {prompts}, once"
            " the data is known"
        )


def _optimizer(job: _Job) -> None:
    for name in ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "seed"):
        job.copy(name, change=int if name == "seed" else float)
    job.put(
        "training.betas",
        [job.number("adam_beta1"), job.number("adam_beta2")],
        job.describe("adam_beta1", "adam_beta2"),
    )
    job.put("training.optimizer", job.choose("optim", _OPTIMIZERS), job.describe("optim"))
    kind = job.get("lr_scheduler_type")
    job.put("training.schedule", job.choose("lr_scheduler_type", _SCHEDULES), job.describe("lr_scheduler_type"))
    kwargs = job.get("lr_scheduler_kwargs") or {}
    for name, value in kwargs.items():
        if kind == "cosine_with_min_lr" and name in ("min_lr", "min_lr_rate"):
            share = float(value) / (job.number("learning_rate") if name == "min_lr" else 1.0)
            job.put("training.final_lr_share", share, "lr_scheduler_kwargs")
        else:
            job.faults.append(f"{job.source}: lr_scheduler_kwargs: {name!r} of {kind!r} has no counterpart; drop it")
    option = "warmup_ratio" if job.has("warmup_ratio") else "warmup_steps"
    warm_up, names = job.number(option), job.describe(option)
    if not warm_up:
        return
    if warm_up >= 1:
        job.put("training.warm_up_updates", int(warm_up), names)
    elif "training.steps" in job.options:
        updates = job.options["training.updates_per_step"] * job.options["training.epochs_per_step"]
        job.put("training.warm_up_updates", math.ceil(warm_up * job.options["training.steps"] * updates), names)
    else:
        job.notes.append(f"warm-up over {warm_up:g} of all updates: training.warm_up_updates, once training.steps is known")
    job.notes.append("the learning rate of the first warm-up update is lr / training.warm_up_updates here, and 0 in TRL")


def _sampling(job: _Job) -> None:
    for name in ("temperature", "top_p", "min_p"):
        job.copy(name, change=float)
    job.copy("top_k", change=lambda value: max(0, int(value)))
    job.put("rollouts.max_response_tokens", job.count("max_completion_length"), job.describe("max_completion_length"))
    if job.get("chat_template_kwargs"):
        job.copy("chat_template_kwargs", change=dict)
    if job.has("shuffle_dataset"):
        job.copy("shuffle_dataset")
    if job.has("router_aux_loss_coef"):
        job.copy("router_aux_loss_coef", change=float)


def _algorithm(job: _Job) -> None:
    """The named algorithm, its ratio, clip and aggregate, and the advantage."""
    level, loss = job.get("importance_sampling_level"), job.get("loss_type")
    if level not in ("token", "sequence"):
        job.faults.append(f"{job.source}: expected 'token' or 'sequence', got {level!r} (importance_sampling_level)")
        return
    aggregate = job.choose("loss_type", AGGREGATES)
    if aggregate is None:
        return
    sequence = level == "sequence"
    name = loss if loss in UNCLIPPED else "luspo" if loss == "luspo" and sequence else "gspo" if sequence else "grpo"
    job.put("algorithm.name", name, job.describe("importance_sampling_level", "loss_type"))
    job.put("algorithm.aggregate", aggregate, job.describe("loss_type"))
    job.put("task.resampling", "none", "TRL samples each prompt once")
    low = job.number("epsilon")
    high = low if job.get("epsilon_high") is None else job.number("epsilon_high")
    if loss == "cispo":
        job.put("algorithm.objective.trust.weight-clip.cap", high, job.describe("epsilon_high"))
        if high < 1:
            job.notes.append(f"epsilon_high = {high:g} with loss_type = 'cispo' caps every weight below 1; 5 is usual")
    elif loss == "sapo":
        job.copy("sapo_temperature_pos", change=float)
        job.copy("sapo_temperature_neg", change=float)
    elif loss == "vespo":
        for key in ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"):
            job.copy(key, change=float)
    else:
        job.put("algorithm.objective.trust.clip.low", low, job.describe("epsilon"))
        job.put("algorithm.objective.trust.clip.high", high, job.describe("epsilon_high", "epsilon"))
        if job.get("delta") is not None:
            job.copy("delta", change=float)
    if loss in ("sapo", "cispo") and sequence:
        job.put("algorithm.objective.ratio.level", "sequence", job.describe("importance_sampling_level"))
    _against_the_papers(job, level=level, loss=loss, low=low)
    scaled = {True: "group", False: "none"}.get(job.get("scale_rewards"), job.get("scale_rewards"))
    advantages = {"group": "group-z", "batch": "group-centre-batch-std", "none": "group-centre"}
    if scaled not in advantages:
        job.faults.append(f"{job.source}: expected one of {', '.join(advantages)}, got {scaled!r} (scale_rewards)")
        return
    origin = job.describe("scale_rewards")
    if job.get("multi_objective_aggregation") == "normalize_then_sum":
        job.put("algorithm.advantage", "gdpo", "multi_objective_aggregation")
        if job.get("reward_weights"):
            _component_weights(job)
        origin, scaled = "multi_objective_aggregation", "group"
    else:
        job.put("algorithm.advantage", advantages[scaled], origin)
    if scaled != "none":
        job.put("algorithm.advantage.ddof", 1, origin)
        job.put("algorithm.advantage.epsilon", 1e-4, origin)
        job.notes.append(
            "advantages are divided by the sample deviation + 1e-4, as in TRL; the papers' deviation is advantage.ddof = 0"
        )


def _component_names(job: _Job) -> list[str] | None:
    """The names of the reward's components, in the order of reward_weights; None if the settings do not tell them."""
    if job.reward_names is not None:
        return list(job.reward_names)
    functions = job.get("reward_funcs")
    if not functions or not isinstance(functions, list) or not all(isinstance(name, str) for name in functions):
        return None
    return _names_of_functions(functions)


def _names_of_functions(functions: Sequence[str]) -> list[str]:
    """The component names of reward_funcs, in their order."""
    return distinct_names(["overlong" if name == _PUNISHMENT else name.rpartition(".")[2] for name in functions])


def _component_weights(job: _Job) -> None:
    """Put reward_weights in the order in which a batch has its components, which is that of their names."""
    weights, names = [float(each) for each in job.get("reward_weights")], _component_names(job)
    if names is None:
        job.notes.append(
            "multi_objective_aggregation = 'normalize_then_sum': algorithm.advantage.weights has one weight per component,"
            " sorted by the components' names; the configuration names no rewards, so reward_weights stand there in their"
            " own order"
        )
    elif len(names) == len(weights):
        weights = [weight for _, weight in sorted(zip(names, weights, strict=True))]
    job.put("algorithm.advantage.weights", weights, "reward_weights")


def _against_the_papers(job: _Job, *, level: str, loss: str, low: float) -> None:
    """Notes on settings of TRL that differ from the papers of GRPO and GSPO."""
    if loss in ("dapo", "bnpo"):
        paper = "GSPO is a mean of responses" if level == "sequence" else "GRPO is a mean of responses"
        which = "" if job.has("loss_type") else ", the default of TRL,"
        job.notes.append(
            f"loss_type = {loss!r}{which} divides by tokens, so long responses weigh more; {paper}: loss_type = 'grpo', here"
            " algorithm.aggregate = 'sequence-mean'"
        )
    if loss == "bnpo":
        job.notes.append("loss_type = 'bnpo' divides by the tokens of each micro-batch; here by those of the whole update")
    if level == "sequence" and loss not in UNCLIPPED and low > 0.01:
        job.notes.append(
            f"epsilon = {low:g} is the clip of a token ratio: on a sequence ratio it never clips. The GSPO paper has 3e-4"
            " and 4e-4: algorithm.objective.trust.clip.low and .high"
        )
    updates = job.options.get("training.updates_per_step", 1) * job.options.get("training.epochs_per_step", 1)
    if updates == 1 and loss not in ("vespo",):
        job.notes.append(
            "one update per step (steps_per_generation = gradient_accumulation_steps): every ratio is 1, nothing is clipped,"
            " and token and sequence level are one; the GSPO paper has training.updates_per_step = 4"
        )


def _objective(job: _Job) -> None:
    """Penalties, masks and corrections."""
    level, loss = job.get("importance_sampling_level"), job.get("loss_type")
    if job.get("beta"):
        corrected = bool(job.get("use_bias_correction_kl"))
        part = "kl-ratio-weighted" if corrected else "kl"
        job.put(f"algorithm.objective.penalties.{part}.beta", job.number("beta"), job.describe("beta"))
        if corrected and level == "sequence":
            job.notes.append(
                "use_bias_correction_kl: TRL weighs the KL of a token by the ratio of the response, here by its own"
            )
    if job.get("off_policy_mask_threshold") is not None:
        job.copy("off_policy_mask_threshold", change=float)
        anchor = "sampler" if job.get("use_vllm") else "old"
        job.put("algorithm.objective.trust.opsm.anchor", anchor, job.describe("use_vllm"))
    if job.has("top_entropy_quantile"):
        job.copy("top_entropy_quantile", change=float)
    if job.get("use_adaptive_entropy"):
        for name in ("entropy_target", "entropy_coef_delta", "entropy_coef_max"):
            job.copy(name, change=float)
        if job.has("entropy_coef") or job.has("entropy_coef_min"):
            job.notes.append("use_adaptive_entropy: the coefficient starts at 0 and may fall to 0 here")
    elif job.get("entropy_coef"):
        job.copy("entropy_coef", change=float)
    if job.get("mask_truncated_completions"):
        job.put("algorithm.filters", ["overlong"], "mask_truncated_completions")
        kept = "kept" if loss in ("dapo", "bnpo", "cispo", "vespo") else "all"
        job.put("algorithm.aggregate.denominator", kept, f"mask_truncated_completions with loss_type = {loss!r}")
    if job.get("use_vllm") and job.get("vllm_importance_sampling_correction"):
        _correction(job)


def _correction(job: _Job) -> None:
    mode = job.get("vllm_importance_sampling_mode")
    modes = {f"{level}_{kind}": (level, kind) for level in ("token", "sequence") for kind in ("mask", "truncate")}
    if mode not in modes:
        job.faults.append(f"{job.source}: expected one of {', '.join(modes)}, got {mode!r} (vllm_importance_sampling_mode)")
        return
    level, kind = modes[mode]
    cap, floor = job.get("vllm_importance_sampling_clip_max"), job.get("vllm_importance_sampling_clip_min")
    cap = job.get("vllm_importance_sampling_cap") or cap
    if floor is not None and kind == "truncate":
        job.faults.append(
            f"{job.source}: vllm_importance_sampling_clip_min = {floor!r} has no counterpart in a truncate mode; drop it"
        )
        return
    part = "tis" if kind == "truncate" else "mis" if floor is None else "icepop"
    path = f"algorithm.objective.corrections.{part}"
    job.put(f"{path}.cap", float(cap), job.describe("vllm_importance_sampling_clip_max"))
    job.put(f"{path}.level", "token" if level == "token" else "product", job.describe("vllm_importance_sampling_mode"))
    if floor is not None:
        job.put(f"{path}.floor", float(floor), job.describe("vllm_importance_sampling_clip_min"))
    job.notes.append(
        "use_vllm: Legato samples with its own engine from the weights that are trained. TRL's correction for vLLM is kept"
        f" ({path}); its weights are close to 1 here, and you may drop it"
    )


def _reward(job: _Job) -> None:
    names, weights = job.get("reward_funcs") or [], job.get("reward_weights")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        job.faults.append(f"{job.source}: expected a list of names, got {names!r} (reward_funcs)")
        return
    if weights is not None and names and len(weights) != len(names):
        job.faults.append(
            f"{job.source}: expected {len(names)} reward_weights, one for each of reward_funcs, got {len(weights)}"
        )
        return
    if weights is not None and not names:
        job.notes.append(
            f"reward_weights = {list(weights)} belong to the list of rewards: legato.train(reward=[...]) takes them; in a"
            " recipe each is reward.components.NAME.weight"
        )
        return
    tables: dict[str, dict[str, Any]] = {}
    triples = zip(names, _names_of_functions(names), weights or [1.0] * len(names), strict=True)
    for name, component, weight in triples:
        if name == _PUNISHMENT:
            job.put("reward.overlong.cache_share", 0.2, "reward_funcs")
            job.put("reward.overlong.factor", float(weight), "reward_funcs, reward_weights")
            job.notes.append(
                f"{_PUNISHMENT} becomes reward.overlong.cache_share = 0.2: the punishment grows over the last 20 % of"
                f" max_completion_length, up to reward.overlong.factor = {float(weight):g}; in TRL its own arguments decide,"
                " max_completion_len and soft_punish_cache"
            )
            continue
        module, _, function = name.rpartition(".")
        if name not in _OWN_REWARDS and not module:
            job.faults.append(
                f"{job.source}: expected {', '.join(_OWN_REWARDS)} or a dotted path to a function, got {name!r}"
                " (reward_funcs)"
            )
            continue
        own = {"kind": f"{module}:{function}"}
        judges = {"judges": False} if tables else {}
        tables[component] = {**_OWN_REWARDS.get(name, own), "weight": float(weight), **judges}
    if job.reward_names is None:
        _note_the_judge(job, list(tables))
    scoring = [name for name in names if name != _PUNISHMENT]
    if "accuracy_reward" in scoring and all(name in _OWN_REWARDS for name in scoring):
        job.put("task.answer", "solution", "accuracy_reward reads the column solution")
    for name, table in tables.items():
        for key, value in table.items():
            if len(tables) > 1 or weights is not None:
                job.put(f"reward.components.{name}.{key}", value, "reward_funcs, reward_weights")
            elif key != "weight":
                job.put(f"reward.{key}", value, "reward_funcs")


def _note_the_judge(job: _Job, names: Sequence[str]) -> None:
    """Note which of several rewards decides whether an answer is right."""
    if len(names) > 1:
        job.notes.append(
            f"the first reward, {names[0]}, decides whether an answer is right, so accuracy is its mean; the others shape"
            " (reward.components.NAME.judges)"
        )


def _data(job: _Job) -> None:
    if job.get("dataset_name") is None:
        job.options.pop("task.answer", None)
        return
    job.put("task.kind", "dataset", "dataset_name")
    job.copy("dataset_name")
    job.copy("dataset_config")
    job.copy("dataset_train_split")
    if "task.answer" not in job.options:
        job.put("task.answer", False, "TRL's rewards read columns by name")


def _output(job: _Job) -> None:
    updates = job.options.get("training.updates_per_step", 1) * job.options.get("training.epochs_per_step", 1)
    steps = job.options.get("training.steps")

    def in_steps(value: float) -> int:
        if value < 1:
            value = value * (steps or 1) * updates
        return max(1, int(value / updates + 0.5))

    evaluates = job.get("eval_strategy")
    every = job.number("eval_steps" if job.get("eval_steps") else "logging_steps")
    job.put(
        "evaluation.every_steps",
        in_steps(every) if evaluates == "steps" else 0,
        job.describe("eval_strategy", "eval_steps"),
    )
    if evaluates != "no":
        samples = job.count("num_generations_eval" if job.get("num_generations_eval") else "num_generations")
        job.put("evaluation.samples_per_problem", samples, job.describe("num_generations_eval"))
    saves = job.get("save_strategy")
    if saves in ("steps", "no"):
        value = in_steps(job.number("save_steps")) if saves == "steps" else 0
        job.put("output.checkpoint_every_steps", value, job.describe("save_strategy", "save_steps"))
    for name, value in (("eval_strategy", evaluates), ("save_strategy", saves)):
        if value not in ("steps", "no"):
            job.notes.append(f"{name} = {value!r}: set {TRL[name].ours}, in steps")
    job.copy("save_total_limit")
    job.notes.append(
        "a fifth of the problems is held out for evaluation and never trained on (task.held_out_share); TRL trains on all"
    )
    folder = job.get("output_dir")
    name = "" if folder in (None, "trainer_output") else Path(folder).name
    if name not in ("", ".."):
        job.put("output.directory", str(Path(folder).parent), "output_dir")
        job.put("output.name", name, "output_dir")
    else:
        if folder not in (None, "trainer_output"):
            job.put("output.directory", str(Path(folder)), "output_dir")
        if job.has("run_name"):
            job.copy("run_name")
    trackers = job.get("report_to")
    for tracker in [trackers] if isinstance(trackers, str) else trackers or []:
        if tracker in ("wandb", "tensorboard", "trackio"):
            job.put(f"output.{tracker}", True, "report_to")
        elif tracker != "none":
            job.notes.append(
                f"report_to = {tracker!r}: output.wandb, output.trackio and output.tensorboard exist;"
                " docs/configuration.md lists all"
            )
    if job.has("project"):
        job.copy("project")


def _leftovers(job: _Job) -> None:
    """Notes on what was set and has no counterpart."""
    for name in job.settings:
        key = TRL[name]
        if key.answer == "left out" and job.has(name) and not (name == "lora_dropout" and not job.get("use_peft")):
            job.notes.append(f"{name} is left out: {key.says}" + (f" ({key.ours})" if key.ours else ""))
    silent = [name for name in job.settings if TRL[name].answer == "no effect" and job.has(name)]
    if silent:
        job.notes.append(f"nothing to set for {', '.join(silent)}: results do not depend on them here (docs/migrating.md)")
