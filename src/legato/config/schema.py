"""The sections of a configuration.

A section inherits the settings of the code that uses them (`core/settings.py`): `config.training` has the settings of the
step and of the optimizer. It declares only the options that the run itself reads.

`checks.py` checks options against each other. `load.py` builds the configuration from files and words.
"""

from collections.abc import Mapping
from typing import Any

from legato.core.fields import choice, flag, integer, number, text, texts
from legato.core.settings import free_table, narrow, needed_table, optional_table, settings, table, tables
from legato.health.actions import HealthSettings
from legato.policy.model.load import Loading
from legato.policy.model.supervised import WarmUp
from legato.rewards.scoring import ComponentSettings, RewardSettings
from legato.rollouts.engine import EngineSettings, ResponseSettings
from legato.rollouts.episodes import EpisodeSettings
from legato.rollouts.mismatch import Mismatch
from legato.rollouts.render import ChatSettings, SystemPrompt, ToolSettings
from legato.rollouts.sampling import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, Sampling
from legato.rollouts.servers.settings import ServerSettings
from legato.tasks.source import SourceSettings
from legato.training.ahead import AheadSettings
from legato.training.collect import GroupSettings, PromptSettings, ResamplingSettings
from legato.training.optimizer import OptimizerSettings
from legato.training.step import TrainingSettings
from legato.training.teacher import TeacherSettings


@settings()
class AlgorithmName:
    """The name of the algorithm, and the changes to it."""

    name: str = text(
        default="gspo",
        says="The named algorithm; `legato explain` lists them. Its settings are defaults of the run.",
        resume="refused",
    )
    changes: Mapping[str, Any] = free_table(
        default_factory=dict,
        says='Any path of the algorithm, in the same table: objective.trust.clip.low = 3e-4, advantage = "group-centre".',
    )


@settings()
class SecondTask:
    """The task of the second stage."""

    kind: str = text(says="Where its problems come from; as task.kind.")
    options: Mapping[str, Any] = free_table(default_factory=dict, says="The kind's own options, in the same table.")


@settings()
class Task(SourceSettings, SystemPrompt, ResamplingSettings, ToolSettings, EpisodeSettings):
    """The task to train on."""

    kind: str = text(
        default="arithmetic",
        says='A task made in code, a kind of data, or "module:Name" of your own.',
        resume="refused",
    )
    options: Mapping[str, Any] = free_table(
        default_factory=dict, says='The kind\'s own options, in the same table: operation = "add".'
    )
    environment: str | None = text(
        default=None,
        says='The environment of multi-turn tasks: a registered name, or "module:Name" or "file.py:Name" of your own;'
        " absent: a rollout is one response.",
        optional=True,
    )
    environment_options: Mapping[str, Any] = free_table(
        default_factory=dict, says="Options of the environment: its fields, or the arguments of its class."
    )
    stages: int = integer(
        default=1,
        says="2: after `second_after_steps` steps the problems alternate between both tasks.",
        minimum=1,
        maximum=2,
    )
    second: SecondTask | None = optional_table(
        SecondTask, default=None, says="The task of the second stage: a table with a kind and its options."
    )
    second_after_steps: int | None = integer(
        default=None, says="The step after which the second stage begins.", minimum=1, optional=True
    )
    held_out: int = integer(default=128, says="Number of held-out problems that are evaluated.", minimum=1)


@settings()
class Component(ComponentSettings):
    """One of several rewards that are summed."""

    kind: str = text(says="Which reward; as reward.kind.")
    options: Mapping[str, Any] = free_table(default_factory=dict, says="The kind's own options, in the same table.")


@settings()
class Reward(RewardSettings):
    """The reward function."""

    kind: str | None = text(
        default="number",
        says='A reward of ours, or "module:name" or "file.py:name" of your own; absent if there are `components`.',
        optional=True,
    )
    options: Mapping[str, Any] = free_table(
        default_factory=dict, says="The kind's own options, in the same table: tolerance = 0.01."
    )
    components: Mapping[str, Component] = tables(
        Component,
        default_factory=dict,
        says="Several rewards by name, in place of `kind`: the reward is their weighted sum.",
    )


@settings()
class Policy(Loading, ChatSettings, PromptSettings):
    """The model that is trained."""

    model: str = text(
        default="tiny",
        says='"tiny" or "tiny-moe" (built in code), "smollm2", a folder or a hub name.',
        resume="refused",
    )
    end_tokens: tuple[str, ...] = texts(default=(), says="Tokens that end a response beside the tokenizer's own.")
    warm_up: WarmUp | None = optional_table(
        WarmUp, default=None, says="A supervised stage before the first step; absent: none.", resume="refused"
    )


