"""An exact engine in Triton's interpreter: log-probs of sampled tokens equal the trainer's to the bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from legato.config.load import load
from legato.core.texts import Texts
from legato.errors import InputError
from legato.policy.head import head as heads
from legato.policy.head.head import Head
from legato.policy.layers import products
from legato.policy.layers.fused import Parts
from legato.policy.layout.packs import Pack, pack
from legato.policy.layout.spans import Spans, Uses
from legato.policy.model.reference import Reference
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits, Request, Response
from legato.rollouts.gpu import exactness, prefill
from legato.rollouts.gpu.buckets import Bucket
from legato.rollouts.gpu.engine import GraphedEngine
from legato.rollouts.gpu.walk import first_difference
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.local.select import local_engine
from legato.rollouts.prompts import prompt_texts, response_texts
from legato.rollouts.sampling import Sampling
from legato.run import wire
from tests.policy import fused
from tests.rollouts.families import make_policy, make_requests

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array"),  # of Triton's interpreter, for numpy
    pytest.mark.filterwarnings("ignore:divide by zero"),
    pytest.mark.filterwarnings("ignore:invalid value"),
]

LIMITS = Limits(max_response_tokens=4, end_tokens=())


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU paths of engine and trainer on a CPU.

    A CPU's matrix product depends on the number of rows, so products are made row by row here; on a GPU `products.linear`
    pads them.
    """
    fused.install(monkeypatch)
    fused.sum_in_order(monkeypatch)
    monkeypatch.setattr(prefill, "pack", _pack_with_spans)
    monkeypatch.setattr(products, "plain_linear", _row_by_row)
    monkeypatch.setattr(Head, "_product", lambda self, hidden: heads._product_of(self.linear, hidden))
    monkeypatch.setattr(Head, "exact", lambda self, hidden: self.linear(hidden).detach())


def _pack_with_spans(texts: Texts, rows: Tensor) -> Pack:
    packed = pack(texts, rows)
    spans = Spans.from_lengths(packed.prefix_lengths, packed.suffix_lengths, packed.owner, packed.positions)
    return replace(packed, spans=spans, reads=Uses.from_index(packed.read, len(packed.tokens)))


def _row_by_row(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    output = torch.stack([weight @ row for row in x])
    return output if bias is None else output + bias


def trainer_logprobs(policy: Policy, requests: list[Request], responses: list[list[Response]], temperature: float) -> Any:
    """[rows, tokens]: what the trainer scores for the responses, packed in one pack and each in a pack of its own."""
    tokens = torch.stack([response.tokens for row in responses for response in row])
    group = torch.repeat_interleave(torch.tensor([len(row) for row in responses]))
    texts = replace(
        prompt_texts([request.prompt for request in requests]),
        tokens=tokens,
        lengths=torch.full((len(tokens),), tokens.shape[1]),
        mask=torch.ones_like(tokens, dtype=torch.bool),
        group=group,
        temperature=torch.full((len(tokens),), temperature),
    )
    together = policy.score(texts, torch.arange(len(tokens))).logprobs
    alone = torch.cat([policy.score(texts, torch.tensor([row])).logprobs for row in range(len(tokens))])
    return together, alone


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        ("qwen3", 1.0),
        pytest.param("qwen2", 0.7, marks=pytest.mark.slow),
        pytest.param("llama", 1.0, marks=pytest.mark.slow),
        pytest.param("mistral", 0.7, marks=pytest.mark.slow),
    ],
)
def test_sampled_tokens_have_the_trainers_logprobs_to_the_bit(name: str, temperature: float) -> None:
    # Without its window a Mistral has Llama's layers; with it, it is not exact.
    policy = make_policy(name, **({"sliding_window": None} if name == "mistral" else {}))
    requests = make_requests(3, 9, each=2)
    sampling = Sampling(temperature=temperature)
    responses = {}
    for exact in (True, False):
        policy.exact = exact
        responses[exact] = GraphedEngine(policy, rows_at_once=3, graphs=False).generate(requests, sampling, LIMITS)
    policy.exact = True
    for exact, listed in responses.items():
        logprobs = torch.stack([response.logprobs for row in listed for response in row])
        together, alone = trainer_logprobs(policy, requests, listed, temperature)
        assert torch.equal(together, alone)
        # Without `exact` sums are made in another order: a comparison that cannot fail would not show that.
        assert torch.equal(logprobs, together) is exact
        assert torch.allclose(logprobs, together, atol=1e-5)


