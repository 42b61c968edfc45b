"""The workload of the GPU benchmarks: Qwen3 shapes with random weights, fixed lengths and rewards, and FLOP counts.

`lengths.json` holds the lengths. `python -m benchmarks.gpu.work` wrote it once; it is the same for every side and every run.
"""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.measure import Bench

LENGTHS = Path(__file__).parent / "lengths.json"
PROMPTS, SAMPLES, UPDATES = 32, 8, 4
CLIP_LOW, CLIP_HIGH, LEARNING_RATE = 3e-4, 4e-4, 1e-6
SHAPES: dict[str, dict[str, int]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "vocab_size": 151936},
}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 160}
TINY_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The fixed rollouts of a step: prompt tokens, response tokens, and rewards by prompt and sample."""

    prompts: tuple[tuple[int, ...], ...]
    responses: tuple[tuple[tuple[int, ...], ...], ...]
    rewards: tuple[tuple[float, ...], ...]

    @property
    def useful(self) -> int:
        """The number of response tokens of all rows."""
        return sum(len(row) for group in self.responses for row in group)


def stored_lengths(tiny: bool) -> dict[str, Any]:
    """The lengths of the file. For tiny shapes they are reduced to a few prompts and short texts, equally ragged."""
    lengths: dict[str, Any] = json.loads(LENGTHS.read_text())
    if not tiny:
        return lengths
    shrink = 16
    return {
        "prompts": [max(2, length // shrink) for length in lengths["prompts"][:8]],
        "responses": [[max(2, length // shrink) for length in row[:4]] for row in lengths["responses"][:8]],
        "head": [max(1, length // shrink) for length in lengths["head"][:8]],
    }


def fixed_work(tiny: bool, *, silent: float = 0.0) -> Work:
    """Rollouts with tokens drawn from a fixed seed. `silent` is the share of groups whose rewards are all equal."""
    lengths = stored_lengths(tiny)
    vocabulary = TINY["vocab_size"] if tiny else SHAPES["0.6B"]["vocab_size"]
    source = random.Random("gpu benchmark")

    def text(length: int) -> tuple[int, ...]:
        return tuple(source.randrange(3, vocabulary) for _ in range(length))

    return Work(
        prompts=tuple(map(text, lengths["prompts"])),
        responses=tuple(tuple(map(text, row)) for row in lengths["responses"]),
        rewards=reward_table(len(lengths["prompts"]), len(lengths["responses"][0]), silent),
    )


def reward_table(prompts: int, samples: int, silent: float) -> tuple[tuple[float, ...], ...]:
    """Rewards of 0 or 1 by prompt and sample. In a share `silent` of the rows, spread evenly, all rewards are equal."""
    source = random.Random("rewards")
    table = []
    for place in range(prompts):
        flat = round((place + 1) * silent) > round(place * silent)
        row = [float(source.random() < 0.5) for _ in range(samples - 2)] + [0.0, 1.0]
        source.shuffle(row)
        table.append(tuple([row[0]] * samples) if flat else tuple(row))
    return tuple(table)


def tokenizer() -> Any:
    """A tokenizer with one token per character. Nobody reads the texts, but every trainer needs a tokenizer."""
    from legato.policy.model.tiny import character_tokenizer

    return character_tokenizer()


def make_model(bench: Bench, shape: str, *, dtype: torch.dtype | None = None) -> Any:
    """A Qwen3 of this shape with random weights. The last norm is scaled up, so that the policy is not nearly uniform."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    sizes = {**TINY, **TINY_HEADS} if bench.tiny else {**SHAPES[shape], **HEADS}
    config = Qwen3Config(
        **sizes,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    automatic: Any = AutoModelForCausalLM
    with bench.device:
        model = automatic.from_config(config, dtype=dtype or bench.dtype)
    with torch.no_grad():
        model.get_decoder().norm.weight.fill_(4.0)
    return model.to(bench.device).eval()


def make_policy(bench: Bench, shape: str) -> Any:
    """Our policy around a model of this shape."""
    from legato.policy.model.load import Loading, load_policy

    loading = Loading(device=bench.device.type, dtype="bfloat16" if bench.cuda else "float32")
    return load_policy(make_model(bench, shape), loading, tokenizer=tokenizer())


@dataclass(slots=True)
class Flops:
    """Executed model FLOPs: 2 per matmul parameter and token forward, 4 more backward, and attention per query-key pair.

    Padding and recomputation are not counted: they are not the model's work.
    """

    body: int
    """Matmul parameters of the layers."""
    head: int
    attention: int
    """FLOPs of one query with one key, over all layers."""
    forward: float = 0.0
    backward: float = 0.0

    @classmethod
    def of(cls, model: Any) -> "Flops":
        config = model.config
        matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "layers." in name)
        width = config.num_attention_heads * config.head_dim
        return cls(matrices, config.vocab_size * config.hidden_size, 4 * width * config.num_hidden_layers)

    @classmethod
    def of_shape(cls, shape: str) -> "Flops":
        """The counts of a shape, by arithmetic instead of from a model."""
        sizes = SHAPES[shape]
        hidden, layers = sizes["hidden_size"], sizes["num_hidden_layers"]
        query, key = (HEADS[name] * HEADS["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
        layer = 2 * hidden * (query + key) + 3 * hidden * sizes["intermediate_size"]
        return cls(layers * layer, sizes["vocab_size"] * hidden, 4 * query * layers)

    def add(self, tokens: int, head_tokens: int, pairs: float, *, learning: bool) -> None:
        """Count `tokens` through the body, `head_tokens` of them through the head, and `pairs` of query and key."""
        once = 2.0 * (self.body * tokens + self.head * head_tokens) + self.attention * pairs
        self.forward += once
        self.backward += 2 * once if learning else 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward


def causal_pairs(prompt: int, response: int) -> float:
    """Query-key pairs of a response: its tokens attend to the prompt and to the response itself."""
    return response * prompt + response * (response + 1) / 2


@dataclass(slots=True)
class Packs:
    """The packs that went through the body inside `count_packs`, each with the phase it belongs to."""

    phase: str = ""
    records: list[tuple[Any, ...]] = field(default_factory=list)

    def flops(self, model: Any, phase: str) -> float:
        """FLOPs executed in a phase. Lengths are read here, after the measurement, because reading waits for the GPU."""
        flops = Flops.of(model)
        for during, (prompts, responses, owner), head_tokens, shared, learning in self.records:
            if during == phase:
                tokens, pairs = pack_size(prompts.tolist(), responses.tolist(), owner.tolist(), shared=shared)
                flops.add(tokens, head_tokens, pairs, learning=learning)
        return flops.total


@contextmanager
def count_packs(packs: Packs) -> Iterator[None]:
    """Inside this context, record every pack that goes through the body, and whether autograd is on."""
    from legato.policy.policy import Policy

    original = Policy._hidden_states

    @contextmanager
    def record_pack(self: Any, packed: Any) -> Iterator[Tensor]:
        lengths = (packed.prefix_lengths, packed.suffix_lengths, packed.owner)
        packs.records.append((packs.phase, lengths, sum(packed.counts), self.packing, torch.is_grad_enabled()))
        with original(self, packed) as hidden:
            yield hidden

    Policy._hidden_states = record_pack  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Policy._hidden_states = original  # type: ignore[method-assign]


def pack_size(prompts: list[int], responses: list[int], owner: list[int], *, shared: bool) -> tuple[int, float]:
    """Tokens and query-key pairs of a pack. If not `shared`, every row has its own copy of the prompt."""
    computed = prompts if shared else [prompts[number] for number in owner]
    pairs = sum(causal_pairs(0, length) for length in computed)
    pairs += sum(causal_pairs(prompts[number], length) for number, length in zip(owner, responses, strict=True))
    return sum(computed) + sum(responses), pairs


def possible_gain(prompt: int, response: int, group: int, shape: str = "0.6B") -> float:
    """How many times fewer FLOPs a group needs if its prompt is computed once. The head reads every response either way."""
    totals = []
    for shared in (False, True):
        flops = Flops.of_shape(shape)
        owner = [0] * group
        tokens, pairs = pack_size([prompt], [response] * group, owner, shared=shared)
        flops.add(tokens, group * response, pairs, learning=True)
        totals.append(flops.total)
    return totals[0] / totals[1]


def rectangle_flops(model: Any, work: Work, *, passes: Sequence[bool]) -> Flops:
    """FLOPs of rows that each have their own prompt, as in a trainer that pads. `passes`: True for one with backward."""
    flops = Flops.of(model)
    for prompt, group in zip(work.prompts, work.responses, strict=True):
        for row in group:
            for learning in passes:
                length = len(prompt) + len(row)
                flops.add(length, len(row), causal_pairs(0, length), learning=learning)
    return flops


def make_lengths() -> dict[str, Any]:
    """Draw the stored lengths: log-normal responses with mean 400, at most 1024, and 64 for the head that sum to 16384."""
    source = random.Random("lengths")

    def draw_length(mean: float, spread: float, most: int) -> int:
        centre = mean / 2.718281828 ** (spread**2 / 2)
        return max(8, min(most, round(centre * 2.718281828 ** (spread * source.gauss(0, 1)))))

    responses = [[draw_length(435, 0.6, 1024) for _ in range(SAMPLES)] for _ in range(PROMPTS)]
    head = [draw_length(256, 0.6, 1024) for _ in range(64)]
    # Random entries absorb the difference, so that the table of shapes has round numbers.
    while sum(head) != 16384:
        place = source.randrange(64)
        head[place] = max(8, head[place] + (1 if sum(head) < 16384 else -1))
    return {"prompts": [source.randint(200, 312) for _ in range(PROMPTS)], "responses": responses, "head": head}


if __name__ == "__main__":
    LENGTHS.write_text(json.dumps(make_lengths()) + "\n")
