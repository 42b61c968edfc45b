"""Options of a recipe give way to options given by hand, with a note; options given by hand do not."""

from pathlib import Path

import pytest

from legato.config.load import load
from legato.config.resolved import dump
from legato.errors import InputError

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
TINY = Path(__file__).parents[2] / "recipes" / "tiny.toml"
STAGES = """
[task]
stages = 2
second_after_steps = 100
[task.second]
kind = "arithmetic"
operation = "multiply"
"""


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "word", ["training.steps=12", "training.steps=1", "evaluation.every_steps=0", "training.prompts_per_step=2"]
)
def test_every_recipe_can_be_shortened(recipe: Path, word: str, tmp_path: Path) -> None:
    resolved = load([recipe], [word])
    (tmp_path / "config.toml").write_text(dump(resolved))
    again = load([tmp_path / "config.toml"])
    assert again.config == resolved.config and again.notes == ()


def test_each_option_that_gave_way_is_noted() -> None:
    resolved = load([TINY], ["evaluation.every_steps=0", "training.prompts_per_step=2"])
    assert (resolved.config.evaluation.target, resolved.config.training.updates_per_step) == (None, 2)
    assert resolved.notes == (
        f"training.updates_per_step = 4 ({TINY}:38) becomes 2: training.prompts_per_step = 2",
        f"evaluation.target = 0.85 ({TINY}:44) is dropped: evaluation.every_steps = 0",
        f"evaluation.target_greedy = 0.88 ({TINY}:45) is dropped: evaluation.every_steps = 0",
    )
    assert resolved.provenance["training.updates_per_step"] == "training.prompts_per_step"
    assert load([TINY], [], {"evaluation.every_steps": 0}).config.evaluation.target is None


@pytest.mark.parametrize(
    "words",
    [
        ["evaluation.every_steps=0", "evaluation.target=0.9"],
        ["training.prompts_per_step=2", "training.updates_per_step=3"],
        ["training.updates_per_step=64"],
        ["evaluation.greedy=false", "evaluation.target_greedy=0.5"],
        ["health.action=say", "health.lr_factor=0.25"],
    ],
)
def test_what_was_given_by_hand_never_gives_way(words: list[str]) -> None:
    with pytest.raises(InputError):
        load([TINY], words)


def test_a_short_run_keeps_both_stages_if_it_can(tmp_path: Path) -> None:
    (tmp_path / "stages.toml").write_text(STAGES)
    assert load([tmp_path / "stages.toml"], ["training.steps=12"]).config.task.second_after_steps == 6
    single = load([tmp_path / "stages.toml"], ["training.steps=1"]).config.task
    assert (single.stages, single.second, single.second_after_steps) == (1, None, None)
    assert load([tmp_path / "stages.toml"], ["task.stages=1"]).config.task.second is None


def test_what_another_action_schedule_or_sampler_reads_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(
        '[health]\naction = "recover"\nlr_factor = 0.25\n[training]\nschedule = "cosine"\nfinal_lr_share = 0.1\n'
        '[rollouts.mismatch]\nkind = "stale"\nupdates = 4\n'
    )
    words = ["health.action=say", "training.schedule=constant", "rollouts.mismatch.kind=none"]
    config = load([tmp_path / "recipe.toml"], words).config
    assert (config.health.lr_factor, config.training.final_lr_share) == (load([]).config.health.lr_factor, 0.0)
    assert config.rollouts.mismatch.updates is None
