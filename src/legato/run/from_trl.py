"""Loads a configuration that starts from one of TRL's, and fits it to the data."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from legato.config.from_trl import Translation
from legato.config.load import load
from legato.config.resolved import Resolved
from legato.errors import InputError
from legato.run import wire

_MISSING = {
    "task.kind": ("data", "task.kind=jsonl task.path=train.jsonl"),
    "reward.kind": ("reward", "reward.kind=rewards.py:name"),
    "policy.model": ("model", "policy.model=Qwen/Qwen3-0.6B"),
}
"""What a TRL script passes beside its GRPOConfig: option -> (what it is, an example)."""


def resolve_trl(
    translation: Translation,
    sources: Sequence[Path],
    words: Sequence[str],
    overrides: Mapping[str, Any] | None,
    objects: wire.PythonObjects,
) -> tuple[Resolved, list[str]]:
    """The configuration, and the notes that tell where its meaning differs from TRL's.

    The data decides two options, unless they are set: epochs become steps, and prompts that are plain text get no chat
    template.
    """
    resolved = load(sources, words, overrides, lowest=translation.layer())
    _check_complete(resolved, objects)
    source = wire.source_of(resolved.config, objects)
    plain_text = isinstance(source.training(0).prompt, str)
    fitted = translation.for_data(source.size, plain_text=plain_text)
    resolved = load(sources, words, overrides, lowest=fitted.layer())
    return resolved, [f"from {fitted.source}: {note}" for note in fitted.notes]


def _check_complete(resolved: Resolved, objects: wire.PythonObjects) -> None:
    """InputError if data, reward or model are named nowhere: TRL's script passes them beside the configuration."""
    have = {
        "task.kind": objects.problems,
        "reward.kind": objects.reward or resolved.config.reward.components or None,
        "policy.model": objects.model,
    }
    missing = [path for path, thing in have.items() if thing is None and resolved.provenance.get(path) == "default"]
    if missing:
        things = " and ".join(_MISSING[path][0] for path in missing)
        words = " ".join(_MISSING[path][1] for path in missing)
        raise InputError(f"expected {things} beside the configuration of TRL, got none; add {words}")