@pytest.mark.usefixtures("interpreted")
def test_the_reference_has_the_bits_of_the_policy_it_was_copied_from() -> None:
    policy = make_policy("qwen3")
    reference = Reference.from_policy(policy)
    texts = response_texts([torch.tensor([5, 6, 7])], torch.tensor([[3, 8, 9, 2], [4, 4, 1, 7]]), torch.tensor([0, 0]))
    rows, scores = torch.arange(2), {}
    for exact in (True, False):  # chosen after the reference was made
        policy.exact = exact
        with torch.no_grad():
            scores[exact] = policy.score(texts, rows).logprobs
        assert torch.equal(reference.score(texts, rows).logprobs, scores[exact])
    assert not torch.equal(scores[True], scores[False]), "otherwise this test cannot fail"


@pytest.mark.usefixtures("interpreted")
def test_the_walk_names_the_first_operation_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, request = make_policy("qwen3"), make_requests(5, each=1)[0]
    joined: list[bool] = []
    policy.exact = True
    tokens = torch.tensor([7, 9, 11, 4])
    assert first_difference(policy, request.prompt, tokens, rows=2) is None
    parts, layers = Bucket.parts, policy.body.get_decoder().layers

    def spoiled(bucket: Bucket) -> Parts:
        def project(module: Any, x: Tensor) -> Tensor:
            output = parts(bucket).project(module, x)
            later = module is layers[1].mlp.up_proj and int(bucket.store.length[0]) == 2
            return torch.nextafter(output, output + 1) if later else output

        joined.append(bucket.joined)
        return replace(parts(bucket), project=project, project_many=None)

    monkeypatch.setattr(Bucket, "parts", spoiled)
    difference = first_difference(policy, request.prompt, tokens, joined=False)
    assert not any(joined), "it decodes as the engine does"
    assert difference is not None and (difference.token, difference.operation) == (2, "layers.1.mlp.up_proj")
    assert difference.unequal == difference.elements == 48 and 0 < difference.largest < 1e-5
    assert "response token 2" in str(difference)


@pytest.mark.usefixtures("interpreted")
def test_an_engine_is_tried_before_it_is_called_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy("llama")
    monkeypatch.setattr(exactness, "_FEW_ROWS", (1, 2))
    monkeypatch.setattr(exactness, "_TOKENS", 3)
    engine = GraphedEngine(policy, rows_at_once=2, graphs=False)
    policy.exact = True
    assert exactness.find_difference(engine, policy) is None
    parts = Bucket.parts
    monkeypatch.setattr(
        Bucket,
        "parts",
        lambda bucket: replace(parts(bucket), swiglu=lambda gate, up: parts(bucket).swiglu(gate, up) * 1.0001),
    )
    engine.forget()
    difference = exactness.find_difference(engine, policy)
    assert difference is not None and "SwiGLU at response token 0" in difference


def test_what_cannot_be_exact_is_named() -> None:
    policy = make_policy("qwen3")
    engine = local_engine(policy, 4, exact="auto")
    assert isinstance(engine, LocalEngine) and not policy.exact and policy.notes == []
    with pytest.raises(InputError, match="a Hopper GPU is needed"):
        local_engine(policy, 4, exact="on")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rollouts.top_p": 0.9}, "top-p"),
        ({"rollouts.ahead": 1}, "older weights"),
        ({"task.environment": "guess"}, "several turns"),
        ({"rollouts.mismatch.kind": "stale"}, "mismatch"),
        ({"rollouts.engine": "legato", "rollouts.servers.start": 1}, "only 'local'"),
        ({"training.tokens_per_pack": 32768}, "packs of up to 16384"),
    ],
)
def test_settings_that_rule_it_out_are_refused_if_it_must_be_on(options: dict[str, Any], reason: str) -> None:
    policy = make_policy("qwen3")
    config = load([], [f"{path}={value}" for path, value in options.items()]).config
    assert wire._exactness(config, policy) == "off"
    config = load([], [*(f"{path}={value}" for path, value in options.items()), "rollouts.exact=on"]).config
    with pytest.raises(InputError, match=reason):
        wire._exactness(config, policy)


