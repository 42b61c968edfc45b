"""Options that do not exist are refused before torch is imported, with the message of the whole check."""

import subprocess
import sys
from pathlib import Path

import pytest

from legato.config.load import load
from legato.config.unknown import refuse_unknown_options
from legato.errors import InputError

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes/tiny.toml")


@pytest.mark.parametrize(
    "words",
    [
        ["training.lrr=1"],
        ["trainig.lr=1"],
        ["policy.lora.rnk=3"],
        ["policy.tiny.width=3", "output.names=x", "nothing=1"],
        ["training.samples_per_prompt=4"],
        ["learning_rate=1e-6"],
        ["reward.overlong.share=1"],
        ["policy={tiny={width=3}}"],
    ],
)
def test_the_quick_check_says_what_the_whole_check_says(words: list[str]) -> None:
    with pytest.raises(InputError) as whole:
        load([Path(RECIPE)], words)
    with pytest.raises(InputError) as quick:
        refuse_unknown_options([RECIPE, *words])
    assert str(quick.value) == str(whole.value)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["algorithm=grpo", "algorithm.objective.trust.clip.low=0.1"],
        ["task.left_digits=1", "task.second.kind=arithmetic", "task.second.left_digits=2"],
        ["reward.components.mine.kind=number", "reward.components.mine.weight=2.0"],
        ["policy.lora=true", "policy.warm_up=false", "training.lr=abc"],
    ],
)
def test_options_that_exist_or_belong_to_parts_are_left_to_the_whole_check(words: list[str]) -> None:
    refuse_unknown_options([RECIPE, *words])


def test_every_recipe_passes_the_quick_check() -> None:
    for recipe in sorted((ROOT / "recipes").glob("*.toml")):
        refuse_unknown_options([str(recipe)])


def test_a_misspelt_option_is_refused_without_torch() -> None:
    code = f"""
import sys
from legato.cli.main import main
sys.argv = ["legato", "train", {RECIPE!r}, "training.lrr=1"]
try:
    main()
except SystemExit as ending:
    assert ending.code == 2
heavy = {{"torch", "transformers", "numpy"}} & set(sys.modules)
assert not heavy, heavy
"""
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert ended.returncode == 0 and "did you mean 'lr'" in ended.stderr, ended.stderr
