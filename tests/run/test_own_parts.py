"""A part from a user's file outside the package: it trains, is probed and tightened, resumes, and its file is recorded."""

import hashlib
import math
import re
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import legato
from legato.algorithms.algorithm import Algorithm
from legato.config.load import load
from legato.config.resolved import dump
from legato.core.parts import find as find_by_name
from legato.core.parts import lookup, part, register
from legato.errors import InputError
from legato.health import actions
from legato.objectives.slots import Bounds, Trust
from legato.run.evaluate import evaluate
from legato.run.export import export
from legato.run.target import find
from legato.run.train import resume
from legato.training import checkpoint
from tests.proof import verdicts
from tests.proof.pages import numbers
from tests.proof.runs import cut_run, differences, outcome, records, run_small, steps
from tests.run.test_health import ILL, RISING

pytestmark = pytest.mark.usefixtures("lightly")

EARLY = f"{verdicts.__file__}:early"
CODE = '''
from dataclasses import replace
from legato.parts import Bounds, Trust, by_sign, number, part

@part("trust", "my-clip")
class MyClip(Trust):
    """A clip whose fields have names of their own."""
    role = "clip"
    under: float = number(default=0.0003, says="Distance of the lower bound from 1.", minimum=0.0)
    over: float = number(default=0.0004, says="Distance of the upper bound from 1.", minimum=0.0)

    def bounds(self, state):
        return Bounds(low=self.under, high=self.over, fields=("under", "over"))

    def apply(self, region, context):
        band = self.bounds(None)
        return replace(region, log_value=by_sign(region.log_value, context.signals.advantages, band.lower, band.upper))

class PlainClip(MyClip):
    """The same, declared by nobody: its name is made from that of its class."""

    def apply(self, region, context):
        return super().apply(region, context)
'''
OWN = {"algorithm.objective.trust": ["my_clip.py:MyClip"]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_clip.py").write_text(CODE)
    return tmp_path


def run(folder: Path, **options: Any) -> Path:
    return run_small(folder, {"reward.kind": EARLY, **OWN, **options}).directory


def without_parts(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timed = ("time/", "tokens/per_second", "memory/")
    return [{key: value for key, value in step.items() if not key.startswith(timed)} for step in metrics]


def test_an_own_clip_trains_as_the_clip_it_equals(tmp_path: Path) -> None:
    own, ours = run(tmp_path / "own"), run_small(tmp_path / "ours", {"reward.kind": EARLY}).directory
    assert without_parts(steps(own)) == without_parts(steps(ours))
    assert steps(own)[-1]["clip/band_high"] == pytest.approx(4e-4)
    assert outcome(own)["model/model.safetensors"] == outcome(ours)["model/model.safetensors"]


def test_an_own_clip_is_probed_and_its_bounds_are_recorded(tmp_path: Path) -> None:
    own, ours = run(tmp_path / "own"), run_small(tmp_path / "ours", {"reward.kind": EARLY}).directory
    probes = [next(record for record in records(each) if record["kind"] == "probe") for each in (own, ours)]
    assert "noise/engine_clipped" in probes[0]
    stripped = [{key: value for key, value in each.items() if key != "bounds"} for each in probes]
    assert stripped[0] == stripped[1]
    stated = probes[0]["bounds"]["my-clip"]
    assert stated["lower"] == pytest.approx(-3e-4, rel=1e-3) and stated["upper"] == pytest.approx(4e-4, rel=1e-3)
    assert (stated["of"], stated["fields"]) == ("ratio", ["under", "over"])
    assert records(own)[0]["bounds"] == probes[0]["bounds"]


def test_an_own_clip_is_tightened_by_a_recovery() -> None:
    from legato.health.tighten import clip_bounds, tighten_clip

    value = legato.algorithm("gspo", {"objective.trust": ["my_clip.py:MyClip"]})
    assert clip_bounds(value) == {"objective.trust.my-clip.under": 3e-4, "objective.trust.my-clip.over": 4e-4}
    bounds = tighten_clip(value, 0.5).objective.bounds()["my-clip"]
    assert (bounds.low, bounds.high) == (1.5e-4, 2e-4)


def test_a_recovery_narrows_the_band_of_an_own_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A rule that is certain to hold at a known step, as the learning rate rises.
    monkeypatch.setattr(actions, "Watch", partial(actions.Watch, (ILL,)))
    options = {"health.action": "recover", "health.lr_factor": 0.25, "health.clip_factor": 0.5}
    directory = run(tmp_path, **RISING, **options, **{"training.probe_every_steps": 1})
    probes = [each for each in records(directory) if each["kind"] == "probe"]
    bounds = [probe["bounds"]["my-clip"]["upper"] for probe in probes]
    assert bounds[0] == pytest.approx(math.log1p(4e-4)) and bounds[-1] == pytest.approx(math.log1p(2e-4))


def test_an_own_clip_accepts_a_clip_factor_and_cispo_does_not(tmp_path: Path) -> None:
    words = ["health.action=recover", "health.clip_factor=0.5", "output.checkpoint_every_steps=1"]
    resolved = load([], ['algorithm.objective.trust=["my_clip.py:MyClip"]', *words])
    assert resolved.config.health.clip_factor == 0.5
    with pytest.raises(InputError, match=r"health\.clip_factor.*cispo has no clip"):
        load([], ["algorithm=cispo", *words])


def test_a_band_that_names_no_fields_is_refused_a_clip_factor_with_the_reason(tmp_path: Path) -> None:
    fields = re.compile(r", fields=\(.*?\)")
    assert fields.search(CODE)
    (tmp_path / "unnamed_clip.py").write_text(fields.sub("", CODE))
    words = [
        "health.action=recover",
        "health.clip_factor=0.5",
        f'algorithm.objective.trust=["{tmp_path}/unnamed_clip.py:MyClip"]',
    ]
    with pytest.raises(InputError, match=r"health\.clip_factor.*'my-clip'.*Bounds\(fields=\.\.\.\)"):
        load([], words)


def test_the_run_records_the_file_and_its_hash(tmp_path: Path) -> None:
    directory = run(tmp_path)
    sha256 = hashlib.sha256(CODE.encode()).hexdigest()
    reference = f"{tmp_path}/my_clip.py:MyClip"
    expected = {"reference": reference, "file": str(tmp_path / "my_clip.py"), "sha256": sha256}
    assert expected in records(directory)[0]["code"]
    memory = checkpoint.read_state(checkpoint.latest(directory / "checkpoints")[0])
    assert memory["made_of"]["code"][reference] == sha256
    written = tomllib.loads((directory / "config.toml").read_text())["algorithm"]
    assert written["objective.trust"] == [reference] and written["objective.trust.my-clip.over"] == 4e-4


def test_a_run_with_an_own_clip_resumes_to_the_same_result(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    part_of_it = cut_run(whole, tmp_path / "cut" / "run", 2)
    resume(part_of_it)
    assert differences(outcome(whole), outcome(part_of_it)) == []


@pytest.mark.parametrize("file", ["my_clip.py", "reward.py"])
def test_a_changed_file_is_refused_and_allowed_by_the_flag(file: str, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def early(rollout):\n    return float((rollout.tokens < 40).float().mean())\n")
    directory = run(tmp_path, **{"training.steps": 2, "reward.kind": "reward.py:early"})
    path = tmp_path / file
    path.write_text(path.read_text() + "\n# changed\n")
    with pytest.raises(InputError, match=rf"{file}:\w+ \(SHA-256 differs\)"):
        resume(directory, ["training.steps=3"])
    assert resume(directory, ["training.steps=3"], allow_changes=True).exit_code == 0


def test_a_missing_part_file_is_refused_with_its_path(tmp_path: Path) -> None:
    directory = run(tmp_path, **{"training.steps": 1})
    (tmp_path / "my_clip.py").unlink()
    with pytest.raises(InputError, match=rf"got no file {tmp_path}/my_clip.py \(it was {tmp_path}/my_clip.py\)"):
        resume(directory, ["training.steps=2"])


def test_the_same_file_is_one_class_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = lookup("trust", "my_clip.py:MyClip")
    assert lookup("trust", "./my_clip.py:MyClip") is first is lookup("trust", f"{tmp_path}/my_clip.py:MyClip")
    assert lookup("trust", "my-clip") is first


def test_a_file_that_changed_is_loaded_again(tmp_path: Path) -> None:
    assert lookup("trust", "my_clip.py:MyClip")().under == 3e-4
    (tmp_path / "my_clip.py").write_text(CODE.replace("0.0003", "0.0005"))
    assert lookup("trust", "my_clip.py:MyClip")().under == 5e-4


def test_a_plain_subclass_has_the_name_of_its_class_and_may_call_super() -> None:
    value = legato.algorithm("gspo", {"objective.trust": ["my_clip.py:PlainClip"], "objective.trust.plain-clip.over": 0.1})
    assert (value.objective.trust[0].name, value.objective.trust[0].over) == ("plain-clip", 0.1)
    resolved = load([], [], {"algorithm": value})
    assert resolved.code[0].reference.endswith("/my_clip.py:PlainClip")


@pytest.mark.parametrize(
    ("code", "reference", "message"),
    [
        ("X = 3", "own.py:X", "expected a class derived from a slot"),
        ("from legato.parts import Ratio\nclass X(Ratio): pass", "own.py:X", "expected a trust, got the ratio 'x'"),
        ("from legato.parts import Trust\nclass Clip(Trust): pass", "own.py:Clip", "a second 'clip'"),
        (
            "from legato.parts import Trust, part\n@part('trust', 'clip')\nclass X(Trust): pass",
            "own.py:X",
            "a second 'clip'",
        ),
        ("from legato.parts import Trust, part\n@part('ratio', 'x')\nclass X(Trust): pass", "own.py:X", "expected @part"),
        ("from legato.parts import Trust\nclass X(Trust):\n    a: float", "own.py:X", "got none for 'a'"),
        ("", "nowhere.py:X", "there is no file"),
    ],
)
def test_a_class_that_is_no_part_of_the_slot_is_refused(code: str, reference: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(code)
    with pytest.raises(InputError, match=message):
        legato.algorithm("gspo", {"objective.trust": [reference]})


def test_a_slot_and_fields_of_its_part_are_set_in_one_command() -> None:
    words = ['algorithm.objective.trust=["my_clip.py:MyClip"]', "algorithm.objective.trust.my-clip.over=0.1"]
    for each in (words, words[::-1]):
        assert load([], each).algorithm.objective.trust[0].over == 0.1
    words = ["algorithm.aggregate=token-mean", "algorithm.aggregate.denominator=kept"]
    assert load([], words).algorithm.aggregate.denominator == "kept"


def test_a_wrong_field_is_named_with_its_part(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[algorithm]\n"objective.trust" = ["my_clip.py:MyClip"]\n"objective.trust.my-clip.ovr" = 0.1\n')
    with pytest.raises(InputError, match="did you mean 'over'"):
        load([recipe])


def test_an_estimator_may_come_from_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "credit.py").write_text(
        "from legato.parts import Estimate, Estimator\n"
        "class Raw(Estimator):\n"
        "    needs_groups = False\n"
        "    def estimate(self, scores):\n"
        "        return Estimate(advantages=scores.rewards)\n"
    )
    rewards = torch.tensor([1.0, 0.0])
    assert torch.equal(legato.advantages("credit.py:Raw", rewards=rewards, mask=torch.ones(2, 3)).advantages, rewards)
    assert steps(run(tmp_path, **{"algorithm.advantage": "credit.py:Raw", "training.steps": 1}))


def test_anything_can_be_registered_and_found_by_name_or_path(tmp_path: Path) -> None:
    (tmp_path / "engines.py").write_text("def remote(policy):\n    return policy\n")
    local = register("engine-of-a-test", "local", lambda policy: policy)
    assert find_by_name("engine-of-a-test", "local") is local
    assert find_by_name("engine-of-a-test", "engines.py:remote")(3) == 3
    with pytest.raises(InputError, match=r"engine-of-a-test 'lcal'.*'local'"):
        find_by_name("engine-of-a-test", "lcal")


# Algorithms made in Python


def my_algorithm(name: str = "mine/own") -> Algorithm:
    """An unpublished combination of parts. Its name is not valid as a folder name."""
    base = legato.algorithm(
        "gspo",
        {
            "objective.trust": ["my_clip.py:MyClip", "dual-clip"],
            "objective.penalties.kl.beta": 0.1,
            "aggregate": "token-mean",
        },
    )
    return Algorithm(name=name, advantage=base.advantage, objective=base.objective, aggregate=base.aggregate)


def test_an_algorithm_made_in_python_runs_resumes_exports_and_evaluates(tmp_path: Path) -> None:
    options = {"reward.kind": EARLY, "output.name": None}
    whole = run_small(tmp_path / "whole", options, algorithm=my_algorithm()).directory
    assert whole.name == "arithmetic-mine-own-seed0-1"
    start = records(whole)[0]
    assert start["algorithm"] == "mine/own" and "no published form" in start["deviations"][0]
    assert load([whole / "config.toml"]).algorithm == my_algorithm()
    part_of_it = cut_run(whole, tmp_path / "cut" / whole.name, 2)
    resume(part_of_it)
    assert differences(outcome(whole), outcome(part_of_it)) == []
    export(find(str(whole)), tmp_path / "exported")
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    assert evaluate(find(str(whole)), samples=1).problems == 4


def test_a_changed_published_algorithm_lists_its_deviations(tmp_path: Path) -> None:
    value = legato.algorithm("gspo", {"objective.trust.clip.low": 1e-3})
    resolved = load([], [], {"algorithm": value})
    (deviation,) = resolved.deviations
    assert deviation.startswith("objective.trust.clip.low") and numbers(deviation) == [0.001, 0.0003]


def test_the_settings_of_an_own_algorithm_become_those_of_the_run(tmp_path: Path) -> None:
    value = Algorithm(
        name="mine",
        advantage=my_algorithm().advantage,
        objective=my_algorithm().objective,
        aggregate=my_algorithm().aggregate,
        settings={"training.updates_per_step": 3},
    )
    resolved = load([], [], {"algorithm": value})
    assert resolved.config.training.updates_per_step == 3
    (tmp_path / "config.toml").write_text(dump(resolved))
    again = load([tmp_path / "config.toml"])
    assert again.config.training == resolved.config.training
    assert again.algorithm == resolved.algorithm


def test_a_recipe_that_names_no_published_algorithm_must_fill_its_slots() -> None:
    with pytest.raises(InputError, match=r"'gspoo'.*'gspo'.*objective\.ratio"):
        load([], ["algorithm=gspoo"])
    words = ["algorithm=mine", "algorithm.advantage=group-z", "algorithm.aggregate=token-mean"]
    resolved = load([], [*words, "algorithm.objective.ratio=geometric", 'algorithm.objective.trust=["clip"]'])
    assert resolved.algorithm.name == "mine" and resolved.algorithm.objective.trust[0].name == "clip"


@part("trust", "of-a-test-module")
class OfThisModule(Trust):
    """Stands in a module of a package."""

    def bounds(self, state: Any) -> Bounds | None:
        return None


def test_a_class_of_a_package_is_recorded_by_its_module(tmp_path: Path) -> None:
    resolved = load([], [], {"algorithm": legato.algorithm("gspo", {"objective.trust": [OfThisModule()]})})
    assert resolved.code[0].reference == f"{__name__}:OfThisModule"
    (tmp_path / "config.toml").write_text(dump(resolved))
    assert load([tmp_path / "config.toml"]).algorithm == resolved.algorithm


def test_a_class_that_no_other_process_can_import_is_refused_with_what_to_do() -> None:
    @part("trust", "of-a-function")
    class Inner(Trust):
        pass

    with pytest.raises(InputError, match=r"objective.trust, trust 'of-a-function'.*my_parts.py"):
        load([], [], {"algorithm": legato.algorithm("gspo", {"objective.trust": [Inner()]})})


# Tasks given in Python


class Doubling:
    def problem(self, random: Any) -> legato.Problem:
        number = random.randrange(10)
        return legato.Problem(prompt=f"{number}*2=", answer=str(2 * number))


class Listed:
    def load(self) -> list[legato.Problem]:
        return [legato.Problem(prompt=f"{number}+1=", answer=str(number + 1)) for number in range(40)]


@pytest.mark.parametrize("task", [Doubling(), Listed()], ids=["made", "loaded"])
def test_a_task_given_in_python_trains_and_resumes(task: Any, tmp_path: Path) -> None:
    from legato.run.wire import PythonObjects

    options = {"reward.kind": EARLY, "task.held_out": 1}
    whole = run_small(tmp_path / "whole", options, problems=task).directory
    assert records(whole)[0]["given"] == ["problems"]
    part_of_it = cut_run(whole, tmp_path / "cut" / "run", 2)
    with pytest.raises(InputError, match="problems in Python"):
        resume(part_of_it)
    resume(part_of_it, objects=PythonObjects(problems=task))
    assert differences(outcome(whole), outcome(part_of_it)) == []


def test_problems_that_are_neither_a_list_nor_a_task_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"problems.*\b3\b|problems.*int"):
        run_small(tmp_path, {}, problems=3)
