"""The memory of the engine with slots: budgets, running out of it, graphs that are captured once, engines that fall back."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

pytest.importorskip("triton")

from legato.policy.model.load import Loading, load_policy
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits, Request
from legato.rollouts.gpu import budget, slots
from legato.rollouts.gpu import engine as graphed
from legato.rollouts.gpu.engine import GraphedEngine
from legato.rollouts.gpu.slots import Room
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.local.select import first_that_serves, local_engine
from legato.rollouts.sampling import Sampling
from tests.policy.exact import Words
from tests.rollouts import in_torch
from tests.rollouts.families import END, asked, model, policy, same

LIMITS = Limits(max_response_tokens=12, end_tokens=(END, *range(5, 12)))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    in_torch.install(monkeypatch)


# A budget


def test_what_fits_is_the_most_that_does() -> None:
    room = Room(slots=64, prompts=8, prompt_tokens=128, response_tokens=32)
    assert budget.fit_room(room, 10, None) == room
    for most in (0, 10_000, 20_000, 30_000, 31_040, 10**9):
        found = budget.fit_room(room, 10, most)
        assert found.slots == 1 or found.tokens * 10 <= most
        assert found.slots == 64 or room.within(found.slots + 1).tokens * 10 > most
        assert found.prompts == min(8, found.slots)


@pytest.mark.parametrize("name", ["qwen3", "gemma4", "qwen3-moe"])
def test_the_configuration_says_what_a_token_takes(name: str) -> None:
    engine = GraphedEngine(policy(name), 4, graphs=False)
    engine.generate(asked(3), Sampling(), LIMITS)
    assert engine.store is not None and engine.store.bytes_per_token == budget.bytes_per_token(engine.policy)


def test_a_small_budget_means_fewer_slots_a_message_and_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    made, said = policy("qwen3"), []
    monkeypatch.setattr(budget, "free_bytes", lambda device: 10**9 + 2**20)
    engine = GraphedEngine(made, 64, graphs=False, training_bytes=10**9, say=said.append)
    requests = asked(*[40] * 16, each=4)
    same(engine.generate(requests, Sampling(), LIMITS), LocalEngine(made).generate(requests, Sampling(), LIMITS))
    assert engine.store is not None
    room = engine.store.room
    assert 1 < room.slots < 64 and room.tokens * budget.bytes_per_token(made) <= 2**19
    assert said == [
        f"the engine decodes {room.slots} sequences at a time instead of 64: more do not fit in rollouts.kv_memory_share ="
        " 0.5 of the memory"
    ]


# Running out of memory


def failing(most: int, stores: "list[weakref.ref[Any]]") -> Callable[..., None]:
    """A stand-in for the making of tables: memory runs out where there are more slots than so many."""
    make_tables = slots.KVStore.make_tables

    def limited(self: slots.KVStore, heads: Any) -> None:
        if heads.layer == 1 and heads.layer not in self.keys:
            gc.collect()
            assert all(store() in (None, self) for store in stores), "an earlier store was still there"
            stores.append(weakref.ref(self))
            if self.room.slots > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
        make_tables(self, heads)

    return limited


def test_out_of_memory_halves_the_slots_until_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    made, said, stores = policy("qwen3"), [], []
    monkeypatch.setattr(slots.KVStore, "make_tables", failing(3, stores))
    engine = GraphedEngine(made, 16, graphs=False, say=said.append)
    requests = asked(3, 9, 1, 17, each=5)
    same(engine.generate(requests, Sampling(), LIMITS), LocalEngine(made).generate(requests, Sampling(), LIMITS))
    assert len(stores) == 4
    assert [text.split(" (")[0] for text in said] == [
        "out of memory with 16 sequences at a time: the engine goes on with 8",
        "out of memory with 8 sequences at a time: the engine goes on with 4",
        "out of memory with 4 sequences at a time: the engine goes on with 2",
    ]
    engine.generate(requests, Sampling(), LIMITS)
    assert len(stores) == 4 and len(said) == 3, "what was learned was forgotten"


def test_out_of_memory_with_one_sequence_says_what_was_needed_and_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made, said, stores = policy("qwen3"), [], []
    monkeypatch.setattr(slots.KVStore, "make_tables", failing(0, stores))
    engine = GraphedEngine(made, 2, graphs=False, say=said.append)
    monkeypatch.setattr(budget, "free_bytes", lambda device: 10**9)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"64 prompt and 12 response tokens need 0\.\d MiB .* 953\.7 MiB are free"
    ):
        engine.generate(asked(3, 9), Sampling(), LIMITS)
    assert len(said) == 1 and engine.store is None


def test_an_error_that_hides_a_lack_of_memory_is_seen_through_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = GraphedEngine(policy("qwen3"), 4, graphs=False)
    advance, failures = engine.advance, [True]

    def hidden(*args: Any) -> None:
        if failures and failures.pop():
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            finally:
                raise RuntimeError("the capture was invalidated")
        advance(*args)

    monkeypatch.setattr(engine, "advance", hidden)
    engine.generate(asked(3, 4), Sampling(), LIMITS)
    assert engine.rows_at_once == 2

    def broken(*args: Any) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(engine, "advance", broken)
    with pytest.raises(RuntimeError, match="something else"):
        engine.generate(asked(3, 4), Sampling(), LIMITS)


# Graphs


class Replayed:
    """A stand-in for a CUDA graph: it takes the step again."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.step = step

    def replay(self) -> None:
        self.step()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capturing on a machine without CUDA: the step is run where a capture runs it, and again at every replay."""

    def captured(step: Callable[[], None], pool: object) -> Replayed:
        step()
        return Replayed(step)

    monkeypatch.setattr(graphed, "capture", captured)
    monkeypatch.setattr(graphed, "graph_pool", object)


@pytest.mark.usefixtures("recorder")
def test_a_graph_is_captured_once_per_bucket_and_sampling() -> None:
    engine = GraphedEngine(policy("qwen3"), 4)
    warm, greedy = Sampling(), Sampling(temperature=0)
    longer = Limits(max_response_tokens=6, end_tokens=(END,))
    requests = asked(3, 9, 5, each=2)
    expected = LocalEngine(engine.policy).generate(requests, warm, LIMITS)
    same(engine.generate(requests, warm, LIMITS), expected)
    assert engine.captures == len(engine.buckets) > 1
    engine.generate(requests, greedy, longer)
    once = engine.captures
    for _ in range(3):
        same(engine.generate(requests, warm, LIMITS), expected)
        engine.generate(requests, greedy, longer)
        engine.generate(asked(2, each=4), greedy, Limits(max_response_tokens=3, end_tokens=(END, 7)))
        engine.generate(requests, warm, Limits(max_response_tokens=3, end_tokens=()))
    assert engine.captures == once


@pytest.mark.usefixtures("recorder")
def test_graphs_of_many_samplings_and_end_tokens_do_not_pile_up() -> None:
    engine = GraphedEngine(policy("qwen3"), 4)
    requests = asked(3, each=4)
    addresses = set()
    for number in range(12):
        sampling = Sampling(temperature=1 + number / 10)
        limits = Limits(max_response_tokens=4, end_tokens=(END, 2 + number))
        found = engine.generate(requests, sampling, limits)
        same(found, LocalEngine(engine.policy).generate(requests, sampling, limits))
        addresses.add(engine.end_tokens(()).data_ptr())
    assert len(addresses) == 1
    assert max(len(bucket.graphs) for bucket in engine.buckets.values()) <= 4
    many = Limits(max_response_tokens=4, end_tokens=tuple(range(40)))
    same(engine.generate(requests, Sampling(), many), LocalEngine(engine.policy).generate(requests, Sampling(), many))


@pytest.mark.usefixtures("recorder")
def test_weights_at_another_address_are_captured_anew() -> None:
    engine, requests = GraphedEngine(policy("qwen3"), 4), asked(3, each=4)
    engine.generate(requests, Sampling(), LIMITS)
    before = engine.captures
    body = engine.policy.model.model
    body.norm.weight = torch.nn.Parameter(body.norm.weight.detach() * -1)
    same(engine.generate(requests, Sampling(), LIMITS), LocalEngine(engine.policy).generate(requests, Sampling(), LIMITS))
    assert engine.captures > before


# Engines that fall back


def served(made: Policy) -> Any:
    return first_that_serves(made, 4, 0.5, graphs=(False,))


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma4"])
def test_a_model_slots_serve_gets_them(name: str) -> None:
    made = load_policy(model(name), Loading(device="cpu"), tokenizer=Words())
    engine = served(made)
    assert isinstance(engine, GraphedEngine) and engine.store is None
    assert not any("plain one" in note for note in made.notes)


def bloom() -> Any:
    config = transformers.BloomConfig(vocab_size=64, n_layer=2, n_head=4, hidden_size=32, eos_token_id=1, pad_token_id=0)
    automatic: Any = AutoModelForCausalLM
    return automatic.from_config(config, dtype=torch.float32).eval()


def latent() -> Any:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    widths = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
    config = transformers.DeepseekV3Config(
        vocab_size=64, intermediate_size=32, first_k_dense_replace=1, **shape, **widths, **experts
    )
    automatic: Any = AutoModelForCausalLM
    return automatic.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("build", [bloom, latent], ids=["its own attention", "values of another width"])
@pytest.mark.parametrize("seed", [0, 6])
def test_a_model_slots_do_not_serve_gets_the_plain_engine_and_one_line(build: Callable[[], Any], seed: int) -> None:
    torch.manual_seed(seed)  # the log-probs of Bloom with seed 6 agree within the tolerance
    # Not loaded but wrapped, so that nothing was found out about it before.
    made = Policy(model=build(), tokenizer=Words(), name="strange")
    assert isinstance(served(made), LocalEngine)
    (note,) = (said for said in made.notes if not said.startswith("routing is not measured"))
    assert note.startswith("the engine is the plain one: keys and values in slots do not serve ")
    assert type(made.model).__name__ in note


def test_a_body_beside_the_interface_is_told_of_once_when_it_is_loaded() -> None:
    made = load_policy(bloom(), Loading(device="cpu"), tokenizer=Words())
    engine = local_engine(made, 4)
    (note,) = made.notes
    assert "cannot be laid out in packs" in note
    (found,) = engine.generate([Request(prompt=torch.tensor([3, 4]), seeds=(1,))], Sampling(), LIMITS)
    assert len(found) == 1


@pytest.mark.usefixtures("recorder")
def test_where_only_graphs_fail_slots_stay_and_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(step: Callable[[], None], pool: object) -> Replayed:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphed, "capture", refused)
    made = policy("qwen3")
    engine = first_that_serves(made, 4, 0.5)
    assert isinstance(engine, GraphedEngine) and not engine.graphs
    (note,) = made.notes
    assert "without captured graphs" in note and "not permitted when stream is capturing" in note
