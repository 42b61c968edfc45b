"""Studies that measure: exact enumeration against loops, gradients against autograd, and a whole study that goes on."""

import json
import math
from itertools import product
from pathlib import Path

import pytest
import torch

from legato.compare.registration import read_study
from legato.errors import InputError
from legato.lab import gradient_noise
from legato.lab.measured import measure_study
from legato.lab.ratio_bias import World, sine
from legato.policy.model.tiny import TinyShape, tiny_model
from tests.proof.command import Command

STUDY = """
question = "?"
confirmed = "yes"
refuted = "no"
measure = "ratio-bias"
seeds = [200, 201]
pilot_seeds = [100]
[settings]
vocabulary = 2
[arms.token]
[arms.product]
[sweep]
length = [2, 3]
drift = [0.1]
[endpoint]
kind = "measured"
[[comparisons]]
name = "token minus product"
terms = [
  { arm = "token", at = { length = 3, drift = 0.1 }, weight = 1 },
  { arm = "product", at = { length = 3, drift = 0.1 }, weight = -1 },
]
margin = 0.01
detects = 0.1
spread = 0.05
"""


def study_file(folder: Path, text: str = STUDY) -> Path:
    path = folder / "study.toml"
    path.write_text(text)
    return path


def test_the_product_is_the_importance_weight_and_the_token_ratio_equals_loops() -> None:
    world = World(2, 3, torch.Generator().manual_seed(5))
    sines = world.sines(0.2, ["token", "sequence", "none", "product"])
    assert sines["product"] < 1e-12 and all(sines[arm] > 1e-3 for arm in ("token", "sequence", "none"))
    # By loops over all responses, with finite differences in place of autograd.
    from legato.lab.ratio_bias import solve

    new = world.old + solve(world.spread, 0.2) * world.direction

    def logprob(logits: torch.Tensor, response: tuple[int, ...], place: int) -> float:
        row = logits[place, response[place - 1] if place else 2]
        return float(row[response[place]] - row.logsumexp(0))

    def surrogate(logits: torch.Tensor, exact: bool) -> float:
        total = 0.0
        for number, response in enumerate(product(range(2), repeat=3)):
            old = [logprob(world.old, response, place) for place in range(3)]
            now = [logprob(logits, response, place) for place in range(3)]
            base = [logprob(new, response, place) for place in range(3)]
            if exact:
                total += math.exp(sum(now)) * float(world.advantage[number])
            else:
                weighted = sum(math.exp(b - o) * n for b, o, n in zip(base, old, now, strict=True))
                total += math.exp(sum(old)) * float(world.advantage[number]) * weighted
        return total

    def slopes(exact: bool) -> torch.Tensor:
        found = []
        for place in range(new.numel()):
            ends = []
            for side in (1e-5, -1e-5):
                moved = new.clone().flatten()
                moved[place] += side
                ends.append(surrogate(moved.view_as(new), exact))
            found.append((ends[0] - ends[1]) / 2e-5)
        return torch.tensor(found, dtype=torch.float64)

    assert sine(slopes(False), slopes(True)) == pytest.approx(sines["token"], rel=1e-4)


def test_the_variance_is_the_trace_of_the_covariance_of_the_gradients() -> None:
    model = tiny_model(TinyShape(hidden=16, layers=1, heads=2), vocabulary=85, seed=1)
    generator = torch.Generator().manual_seed(2)
    responses = gradient_noise.sample(model, 4, 5, generator)
    assert responses.shape == (4, 6) and int(responses.min()) >= gradient_noise.FIRST
    old = torch.randn(4, 5, generator=generator) * 0.1 + gradient_noise.token_logprobs(model, responses).detach()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    variances, moved = gradient_noise.gradient_variances(model, responses, old, advantages)
    for arm in gradient_noise.ARMS:
        rows = []
        for row in range(4):
            logprobs = gradient_noise.token_logprobs(model, responses[row : row + 1])[0]
            ratio = moved[row].float()
            weight = {
                "none": torch.ones(5),
                "token": ratio.exp(),
                "sequence": ratio.mean().exp() * torch.ones(5),
                "product": ratio.sum().exp() * torch.ones(5),
            }[arm]
            value = advantages[row] * (weight * logprobs).mean()
            rows.append(torch.cat([each.flatten() for each in torch.autograd.grad(value, list(model.parameters()))]))
        assert variances[arm] == pytest.approx(float(torch.stack(rows).double().var(0).sum()), rel=1e-4)


def test_a_measured_study_goes_on_where_it_was_stopped_and_compares_at_the_end(tmp_path: Path) -> None:
    study = read_study(study_file(tmp_path))
    stopped = measure_study(study, folder=tmp_path / "out", seconds=0, say=lambda _: None)
    assert not stopped.results["complete"] and not any("value" in run for run in stopped.results["runs"])
    done = measure_study(study, folder=tmp_path / "out", say=lambda _: None)
    assert done.results["complete"] and done.results["comparisons"][0]["mean"] > 0
    again = measure_study(study, folder=tmp_path / "again", say=lambda _: None)
    assert again.results["runs"] == done.results["runs"]
    assert json.loads((tmp_path / "out" / "study.json").read_text())["measure"] == "ratio-bias"
    assert "All measurements" in (tmp_path / "out" / "study.md").read_text()


def test_options_that_a_measured_study_would_not_heed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    legato, file, out = Command(monkeypatch, capsys), str(study_file(tmp_path)), tmp_path / "out"
    for words in (["--only", "token-length2"], ["--seeds", "200"], ["--export", str(out)], ["--parallel", "2"]):
        code, _, errors = legato("study", file, "--out", str(out), *words)
        assert code == 2 and f"got {words[0]}: " in errors and not out.exists()


def test_a_pilot_of_one_seed_ends_without_a_comparison(tmp_path: Path) -> None:
    pilot = measure_study(read_study(study_file(tmp_path)), folder=tmp_path / "out", pilot=True, say=lambda _: None)
    assert pilot.results["complete"] and pilot.results["comparisons"] == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('measure = "ratio-bias"', 'measure = "luck"', "expected a measurement"),
        ("[arms.token]", "[arms.tokens]\n[arms.token]", "expected arms out of"),
        ('kind = "measured"', 'kind = "score"', "measured"),
    ],
)
def test_a_measured_study_that_does_not_fit_is_refused(old: str, new: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        measure_study(read_study(study_file(tmp_path, STUDY.replace(old, new))), folder=tmp_path / "o", say=lambda _: None)
