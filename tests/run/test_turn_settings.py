"""Settings about turns and values that would have no effect are refused, and an environment brings its reward."""

from pathlib import Path

import pytest

from legato.config.load import dump, load
from legato.errors import InputError
from legato.run.train import _notes

ENVIRONMENT = "task.environment=mine.py:World"


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (["algorithm=turn-gspo"], "objective.ratio.level = 'turn'"),
        (["algorithm=gspo-token", "algorithm.advantage=turn-return"], "advantage = 'turn-return'"),
        (["algorithm=gspo-token", "algorithm.advantage=gigpo"], "advantage = 'gigpo'"),
        (["algorithm=ppo", "algorithm.advantage.level=turn"], "advantage.level = 'turn'"),
    ],
)
def test_parts_that_read_turns_need_an_environment(words: list[str], path: str) -> None:
    with pytest.raises(InputError, match=r"expected task\.environment, got none") as refusal:
        load([], words)
    assert path in str(refusal.value) and f"word {len(words)}" in str(refusal.value)
    assert load([], [*words, ENVIRONMENT]).config.task.environment == "mine.py:World"


@pytest.mark.parametrize(
    ("words", "trained"),
    [
        (["algorithm=gspo-token", "algorithm.advantage=gae"], False),
        (["algorithm=ppo", "algorithm.objective.penalties=[]"], False),
        (["algorithm=ppo", "algorithm.objective.penalties.value.coefficient=0"], False),
        (["algorithm=gspo-token", "algorithm.advantage=gae", 'algorithm.objective.penalties=["value"]'], True),
        (["algorithm=ppo"], True),
    ],
)
def test_values_need_a_penalty_that_trains_them(words: list[str], trained: bool) -> None:
    if trained:
        load([], words)
        return
    with pytest.raises(InputError, match=r"penalty.*value head"):
        load([], words)


def test_an_environment_brings_its_reward_and_another_may_be_named() -> None:
    resolved = load([], [ENVIRONMENT])
    assert resolved.config.reward.kind == "environment" and resolved.provenance["reward.kind"] == "task.environment"
    assert load([], [ENVIRONMENT, "reward.kind=exact"]).config.reward.kind == "exact"
    components = load([], [ENVIRONMENT, "reward.components={a = {kind = 'exact'}}"]).config.reward
    assert components.kind is None and list(components.components) == ["a"]
    assert load([]).config.reward.kind == "number"


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (["reward.kind=exact"], "reward.kind = 'exact'"),
        (["reward.components={a = {kind = 'exact'}}"], "reward.components.a.kind = 'exact'"),
        (["reward.components={a = {kind = 'exact'}, b = {kind = 'environment'}}"], None),
        ([], None),
    ],
)
def test_a_run_says_that_rewards_of_turns_are_not_used(words: list[str], path: str | None) -> None:
    notes = [note for note in _notes(load([], [ENVIRONMENT, *words]), []) if "scores finished rollouts" in note]
    assert len(notes) == (path is not None) and all(note.startswith(f"{path} ") for note in notes)
    assert not any("scores finished rollouts" in note for note in _notes(load([]), []))


def test_another_environment_drops_the_options_of_the_one_before(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[task]\nenvironment = "guess"\nenvironment_options = { guesses = 2 }\n')
    assert load([recipe]).config.task.environment_options == {"guesses": 2}
    assert load([recipe], ["task.environment=guess"]).config.task.environment_options == {"guesses": 2}
    assert load([recipe], [ENVIRONMENT]).config.task.environment_options == {}
    words = [ENVIRONMENT, "task.environment_options.size=3"]
    assert load([recipe], words).config.task.environment_options == {"size": 3}


def test_a_dumped_config_with_an_environment_loads_as_the_same(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("dumped") / "config.toml"
    resolved = load([], [ENVIRONMENT])
    path.write_text(dump(resolved))
    assert load([path]).config == resolved.config


def test_the_reward_of_an_environment_needs_one() -> None:
    with pytest.raises(InputError, match=r"task\.environment: expected an environment, got none"):
        load([], ["reward.kind=environment"])
    with pytest.raises(InputError, match=r"reward\.components\.a\.kind = 'environment'"):
        load([], ["reward.components={a = {kind = 'environment'}}"])


def test_an_unknown_environment_is_refused() -> None:
    with pytest.raises(InputError, match="environment 'world'"):
        load([], ["task.environment=world"])
