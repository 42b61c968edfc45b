"""Every option that is accepted has an effect, and it is the one that is declared."""

from collections.abc import Callable
from pathlib import Path

import pytest

from legato.config.document import options
from legato.config.load import load
from tests.proof import effects_of_experts, effects_of_health, effects_of_problems, effects_of_training
from tests.proof.effects import EFFECTS, Bench

OPTIONS = {option.path: option for option in options()}

UNSEEN = {
    "rollouts.engine": "there is one engine so far; another name is refused",
    "training.optimizer": "'adamw-8bit' needs bitsandbytes and a GPU; without them it is refused",
}
"""Options whose effect cannot be looked at on a machine without a GPU and a network, and why."""


pytestmark = pytest.mark.usefixtures("lightly")


def test_every_option_is_looked_at() -> None:
    assert effects_of_problems and effects_of_training and effects_of_experts and effects_of_health
    assert {*EFFECTS, *UNSEEN} == {*OPTIONS}
    assert not {*EFFECTS} & {*UNSEEN}


SHOWN = {shows: [path for path in EFFECTS if EFFECTS[path] is shows] for shows in EFFECTS.values()}


@pytest.mark.parametrize("shows", SHOWN, ids=lambda shows: ",".join(SHOWN[shows]))
def test_an_option_does_what_it_says(
    shows: Callable[[Bench], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shows(Bench(folder=tmp_path, patch=monkeypatch))


def test_unknown_engines_and_optimizers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rollouts\.engine"):
        load([], ["rollouts.engine=remote"])
    with pytest.raises(ValueError, match=r"training\.optimizer"):
        load([], ["training.optimizer=sgd"])
