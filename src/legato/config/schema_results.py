"""The options of what is measured and kept; part of `schema.py`."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from legato.config.values import STRICT, Count, Flag, Portion, Positive, Text, Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How held-out accuracy is measured."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    every_steps: Whole = 20
    """How often; 0: before the first step and at the end only."""
    samples_per_problem: Count = 1
    """Responses sampled for each held-out problem."""
    greedy: Flag = True
    """Whether greedy accuracy is measured too."""
    temperature: Positive = 1.0
    """Of the sampled responses."""
    target: Portion | None = None
    """The run ends early when sampled accuracy reaches it (and target_greedy, where that is given)."""
    target_greedy: Portion | None = None
    """The run ends early when greedy accuracy reaches it (and target, where that is given)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What the health watch does (docs/health.md has its rules)."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    action: Literal["say", "pause", "stop", "recover"] = "say"
    """At an alarm: say so; wait for a person; end with exit code 3; or go back to a healthy checkpoint and go on."""
    ignored: tuple[Text, ...] = ()
    """Rules that are not looked at."""
    evidence_steps: Whole = 3
    """Of how many steps an alarm keeps rollouts, tensors and metrics in evidence/; 0: none."""
    recoveries: Count = 3
    """How often 'recover' may; then the run ends with exit code 3."""
    lr_factor: Portion = 0.5
    """What the learning rate is multiplied by at each recovery."""
    clip_factor: Portion = 1.0
    """What the bounds of the clip are multiplied by at each recovery."""
    skip_data: Flag = True
    """Whether the problems of the steps given up are left out after a recovery, and others drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What is kept."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    directory: Text = "runs"
    """The folder of all runs."""
    name: Text | None = None
    """The folder of this one; absent: task, algorithm, seed and a number."""
    checkpoint_every_steps: Whole = 100
    """How often a checkpoint is written; 0: at the end and on a signal only."""
    keep_last: Count = 2
    """How many checkpoints are kept beside the best."""
    rollouts_every_steps: Whole = 20
    """How often the rollouts of a step are written, those of the last among them; 0: never."""
    rollout_tokens: Whole = 16384
    """Of how many tokens of such a step ratio, log-prob, advantage and coefficient are written too; 0: none."""
    tensorboard: Flag = False
    """Whether metrics go to TensorBoard too."""
    wandb: Flag = False
    """Whether metrics go to Weights & Biases too."""
    project: Text = "legato"
    """The project there."""
    tags: tuple[Text, ...] = ()
    """Tags there."""
