"""Finds options that do not exist, without importing torch: a misspelt name is refused in a moment.

The declarations of the options stand beside the code that uses them and load torch. Their names are in `names.py`, which
`make docs` writes from the declarations. `load.py` checks everything else.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as File
from typing import Any

from legato.config.locate import Path
from legato.config.names import NAMES, OPEN
from legato.config.sources import Layer, from_file, from_words, split_words
from legato.errors import InputError, nearest

NAMES_OF_TRL = {
    "adam_epsilon": "training.epsilon",
    "beta": "algorithm.objective.penalties.kl.beta",
    "epsilon": "algorithm.objective.trust.clip.low",
    "epsilon_high": "algorithm.objective.trust.clip.high",
    "eval_steps": "evaluation.every_steps",
    "learning_rate": "training.lr",
    "lr_scheduler_type": "training.schedule",
    "max_completion_length": "rollouts.max_response_tokens",
    "max_grad_norm": "training.gradient_clip",
    "max_prompt_length": "policy.max_prompt_tokens",
    "max_steps": "training.steps",
    "model_name_or_path": "policy.model",
    "num_generations": "rollouts.samples_per_prompt",
    "num_iterations": "training.epochs_per_step",
    "output_dir": "output.directory",
    "run_name": "output.name",
    "save_steps": "output.checkpoint_every_steps",
    "save_total_limit": "output.keep_last",
    "warmup_steps": "training.warm_up_updates",
}
"""Option name in TRL -> path here, for suggestions."""


def refuse_unknown_options(arguments: Sequence[str]) -> None:
    """InputError, a line for each, if recipes or `path=value` words name options that do not exist."""
    files, words = split_words(arguments)
    merged = Layer()
    for layer in (*(from_file(File(file)) for file in files), from_words(words)):
        for name, value in layer.tree.items():
            merged.put((name,), value, layer.origin)
    faults = list(_unknown(merged.tree, (), "", merged))
    if faults:
        raise InputError("\n".join(faults))


def _unknown(tree: Mapping[str, Any], path: Path, table: str, layer: Layer) -> Iterator[str]:
    """A line for each unknown name in a table and below it. `table`: its key in NAMES."""
    known = NAMES[table]
    for name in known:
        inner = f"{table}.{name}".lstrip(".")
        if inner in NAMES and isinstance(tree.get(name), dict):
            yield from _unknown(tree[name], (*path, name), inner, layer)
    if table not in OPEN:
        for name in tree:
            if name not in known:
                yield unknown_option((*path, name), layer.origin((*path, name)), known)


def unknown_option(path: Path, origin: str, siblings: Sequence[str]) -> str:
    """The message about an option that does not exist. It suggests the option behind a name of TRL, the same name in another
    section, or the nearest sibling."""
    name = path[-1]
    elsewhere = [f"{outer}.{name}" for outer in NAMES[""] if name in NAMES.get(outer, ())]
    if name in NAMES_OF_TRL:
        elsewhere = [NAMES_OF_TRL[name].removeprefix("".join(f"{word}." for word in path[:-1]))]
    suggestion = nearest(name, siblings)
    if elsewhere:
        suggestion = f"did you mean {elsewhere[0]!r}? Known here: {', '.join(siblings)}"
    return f"{'.'.join(path)} ({origin}) does not exist; {suggestion}"
