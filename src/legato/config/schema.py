"""Every option of a run. The string below a field is its documentation: `document.py` makes docs/configuration.md of it.

What values there are is in `values.py`, what several options have to agree on in `checks.py`; how files and words become
this tree is in `load.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, Strict

from legato.config.schema_results import Evaluation, Health, Output
from legato.config.values import LARGEST, STRICT, Count, Flag, NotNegative, Number, Options, Portion, Positive, Text, Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmName:
    """Which algorithm, and what is changed in it."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: Text = "gspo"
    """The named algorithm; `legato explain` lists them. Its settings are defaults of the run."""
    changes: Options = field(default_factory=dict)
    """Any path of the algorithm, in the same table: objective.trust.clip.low = 3e-4, advantage = "group-centre"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondTask:
    """The task of the second stage."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    kind: Text
    """Where its problems come from; as task.kind."""
    options: Options = field(default_factory=dict)
    """The kind's own options, in the same table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is practised."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    kind: Text = "arithmetic"
    """A task made in code, a kind of data, or "module:Name" of your own."""
    options: Options = field(default_factory=dict)
    """The kind's own options, in the same table: operation = "add"."""
    held_out: Count = 128
    """How many held-out problems are evaluated."""
    held_out_share: Annotated[Number, Field(gt=0, lt=1)] = 0.2
    """The share of all problems, chosen by hash, that is never trained on."""
    system_prompt: Text | None = None
    """A system message before every problem; without a chat template it is put before the text."""
    shuffle: Flag = True
    """Whether the order of the problems changes from epoch to epoch."""
    resampling: Literal["none", "dynamic", "history"] = "none"
    """'dynamic': groups of equal accuracy are replaced (DAPO); 'history': problems that all solved are left out (SRPO)."""
    max_refills: Count = 8
    """How often a step may sample again to replace groups before it goes on with fewer."""
    problems_per_epoch: Count | None = None
    """For tasks made in code: how many drawn problems make an epoch; absent: never the same list twice."""
    stages: Annotated[int, Strict(), Field(ge=1, le=2)] = 1
    """2: after `second_after_steps` steps the problems come from both tasks in turn."""
    second: SecondTask | None = None
    """The task of the second stage: a table with a kind and its options."""
    second_after_steps: Count | None = None
    """The step after which the second stage begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One reward of several."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    kind: Text
    """Which reward; as reward.kind."""
    options: Options = field(default_factory=dict)
    """The kind's own options, in the same table."""
    weight: Number = 1.0
    """What its value is multiplied by in the sum."""
    judges: Flag = True
    """Whether it says that an answer is right; accuracy is the mean of those that do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlong:
    """DAPO's soft punishment of responses that come near the limit."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    cache_share: Portion = 0.2
    """The last share of rollouts.max_response_tokens over which the punishment grows from 0 to full."""
    factor: Positive = 1.0
    """The full punishment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """What is rewarded."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    kind: Text | None = "number"
    """A reward of ours, or "module:name" or "file.py:name" of your own; absent where there are `components`."""
    options: Options = field(default_factory=dict)
    """The kind's own options, in the same table: tolerance = 0.01."""
    components: Mapping[str, Component] = field(default_factory=dict)
    """Several rewards by name, in place of `kind`: the reward is their weighted sum."""
    overlong: Overlong | None = None
    """Punishes overlong responses; absent: not. It is no part of accuracy."""
    timeout_seconds: Positive | None = None
    """For async rewards: one that takes longer leaves its rollout unscored; absent: it may take for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """The size of the models built in code."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    hidden: Count = 128
    """Width."""
    layers: Count = 2
    """Depth."""
    heads: Count = 4
    """Attention heads; they divide the width."""
    experts: Count = 8
    """Experts of a layer ("tiny-moe")."""
    experts_per_token: Count = 2
    """Experts a token is sent to ("tiny-moe")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upcycle:
    """A dense model made into a mixture of experts, which start as copies of its MLPs."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    experts: Annotated[int, Strict(), Field(ge=2, le=LARGEST)] = 8
    """Experts of a layer."""
    experts_per_token: Annotated[int, Strict(), Field(ge=2, le=LARGEST)] = 2
    """Experts a token is sent to."""
    noise: NotNegative = 0.0
    """Standard deviation of noise on the experts, relative to that of each matrix; 0: copies, equal to the dense model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """A short supervised stage before the first step, on training problems and their answers."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    steps: Count = 150
    """How many supervised updates."""
    examples_per_step: Count = 256
    """Problems in each."""
    lr: Positive = 2e-3
    """Their learning rate."""
    stop_loss: Positive | None = None
    """Ends the stage as soon as the mean loss of its last five steps is at most this; absent: all steps are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters in place of full training."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    rank: Count = 16
    """Rank of the adapters."""
    alpha: Positive | None = None
    """Their scale times the rank; absent: twice the rank."""
    targets: tuple[Text, ...] = ()
    """Names of the modules that get one; empty: every linear layer but the output's."""

    @property
    def scale(self) -> float:
        """What `alpha` comes to."""
        return 2.0 * self.rank if self.alpha is None else self.alpha


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The model that is trained."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    model: Text = "tiny"
    """"tiny" or "tiny-moe" (built in code), "smollm2", a folder or a hub name."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Of the weights; auto: bfloat16 on a GPU, float32 on a CPU. Log-probs are float32 or better whatever it is."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where; auto: a GPU if there is one."""
    max_prompt_tokens: Count = 256
    """The longest prompt."""
    too_long: Literal["drop", "error"] = "drop"
    """What becomes of a problem whose prompt is longer: left out and counted, or the end of the run."""
    chat: Literal["auto", "always", "never"] = "auto"
    """Whether problems are put into the chat template; auto: if the tokenizer has one."""
    chat_template_kwargs: Options = field(default_factory=dict)
    """Further arguments of the chat template: enable_thinking = false."""
    end_tokens: tuple[Text, ...] = ()
    """Tokens that end a response beside the tokenizer's own."""
    trust_remote_code: Flag = False
    """Whether code that comes with a model may run. It can do anything you can."""
    gradient_checkpointing: Flag | Literal["auto"] = "auto"
    """Computes activations again in the backward pass: less memory, more time, the same result; auto: if they do not fit."""
    packing: Flag = True
    """Whether responses stand one after the other in a row, without padding."""
    frozen: tuple[Text, ...] = ()
    """Parameters that are not trained, by patterns of their names: "*embed_tokens*"."""
    tiny: Tiny = field(default_factory=Tiny)
    """The size of the models built in code."""
    upcycle: Upcycle | None = None
    """Makes a mixture of experts of a dense Llama, Mistral or Qwen3 ("smollm2", "tiny"); absent: it stays as it is."""
    warm_up: WarmUp | None = None
    """A supervised stage before the first step; absent: none."""
    lora: Lora | None = None
    """Low-rank adapters; absent: all weights are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A sampler that differs from the trainer on purpose, to see what such a gap does (docs/mismatch.md)."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    kind: Literal["none", "bf16", "fp16", "int8", "kv-bf16", "kv-int8", "perturbed", "stale"] = "none"
    """What differs: precision of the weights or of stored keys and values, noise on the weights, or their age."""
    size: Positive | None = None
    """'perturbed': the standard deviation of the relative noise on a weight; absent: 0.001."""
    updates: Count | None = None
    """'stale': how many updates old the sampler's weights are; absent: 4. So many copies are held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """How responses are sampled."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    engine: Text = "local"
    """What samples: "local" is the very model being trained; or "module:Name" or "file.py:Name" of an engine of your own."""
    samples_per_prompt: Annotated[int, Strict(), Field(ge=2, le=LARGEST)] = 8
    """The size of a group. One response has no siblings to be compared with."""
    temperature: Positive = 1.0
    """Of sampling, and of every log-prob."""
    top_p: Portion = 1.0
    """Keeps the likeliest tokens that hold this probability together; 1: all."""
    top_k: Whole = 0
    """Keeps this many tokens; 0: all."""
    min_p: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Keeps tokens at least this likely, relative to the likeliest; 0: all."""
    max_response_tokens: Count = 64
    """The longest response."""
    stop: tuple[Text, ...] = ()
    """Strings that end a response."""
    rows_at_once: Count = 256
    """Sequences decoded together: more is faster and needs more memory."""
    kv_memory_share: Portion = 0.5
    """On a GPU, the share of the memory training leaves free that keys and values may take; rows_at_once is cut to fit."""
    mismatch: Mismatch = field(default_factory=Mismatch)
    """A sampler that differs from the trainer on purpose; evaluations are of the policy itself whatever this is."""
    record_routes: Flag | Literal["auto"] = "auto"
    """Whether the engine notes the experts of every token it reads, K bytes a layer and token; auto: if there are any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How the policy is updated."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    seed: Whole = 0
    """Everything random follows from it."""
    steps: Count = 400
    """Steps: each samples, scores and updates."""
    prompts_per_step: Count = 32
    """Problems of a step; each is sampled rollouts.samples_per_prompt times."""
    updates_per_step: Count = 4
    """Optimizer steps into which the groups of a step are divided."""
    epochs_per_step: Count = 1
    """How often each response is used."""
    lr: Positive = 1e-6
    """The learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after the warm-up, down to final_lr_share at the last update."""
    warm_up_updates: Whole = 0
    """Updates over which the learning rate rises from 0."""
    final_lr_share: Annotated[Number, Field(ge=0, le=1)] = 0.0
    """The share of the learning rate that is left at the end of a falling schedule."""
    weight_decay: NotNegative = 0.0
    """Of AdamW."""
    betas: tuple[Annotated[Number, Field(ge=0, lt=1)], Annotated[Number, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Of Adam."""
    epsilon: Positive = 1e-8
    """Of Adam, at most 0.001. The clip of the ratio is algorithm.objective.trust.clip."""
    gradient_clip: NotNegative = 1.0
    """The largest norm of the gradient; 0: no limit."""
    anchor: Literal["auto", "recompute", "sampler"] = "auto"
    """Where the old log-probs come from; auto decides by the measured noise floor and says so."""
    accept_unsafe_anchor: Flag = False
    """Go on with anchor = "sampler" where the measured noise floor is above a third of the clip band; else the run ends."""
    update_passes: Literal["auto", "one", "two"] = "auto"
    """'one': every row forward and backward; 'two': rows without a gradient are skipped; auto: the cheaper."""
    skip_silent_rows: Flag = True
    """Leaves rows out of an update that have no advantage and nothing else to pull at them. It changes no gradient."""
    tokens_per_pack: Count = 16384
    """Tokens in one forward pass: more is faster and needs more memory. It changes no result."""
    optimizer: Literal["adamw", "adamw-8bit"] = "adamw"
    """'adamw-8bit' needs bitsandbytes and a GPU."""
    offload_optimizer: Flag = False
    """Whether the state of the optimizer is kept in the memory of the CPU."""
    probe_every_steps: Whole = 100
    """How often the noise floor of the ratio is measured; 0: before the first step only."""
    minimum_scored: Annotated[Number, Field(ge=0, le=1)] = 0.5
    """A step of whose rollouts a smaller share could be scored is not trained on."""
    value_lr: Positive | None = None
    """The learning rate of the value head (ppo); absent: that of the policy."""
    routing_replay: Literal["off", "R2", "R3"] = "off"
    """Forces the experts of 'R2' the old-policy pass or 'R3' the engine in every pass of an update (mixtures of experts)."""
    load_balance: NotNegative = 0.0
    """Coefficient of the routers' load-balance loss, which is 1 where the load is even; 0: off. Takes two passes."""

    @property
    def warm_up_steps(self) -> int:
        """The steps in which the learning rate warms up."""
        return -(-self.warm_up_updates // (self.updates_per_step * self.epochs_per_step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The configuration of a run."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    algorithm: AlgorithmName = field(default_factory=AlgorithmName)
    """Which algorithm, and what is changed in it."""
    task: Task = field(default_factory=Task)
    """What is practised."""
    reward: Reward = field(default_factory=Reward)
    """What is rewarded."""
    policy: Policy = field(default_factory=Policy)
    """The model that is trained."""
    rollouts: Rollouts = field(default_factory=Rollouts)
    """How responses are sampled."""
    training: Training = field(default_factory=Training)
    """How the policy is updated."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    """How held-out accuracy is measured."""
    health: Health = field(default_factory=Health)
    """What the health watch does."""
    output: Output = field(default_factory=Output)
    """What is kept."""
