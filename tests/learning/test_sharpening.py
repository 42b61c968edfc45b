"""RL sharpens a policy that samples the right answer about half of the time; with shuffled rewards it does not.

The task is to reverse digits. The model is supervised on labels most of which are corrupted, so greedy decoding is near 1
before RL, while accuracy at temperature 1 is about one half. RL raises the latter in seconds if gradients, signs, masks and
packs are right. The tests assert accuracy at temperature 1.
"""

import copy
import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch

import legato
from legato.core.rollout import Problem, Rollout, Score, Unscorable
from legato.policy.model.load import Loading, load_policy
from legato.policy.model.supervised import Example, WarmUp, supervise
from legato.policy.model.tiny import TinyShape
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits
from legato.rollouts.episodes import Runner
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.render import Rendering
from legato.rollouts.sampling import Sampling
from legato.tasks.source import Pool
from legato.training.collect import Collector, CollectorSettings
from legato.training.evaluate import Evaluator
from legato.training.optimizer import Optimizer, OptimizerSettings
from legato.training.step import Trainer, TrainingSettings

DIGITS, CORRUPTED, STEPS = 3, 0.7, 35
LIMITS = Limits(max_response_tokens=DIGITS + 2, end_tokens=(1,))


def problem(source: random.Random) -> Problem:
    text = "".join(source.choice("0123456789") for _ in range(DIGITS))
    return Problem(prompt=f"{text}=", answer=text[::-1])


@cache
def supervised_policy(seed: int) -> Policy:
    """A new model, supervised on labels of which seven in ten have one digit drawn at random."""
    policy = load_policy("tiny", Loading(dtype="float32", device="cpu", tiny=TinyShape(hidden=64, heads=4)), seed=seed)
    tokenizer, source = policy.tokenizer, random.Random(f"warm {seed}")

    def examples(step: int) -> Sequence[Example]:
        batch = []
        for _ in range(80):
            example = problem(source)
            label = list(str(example.answer))
            if source.random() < CORRUPTED:
                label[source.randrange(DIGITS)] = source.choice("0123456789")
            response = tokenizer("".join(label))["input_ids"] + [tokenizer.eos_token_id]
            batch.append((torch.tensor(tokenizer(str(example.prompt))["input_ids"]), torch.tensor(response)))
        return batch

    supervise(policy, examples, WarmUp(steps=160, lr=4e-3))
    return policy


def make_judge(seed: int, shuffled: bool):  # type: ignore[no-untyped-def]
    source = random.Random(f"shuffle {seed}")

    def judge(rollouts: Sequence[Rollout]) -> list[Score | Unscorable]:
        right = [float(rollout.text == rollout.problem.answer) for rollout in rollouts]
        if shuffled:
            source.shuffle(right)
        return [Score(reward=value, accuracy=value) for value in right]

    return judge


def collector(policy: Policy, seed: int, shuffled: bool) -> Collector:
    source = random.Random(f"train {seed}")
    return Collector(
        source=Pool([problem(source) for _ in range(900)], share=0.0, seed=seed),
        runner=Runner(engine=LocalEngine(policy), rendering=Rendering(tokenizer=policy.tokenizer), limits=LIMITS),
        judge=make_judge(seed, shuffled),
        sampling=Sampling(),
        settings=CollectorSettings(samples_per_prompt=8, max_prompt_tokens=20),
        seed=seed,
    )


def trainer(policy: Policy, seed: int, shuffled: bool) -> Trainer:
    return Trainer(
        policy=policy,
        algorithm=legato.algorithm("gspo"),
        source=collector(policy, seed, shuffled),
        optimizer=Optimizer(policy.parameters(), OptimizerSettings(lr=8e-4, warm_up_updates=20), total_updates=4 * STEPS),
        settings=TrainingSettings(seed=seed, prompts_per_step=16),
    )


def accuracy(policy: Policy) -> float:
    """Accuracy at temperature 1, always on the same 400 problems."""
    drawn = random.Random("evaluation")
    problems = [problem(drawn) for _ in range(400)]
    source = collector(policy, 0, False)
    answers = Evaluator(runner=source.runner, judge=source.judge).answer(problems, Sampling(), 2, seed=0)
    return sum(a.accuracy for row in answers for a in row) / 800


def accuracy_before_and_after(seed: int, shuffled: bool) -> tuple[float, float]:
    """Accuracy of the supervised policy, and after training it with RL."""
    start = supervised_policy(seed)
    policy = Policy(model=copy.deepcopy(start.model), tokenizer=start.tokenizer, name="copy")
    loop = trainer(policy, seed, shuffled)
    for _ in range(STEPS):
        loop.step()
    assert loop.optimizer.updates == 4 * STEPS
    return accuracy(start), accuracy(policy)


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]


@pytest.mark.parametrize("seed", SEEDS)
def test_rl_raises_the_accuracy_of_the_tiny_model(seed: int) -> None:
    before, after = accuracy_before_and_after(seed, shuffled=False)
    assert 0.3 < before < 0.65
    assert after > before + 0.25 and after > 0.75


@pytest.mark.parametrize("seed", SEEDS)
def test_shuffled_rewards_do_not_raise_the_accuracy(seed: int) -> None:
    before, after = accuracy_before_and_after(seed, shuffled=True)
    assert after < before + 0.06