@pytest.mark.parametrize(
    ("words", "ranks", "expected"),
    [
        ((), 1, "auto"),
        (("training.prompts_per_step=8",), 1, "off"),
        ((), 2, "off"),
        (("training.anchor=recompute",), 1, "off"),
        (("training.updates_per_step=1",), 1, "off"),
    ],
)
def test_it_is_left_off_where_it_costs_more_than_it_saves(words: tuple[str, ...], ranks: int, expected: str) -> None:
    config = load([], ["training.prompts_per_step=16", "rollouts.samples_per_prompt=8", *words]).config
    assert wire._exactness(config, make_policy("qwen3"), ranks) == expected


def test_a_policy_is_exact_only_if_nothing_differs_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy("qwen3")
    engine = GraphedEngine(policy, graphs=False)
    assert exactness.make_exact(policy, engine) is not None and not policy.exact  # on a CPU
    monkeypatch.setattr(exactness, "why_not_exact", lambda policy: None)
    monkeypatch.setattr(exactness, "find_difference", lambda engine, policy: None)
    assert exactness.make_exact(policy, engine) is None and policy.exact
    monkeypatch.setattr(exactness, "find_difference", lambda engine, policy: "3 of 9 log-probs differ")
    assert exactness.make_exact(policy, engine) == "3 of 9 log-probs differ" and not policy.exact

    def run_out(engine: Any, policy: Any) -> str | None:
        raise torch.OutOfMemoryError("CUDA out of memory\nmore")

    monkeypatch.setattr(exactness, "find_difference", run_out)
    assert exactness.make_exact(policy, engine) == "OutOfMemoryError: CUDA out of memory" and not policy.exact
    policy.exact = True
    local_engine(policy, 4, exact="off")
    assert not policy.exact


def test_an_engine_whose_joined_products_differ_decodes_with_separate_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy("qwen3")
    engine = GraphedEngine(policy, graphs=False)
    monkeypatch.setattr(exactness, "why_not_exact", lambda policy: None)

    def differ_if_joined(engine: Any, policy: Any) -> str | None:
        return "the product of q_proj differs" if engine.joined else None

    def differ_or_run_out(engine: Any, policy: Any) -> str | None:
        if engine.joined:
            return "the product of q_proj differs"
        raise torch.OutOfMemoryError("CUDA out of memory")

    for find, exact, joined in (
        (differ_or_run_out, False, True),
        (lambda engine, policy: "attention differs", False, True),
        (differ_if_joined, True, False),
    ):
        monkeypatch.setattr(exactness, "find_difference", find)
        assert (exactness.make_exact(policy, engine) is None) == exact
        assert (policy.exact, engine.joined) == (exact, joined)


def test_a_projection_with_a_hook_is_called() -> None:
    module, x = torch.nn.Linear(4, 5), torch.randn(2, 4)
    assert torch.equal(products.project_alike(module, x), module(x))
    module.register_forward_hook(lambda module, inputs, output: output + 1)
    assert torch.equal(products.project_alike(module, x), module(x))


def test_products_are_padded_to_the_rows_from_which_on_they_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()

    def split_below_seven(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As cuBLAS: with few rows another order of sums, here another result."""
        sizes.append(len(x))
        return torch.nn.functional.linear(x, weight, bias) + (1 if len(x) < 7 else 0)

    monkeypatch.setattr(products, "plain_linear", split_below_seven)
    monkeypatch.setattr(products, "_PACK", 64)
    monkeypatch.setattr(products, "_SIZES", tuple(range(1, 33)))
    assert products._measure_least_rows(torch.device("cpu"), torch.float64, (5,), 4, True) == 7
    monkeypatch.setattr(products, "least_rows", lambda weight, bias: 7)
    weight, x = torch.randn(5, 4, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    assert torch.equal(products.linear(x[:2], weight), products.linear(x, weight)[:2])
    assert sizes[-2:] == [7, 9]
    monkeypatch.setattr(products, "MOST_PADDED", 6)
    assert products._measure_least_rows(torch.device("cpu"), torch.float64, (5,), 3, True) is None
