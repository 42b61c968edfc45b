"""Setups for the tests of the capacity room."""

from functools import cache
from pathlib import Path
from typing import Any

from legato.capacity.hardware import find_hardware
from legato.capacity.model import Model, find_model
from legato.capacity.setup import Setup, setup_of
from legato.config.load import load

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "qwen3-0.6b-gsm8k.toml"


@cache
def model(name: str) -> Model:
    return find_model(name)


def setup(name: str = "qwen3-8b", gpus: int = 1, *words: str, **options: Any) -> Setup:
    """A shipped model with the GSM8K recipe on H200s, with options as on the command line."""
    return setup_of(load([RECIPE], words), model(name), find_hardware("h200"), gpus, **options)
