"""A teacher: its log-probs become advantages, token by token, and a student comes to write as it does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from legato.config.load import load
from legato.errors import InputError
from legato.run import wire
from legato.training.step import Trainer
from legato.training.teacher import Teacher, TeacherSettings
from legato.training.update import Look

OPTIONS: dict[str, Any] = {
    "algorithm": "gspo-token",
    "task.kind": "reversal",
    "task.length": 2,
    "task.held_out": 8,
    "policy.model": "tiny",
    "policy.max_prompt_tokens": 8,
    "policy.tiny.hidden": 32,
    "rollouts.max_response_tokens": 4,
    "rollouts.samples_per_prompt": 4,
    "training.prompts_per_step": 16,
    "training.updates_per_step": 1,
    "training.lr": 1e-2,
    "training.warm_up_updates": 0,
    "algorithm.objective.trust.clip.low": 0.5,
    "algorithm.objective.trust.clip.high": 0.5,
}


def teach(folder: Path) -> Path:
    """A folder with a teacher that knows the task: the supervised stage alone."""
    resolved = load([], (), {**OPTIONS, "policy.warm_up": {"steps": 150, "examples_per_step": 64, "lr": 1e-2}})
    policy, source = wire.policy_of(resolved, wire.PythonObjects()), wire.source_of(resolved.config, wire.PythonObjects())
    collector = wire.collector_of(resolved.config, policy, source, wire.reward_of(resolved.config, wire.PythonObjects()))
    examples = wire.warm_up_examples(resolved.config, policy, source, collector)
    wire.warm_up(resolved.config, policy, examples, lambda step, loss: None)
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of other weights. It knows nothing, which is enough for the arithmetic."""
    folder = tmp_path_factory.mktemp("teacher")
    policy = wire.policy_of(load([], (), {**OPTIONS, "training.seed": 1}), wire.PythonObjects())
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


def trainer(**more: Any) -> Trainer:
    resolved = load([], (), {**OPTIONS, **{name.replace("__", "."): value for name, value in more.items()}})
    policy, source = wire.policy_of(resolved, wire.PythonObjects()), wire.source_of(resolved.config, wire.PythonObjects())
    collector = wire.collector_of(resolved.config, policy, source, wire.reward_of(resolved.config, wire.PythonObjects()))
    reference = wire.reference_of(resolved, policy) if wire.wants_reference(resolved) else None
    return wire.trainer_of(resolved, policy, collector, reference)


def test_the_advantage_is_the_gap_of_the_log_probs(taught: Path) -> None:
    this = trainer(teacher__model=str(taught), teacher__weight=0.5, teacher__reward_weight=2.0, teacher__baseline="none")
    plain = trainer()
    looks: list[Look] = []
    this.look = looks.append
    report, without = this.step(), plain.step()
    assert this.teacher is not None
    advantages, alone = report.tensors["advantages"], without.tensors["advantages"]
    assert torch.equal(report.tensors["tokens"], without.tensors["tokens"])
    gaps = []
    row = 0
    for group in report.groups:
        for member in group.members:
            rollout = member.rollout
            text = torch.cat([rollout.prompt_tokens, rollout.tokens])
            logits = this.teacher.reference.policy.model(text[None]).logits[0, len(rollout.prompt_tokens) - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(1, rollout.tokens[:, None]).squeeze(1)
            gap = logprobs - rollout.sampler_logprobs
            gaps.append(gap)
            expected = 2.0 * alone[row, 0] + 0.5 * gap
            assert torch.allclose(advantages[row, : len(gap)], expected, atol=1e-4)
            row += 1
    assert report.metrics["teacher/reverse_kl"] == pytest.approx(-float(torch.cat(gaps).mean()), abs=1e-4)
    assert looks[0].signals.advantages.shape[1] > 1


@pytest.mark.slow
def test_a_student_reaches_its_teacher_before_one_without(tmp_path: Path) -> None:
    """A student that knows little comes to answer as its teacher does, without any reward; the reward alone is slower."""
    folder = teach(tmp_path)
    stage = {"steps": 60, "examples_per_step": 64, "lr": 5e-3}

    def accuracy(**more: Any) -> list[float]:
        this = trainer(policy__warm_up=stage, training__lr=3e-3, **more)
        resolved = load([], (), {**OPTIONS, "policy.warm_up": stage})
        source, collector = wire.source_of(resolved.config, wire.PythonObjects()), this.source
        examples = wire.warm_up_examples(resolved.config, this.policy, source, collector)  # type: ignore[arg-type]
        wire.warm_up(resolved.config, this.policy, examples, lambda step, loss: None)
        reports = [this.step() for _ in range(72)]
        if this.teacher is not None:
            assert reports[0].metrics["teacher/reverse_kl"] > 1 > 2 * reports[-1].metrics["teacher/reverse_kl"]
        return [report.metrics["accuracy/mean"] for report in reports]

    distilled, rewarded = accuracy(teacher__model=str(folder), teacher__reward_weight=0.0), accuracy()
    assert sum(distilled[:3]) / 3 < 0.4 and sum(distilled[-5:]) / 5 > 0.75 > 0.4 > sum(rewarded[-5:]) / 5


def test_a_teacher_as_the_reference_of_a_penalty(taught: Path) -> None:
    this = trainer(
        teacher__model=str(taught), teacher__use="penalty", algorithm="grpo",
        algorithm__objective__penalties=["kl-ratio-weighted"],
    )  # fmt: skip
    assert this.teacher is None and this.reference is not None and this.reference.policy.name == str(taught)
    report = this.step()
    # Of other random weights; the policy itself would be at exactly 0.
    assert report.metrics["reference/k3"] > 1e-3 and report.metrics["gradient/norm"] > 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"algorithm": "gspo"}, "expected 'penalty' beside gspo, which has one advantage for each sequence"),
        ({"teacher.use": "penalty"}, "expected 'advantage' beside gspo-token, which has no KL penalty"),
    ],
)
def test_a_teacher_that_the_algorithm_cannot_hear_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        load([], (), {**OPTIONS, "teacher.model": "tiny", **options})


def test_a_teacher_with_another_tokenizer_is_refused() -> None:
    this = trainer()
    other = wire.policy_of(load([], (), OPTIONS), wire.PythonObjects())
    other.tokenizer.add_tokens(["<more>"])
    with pytest.raises(InputError, match=r"which differ at '<more>' \(teacher.model\)"):
        Teacher.of(other, this.policy, TeacherSettings(model="other"))