@settings()
class Rollouts(GroupSettings, Sampling, ResponseSettings, EngineSettings, AheadSettings):
    """Sampling of responses."""

    engine: str = text(
        default="local",
        says='The sampling engine: "local" samples from the trained model; "vllm", "sglang" and "legato" at servers'
        ' (rollouts.servers); or "module:Name" or "file.py:Name" of your own.',
    )
    # A greedy sampler has no ratio, and below 0.001 float32 log-probs cannot tell one ratio from another. Evaluations have
    # their own temperature.
    temperature: float = narrow(Sampling, "temperature", minimum=1e-3, maximum=HIGHEST_TEMPERATURE)
    servers: ServerSettings = table(
        default_factory=ServerSettings,
        says='The servers of the engines "vllm", "sglang" and "legato" (docs/engines.md).',
    )
    mismatch: Mismatch = table(
        default_factory=Mismatch,
        says="A sampler that differs from the trainer on purpose; evaluations always sample from the policy itself.",
    )


@settings()
class Training(TrainingSettings, OptimizerSettings):
    """Updates of the policy."""

    steps: int = integer(default=400, says="Steps: each samples, scores and updates.", minimum=1, resume="free")

    @property
    def total_updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps * self.updates_per_step * self.epochs_per_step

    @property
    def shortens_warm_up(self) -> bool:
        """Whether the run has fewer updates than its learning-rate warm-up."""
        return self.warm_up(self.total_updates) < self.warm_up_updates

    @property
    def warm_up_steps(self) -> int:
        """The number of steps in which the learning rate warms up."""
        return -(-self.warm_up(self.total_updates) // (self.updates_per_step * self.epochs_per_step))


@settings(resume="free")
class SetTask:
    """The task of an evaluation set."""

    kind: str = text(says='Where its problems come from; as task.kind. `task = "aime-24"` is short for it.')
    options: Mapping[str, Any] = free_table(
        default_factory=dict, says='The kind\'s own options, in the same table: path = "aime24.jsonl".'
    )


@settings(resume="free")
class SetReward:
    """The reward of an evaluation set."""

    kind: str = text(says='Which reward; as reward.kind. `reward = "number"` is short for it.')
    options: Mapping[str, Any] = free_table(default_factory=dict, says="The kind's own options, in the same table.")


@settings(resume="free")
class EvaluationSet:
    """A set of problems that is evaluated beside the held-out ones."""

    task: SetTask = needed_table(
        SetTask, allowed="the name of a task or a table with its kind", says="Where its problems come from."
    )
    reward: SetReward | None = optional_table(
        SetReward,
        default=None,
        says="The reward that judges its answers; absent: the usual one of a published set, else the reward of the run.",
    )
    problems: int | None = integer(
        default=None,
        says="How many problems, from the first; absent: all of a data set, task.held_out of a task made in code.",
        minimum=1,
        optional=True,
    )
    samples_per_problem: int | None = integer(
        default=None,
        says="Responses sampled for each problem, k of avg@k; absent: the usual number of a published set, else"
        " evaluation.samples_per_problem.",
        minimum=1,
        optional=True,
    )
    every_steps: int | None = integer(
        default=None,
        says="Steps between evaluations of this set; 0: only before the first step and at the end; absent: as"
        " evaluation.every_steps.",
        minimum=0,
        optional=True,
    )
    temperature: float | None = number(
        default=None,
        says="Temperature of the responses, 0: greedy; absent: evaluation.temperature.",
        minimum=0.0,
        maximum=HIGHEST_TEMPERATURE,
        optional=True,
    )
    top_p: float | None = number(
        default=None,
        says="Keeps the likeliest tokens that hold this probability together; absent: all.",
        above=0.0,
        maximum=1.0,
        optional=True,
    )
    max_response_tokens: int | None = integer(
        default=None, says="The longest response; absent: rollouts.max_response_tokens.", minimum=1, optional=True
    )

    def check(self) -> None:
        """InputError for a temperature that is neither 0 nor large enough to divide by."""
        Sampling(temperature=1.0 if self.temperature is None else self.temperature)


@settings(resume="free")
class Evaluation:
    """Evaluation on held-out problems, and on further sets."""

    every_steps: int = integer(
        default=20, says="Steps between evaluations; 0: only before the first step and at the end.", minimum=0
    )
    samples_per_problem: int = integer(default=1, says="Responses sampled for each held-out problem.", minimum=1)
    greedy: bool = flag(default=True, says="Whether greedy accuracy is measured too.")
    temperature: float = number(
        default=1.0,
        says="Temperature of the sampled responses.",
        minimum=LOWEST_TEMPERATURE,
        maximum=HIGHEST_TEMPERATURE,
    )
    target: float | None = number(
        default=None,
        says="The run ends early when sampled accuracy reaches this (and greedy accuracy target_greedy, if set).",
        above=0.0,
        maximum=1.0,
        optional=True,
    )
    target_greedy: float | None = number(
        default=None,
        says="The run ends early when greedy accuracy reaches this (and sampled accuracy target, if set).",
        above=0.0,
        maximum=1.0,
        optional=True,
    )
    best_metric: str = text(
        default="eval/accuracy_sampled",
        says='The metric by which the best checkpoint is chosen and kept: "eval/accuracy_greedy", "eval/reward_sampled",'
        ' "eval/NAME/avg@16", "eval/NAME/pass@8".',
    )
    sets: Mapping[str, EvaluationSet] = tables(
        EvaluationSet,
        default_factory=dict,
        says="Further problems to evaluate on: `[[evaluation.sets]]` in a recipe, each with a name; or a list of the names"
        " of tasks.",
    )


@settings(resume="free")
class Output:
    """Run directory, checkpoints, stored rollouts and loggers."""

    directory: str = text(default="runs", says="The folder of all runs.", resume="refused")
    name: str | None = text(
        default=None,
        says="The folder of this run; absent: named after task, algorithm and seed, with a number.",
        optional=True,
        resume="refused",
    )
    checkpoint_every_steps: int = integer(
        default=100, says="How often a checkpoint is written; 0: at the end and on a signal only.", minimum=0
    )
    checkpoint_at_end: bool = flag(
        default=True,
        says="Whether a checkpoint is written at the end, and after a warm-up; false: for runs whose weights nobody needs."
        " A signal and output.checkpoint_every_steps write one all the same.",
    )
    save_in_background: str = choice(
        "auto",
        "on",
        "off",
        default="auto",
        says="Whether the run goes on while a checkpoint is written, from a copy in host memory; auto: on a GPU and with"
        " several processes, where there is room for the copy.",
    )
    keep_last: int = integer(default=2, says="Number of newest checkpoints that are kept, besides the best one.", minimum=1)
    rollouts_every_steps: int = integer(
        default=20,
        says="How often the rollouts of a step are written, always those of the last step; a run of few steps writes"
        " them at least at every quarter; 0: never.",
        minimum=0,
    )
    rollout_tokens: int = integer(
        default=16384,
        says="For how many tokens of such a step ratio, log-prob, advantage and coefficient are written; 0: none.",
        minimum=0,
    )
    log_every_steps: int = integer(
        default=0,
        says="Without a terminal, progress is a line every so many steps, too; 0: by time alone. The first and the last"
        " step, evaluations and notes are always printed.",
        minimum=0,
    )
    log_every_seconds: float = number(
        default=30.0,
        says="Without a terminal, progress is a line every so many seconds; 0: by steps alone.",
        minimum=0.0,
    )
    tensorboard: bool = flag(default=False, says="Whether metrics go to TensorBoard too.")
    wandb: bool = flag(default=False, says="Whether metrics and completions go to Weights & Biases too.")
    trackio: bool = flag(default=False, says="Whether metrics and completions go to trackio too.")
    project: str = text(default="legato", says="The project of Weights & Biases and trackio.")
    tags: tuple[str, ...] = texts(default=(), says="Tags in Weights & Biases.")

    def rollout_interval(self, steps: int) -> int:
        """Steps between stored rollouts in a run of so many steps; 0: none are stored."""
        return min(self.rollouts_every_steps, -(-steps // 4))


@settings()
class Config:
    """The configuration of a run."""

    algorithm: AlgorithmName = table(default_factory=AlgorithmName, says="The name of the algorithm, and the changes to it.")
    task: Task = table(default_factory=Task, says="The task to train on.")
    reward: Reward = table(default_factory=Reward, says="The reward function.")
    policy: Policy = table(default_factory=Policy, says="The model that is trained.")
    rollouts: Rollouts = table(default_factory=Rollouts, says="Sampling of responses.")
    teacher: TeacherSettings = table(
        default_factory=TeacherSettings, says="Another model that the policy learns from (on-policy distillation)."
    )
    training: Training = table(default_factory=Training, says="Updates of the policy.")
    evaluation: Evaluation = table(default_factory=Evaluation, says="Evaluation on held-out problems.")
    health: HealthSettings = table(default_factory=HealthSettings, says="What the health watch does.")
    output: Output = table(default_factory=Output, says="Run directory, checkpoints, stored rollouts and loggers.")
