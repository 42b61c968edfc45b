"""GPU memory of the slot engine: budgets, running out of memory, graphs captured once, fallbacks to the plain engine."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from legato.policy.experts import grouped
from legato.policy.model.load import Loading, load_policy
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits, Request
from legato.rollouts.gpu import budget, slots
from legato.rollouts.gpu import engine as graphed
from legato.rollouts.gpu.engine import GraphedEngine
from legato.rollouts.gpu.slots import Room
from legato.rollouts.local.agreement import describe_failure
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.local.select import first_supported_engine, local_engine
from legato.rollouts.sampling import Sampling
from tests.policy.exact import Words
from tests.policy.routes import as_published
from tests.rollouts import in_torch
from tests.rollouts.families import END, assert_same_responses, make_model, make_policy, make_requests

LIMITS = Limits(max_response_tokens=12, end_tokens=(END, *range(5, 12)))


@pytest.fixture(autouse=True)
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    in_torch.install(monkeypatch)


# A budget


def test_fit_room_returns_the_most_slots_that_fit() -> None:
    room = Room(slots=64, prompts=8, prompt_tokens=128, response_tokens=32)
    assert budget.fit_room(room, 10, None) == room
    for most in (0, 10_000, 20_000, 30_000, 31_040, 10**9):
        fitted = budget.fit_room(room, 10, most)
        assert fitted.slots == 1 or fitted.tokens * 10 <= most
        assert fitted.slots == 64 or room.within(fitted.slots + 1).tokens * 10 > most
        assert fitted.prompts == min(8, fitted.slots)


@pytest.mark.parametrize("name", ["qwen3", "gemma4", "qwen3-moe"])
def test_bytes_per_token_follow_from_the_model_config(name: str) -> None:
    engine = GraphedEngine(make_policy(name), 4, graphs=False)
    engine.generate(make_requests(3), Sampling(), LIMITS)
    assert engine.store is not None and engine.store.bytes_per_token == budget.bytes_per_token(engine.policy)


def test_a_small_memory_budget_means_fewer_slots_one_message_and_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, messages = make_policy("qwen3"), []
    monkeypatch.setattr(budget, "free_bytes", lambda device: 10**9 + 2**20)
    engine = GraphedEngine(policy, 64, graphs=False, training_bytes=10**9, say=messages.append)
    requests = make_requests(*[40] * 16, each=4)
    assert_same_responses(
        engine.generate(requests, Sampling(), LIMITS), LocalEngine(policy).generate(requests, Sampling(), LIMITS)
    )
    assert engine.store is not None
    room = engine.store.room
    assert 1 < room.slots < 64 and room.tokens * budget.bytes_per_token(policy) <= 2**19
    assert messages == [
        f"the engine decodes {room.slots} sequences at a time instead of 64: more do not fit in rollouts.kv_memory_share ="
        " 0.5 of the memory"
    ]


# Running out of memory


def fail_above(most: int, stores: "list[weakref.ref[Any]]") -> Callable[..., None]:
    """A stand-in for `make_tables` that runs out of memory if there are more than `most` slots."""
    make_tables = slots.KVStore.make_tables

    def make_limited_tables(self: slots.KVStore, layer: int, keys: Any) -> None:
        if layer == 1 and layer not in self.keys:
            gc.collect()
            assert all(store() in (None, self) for store in stores), "an earlier store was not freed"
            stores.append(weakref.ref(self))
            if self.room.slots > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
        make_tables(self, layer, keys)

    return make_limited_tables


def test_out_of_memory_halves_the_slots_until_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, messages, stores = make_policy("qwen3"), [], []
    monkeypatch.setattr(slots.KVStore, "make_tables", fail_above(3, stores))
    engine = GraphedEngine(policy, 16, graphs=False, say=messages.append)
    requests = make_requests(3, 9, 1, 17, each=5)
    assert_same_responses(
        engine.generate(requests, Sampling(), LIMITS), LocalEngine(policy).generate(requests, Sampling(), LIMITS)
    )
    assert len(stores) == 4
    assert [text.split(" (")[0] for text in messages] == [
        "out of memory with 16 sequences at a time: the engine goes on with 8",
        "out of memory with 8 sequences at a time: the engine goes on with 4",
        "out of memory with 4 sequences at a time: the engine goes on with 2",
    ]
    engine.generate(requests, Sampling(), LIMITS)
    assert len(stores) == 4 and len(messages) == 3, "the engine forgot its smaller slot count"


def test_out_of_memory_with_one_sequence_reports_needed_and_free_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, messages, stores = make_policy("qwen3"), [], []
    monkeypatch.setattr(slots.KVStore, "make_tables", fail_above(0, stores))
    engine = GraphedEngine(policy, 2, graphs=False, say=messages.append)
    monkeypatch.setattr(budget, "free_bytes", lambda device: 10**9)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"64 prompt and 12 response tokens need 0\.\d MiB .* 953\.7 MiB are free"
    ):
        engine.generate(make_requests(3, 9), Sampling(), LIMITS)
    assert len(messages) == 1 and engine.store is None


def test_an_error_caused_by_out_of_memory_is_recognised_and_others_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = GraphedEngine(make_policy("qwen3"), 4, graphs=False)
    advance, failures = engine.advance, [True]

    def fail_once(*args: Any) -> None:
        if failures and failures.pop():
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            finally:
                raise RuntimeError("the capture was invalidated")
        advance(*args)

    monkeypatch.setattr(engine, "advance", fail_once)
    engine.generate(make_requests(3, 4), Sampling(), LIMITS)
    assert engine.rows_at_once == 2

    def fail_always(*args: Any) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(engine, "advance", fail_always)
    with pytest.raises(RuntimeError, match="something else"):
        engine.generate(make_requests(3, 4), Sampling(), LIMITS)


# Graphs


class Replayed:
    """A stand-in for a CUDA graph whose replay calls the step again."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.step = step

    def replay(self) -> None:
        self.step()


