"""Every option has the effect that its declaration says."""

from collections.abc import Callable
from pathlib import Path

import pytest

from legato.config.document import options
from legato.config.load import load
from tests.proof import effects_of_episodes, effects_of_experts, effects_of_health, effects_of_problems, effects_of_training
from tests.proof.effects import EFFECTS, Bench

OPTIONS = {option.path: option for option in options()}

UNTESTED = {
    "rollouts.engine": "others than local need servers: tests/fleet; an unknown name is refused",
    **{path: "it needs servers: tests/fleet" for path in OPTIONS if path.startswith("rollouts.servers.")},
    "training.shard": "it needs several processes: tests/ranks",
    "training.keep_layers": "it needs several processes: tests/ranks",
    "training.rank_deadline_seconds": "it needs several processes: tests/ranks",
    "training.optimizer": "'adamw-8bit' needs bitsandbytes and a GPU; without them it is refused",
}
"""Options whose effect cannot be tested in one process without a GPU and a network -> why."""


pytestmark = pytest.mark.usefixtures("lightly")


def test_every_option_has_a_test_of_its_effect() -> None:
    assert effects_of_problems and effects_of_training and effects_of_experts and effects_of_health and effects_of_episodes
    assert {*EFFECTS, *UNTESTED} == {*OPTIONS}
    assert not {*EFFECTS} & {*UNTESTED}


SHOWN = {effect: [path for path in EFFECTS if EFFECTS[path] is effect] for effect in EFFECTS.values()}


@pytest.mark.parametrize("effect", SHOWN, ids=lambda effect: ",".join(SHOWN[effect]))
def test_an_option_does_what_it_says(
    effect: Callable[[Bench], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    effect(Bench(folder=tmp_path, patch=monkeypatch))


def test_unknown_engines_and_optimizers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rollouts\.engine"):
        load([], ["rollouts.engine=remote"])
    with pytest.raises(ValueError, match=r"training\.optimizer"):
        load([], ["training.optimizer=sgd"])