@pytest.fixture
def replayed_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capturing without CUDA: the step runs once at capture and again at every replay."""

    def run_and_keep(step: Callable[[], None], pool: object) -> Replayed:
        step()
        return Replayed(step)

    monkeypatch.setattr(graphed, "capture", run_and_keep)
    monkeypatch.setattr(graphed, "graph_pool", object)


@pytest.mark.usefixtures("replayed_capture")
def test_a_graph_is_captured_once_per_bucket_and_sampling() -> None:
    engine = GraphedEngine(make_policy("qwen3"), 4)
    warm, greedy = Sampling(), Sampling(temperature=0)
    longer = Limits(max_response_tokens=6, end_tokens=(END,))
    requests = make_requests(3, 9, 5, each=2)
    expected = LocalEngine(engine.policy).generate(requests, warm, LIMITS)
    assert_same_responses(engine.generate(requests, warm, LIMITS), expected)
    assert engine.captures == len(engine.buckets) > 1
    engine.generate(requests, greedy, longer)
    once = engine.captures
    for _ in range(3):
        assert_same_responses(engine.generate(requests, warm, LIMITS), expected)
        engine.generate(requests, greedy, longer)
        engine.generate(make_requests(2, each=4), greedy, Limits(max_response_tokens=3, end_tokens=(END, 7)))
        engine.generate(requests, warm, Limits(max_response_tokens=3, end_tokens=()))
    assert engine.captures == once


@pytest.mark.usefixtures("replayed_capture")
def test_the_number_of_graphs_is_bounded_over_many_sampling_settings() -> None:
    engine = GraphedEngine(make_policy("qwen3"), 4)
    requests = make_requests(3, each=4)
    addresses = set()
    for number in range(12):
        sampling = Sampling(temperature=1 + number / 10)
        limits = Limits(max_response_tokens=4, end_tokens=(END, 2 + number))
        responses = engine.generate(requests, sampling, limits)
        assert_same_responses(responses, LocalEngine(engine.policy).generate(requests, sampling, limits))
        addresses.add(engine.end_tokens(()).data_ptr())
    assert len(addresses) == 1
    assert max(len(bucket.graphs) for bucket in engine.buckets.values()) <= 4
    many = Limits(max_response_tokens=4, end_tokens=tuple(range(40)))
    assert_same_responses(
        engine.generate(requests, Sampling(), many), LocalEngine(engine.policy).generate(requests, Sampling(), many)
    )


@pytest.mark.usefixtures("replayed_capture")
def test_moved_weights_are_captured_again() -> None:
    engine, requests = GraphedEngine(make_policy("qwen3"), 4), make_requests(3, each=4)
    engine.generate(requests, Sampling(), LIMITS)
    before = engine.captures
    body = engine.policy.model.model
    body.norm.weight = torch.nn.Parameter(body.norm.weight.detach() * -1)
    assert_same_responses(
        engine.generate(requests, Sampling(), LIMITS), LocalEngine(engine.policy).generate(requests, Sampling(), LIMITS)
    )
    assert engine.captures > before


# Engines that fall back


def engine_for(policy: Policy) -> Any:
    return first_supported_engine(policy, 4, 0.5, graphs=(False,))


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma4"])
def test_a_supported_model_gets_the_slot_engine(name: str) -> None:
    policy = load_policy(make_model(name), Loading(device="cpu"), tokenizer=Words())
    engine = engine_for(policy)
    assert isinstance(engine, GraphedEngine) and engine.store is None
    assert not any("plain engine" in note for note in policy.notes)


def bloom_model() -> Any:
    config = transformers.BloomConfig(vocab_size=64, n_layer=2, n_head=4, hidden_size=32, eos_token_id=1, pad_token_id=0)
    automatic: Any = AutoModelForCausalLM
    return automatic.from_config(config, dtype=torch.float32).eval()


def latent_model() -> Any:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    widths = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
    config = transformers.DeepseekV3Config(
        vocab_size=64, intermediate_size=32, first_k_dense_replace=1, **shape, **widths, **experts
    )
    automatic: Any = AutoModelForCausalLM
    return automatic.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("build", [bloom_model, latent_model], ids=["own attention", "values of another width"])
@pytest.mark.parametrize("seed", [0, 6])
def test_an_unsupported_model_gets_the_plain_engine_and_one_note(build: Callable[[], Any], seed: int) -> None:
    torch.manual_seed(seed)  # the log-probs of Bloom with seed 6 agree within the tolerance
    # Wrapped, not loaded: loading would already have checked the model.
    policy = Policy(model=build(), tokenizer=Words(), name="strange")
    assert isinstance(engine_for(policy), LocalEngine)
    (note,) = (note for note in policy.notes if not note.startswith("routing is not measured"))
    assert note.startswith("the plain engine is used: the slot engine does not support ")
    assert type(policy.model).__name__ in note


def test_a_model_that_cannot_be_packed_is_reported_once_when_loaded() -> None:
    policy = load_policy(bloom_model(), Loading(device="cpu"), tokenizer=Words())
    engine = local_engine(policy, 4)
    (note,) = policy.notes
    assert "cannot be laid out in packs" in note
    (responses,) = engine.generate([Request(prompt=torch.tensor([3, 4]), seeds=(1,))], Sampling(), LIMITS)
    assert len(responses) == 1


@pytest.mark.usefixtures("replayed_capture")
def test_failing_graph_capture_keeps_the_slots_and_adds_one_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_capture(step: Callable[[], None], pool: object) -> Replayed:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphed, "capture", refuse_capture)
    policy = make_policy("qwen3")
    engine = first_supported_engine(policy, 4, 0.5)
    assert isinstance(engine, GraphedEngine) and not engine.graphs
    (note,) = policy.notes
    assert "without captured graphs" in note and "not permitted when stream is capturing" in note


@pytest.mark.parametrize(
    "error", [OutOfResources(232448, 101376, "shared memory"), RuntimeError("out of resource: shared memory")]
)
def test_grouped_experts_that_fail_keep_the_slots_and_graphs_and_add_one_note(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's own errors are no RuntimeErrors."""

    def refuse(*inputs: Any) -> None:
        raise error

    monkeypatch.setattr(graphed, "find_grouped", grouped.find_grouped)
    monkeypatch.setattr(grouped, "_run_experts", refuse)
    policy = load_policy(as_published("qwen3-moe"), Loading(device="cpu"), tokenizer=Words())
    assert GraphedEngine(policy, 4, graphs=False).grouped is not None
    engine = engine_for(policy)
    assert isinstance(engine, GraphedEngine) and engine.grouped is None
    (note,) = policy.notes
    assert f"experts decode through the model's own layers ({type(error).__name__}: out of resource: shared memory" in note


def test_a_fault_of_ours_is_no_reason_to_choose_another_engine() -> None:
    with pytest.raises(ZeroDivisionError):
        describe_failure(ZeroDivisionError())
    assert describe_failure(KeyError()) == "KeyError: no message"
