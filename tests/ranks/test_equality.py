"""One process and several train the same: gradient norms, metrics, choices and weights, in float64 to 1e-10."""

from pathlib import Path
from typing import Any

import pytest

from legato.config.names import ALGORITHMS
from legato.training.memory.sharding import KEPT
from tests.ranks.world import once, run_world

MOE = {"policy.model": "tiny-moe", "policy.tiny.experts": 4}
EXTRA: dict[str, dict[str, Any]] = {
    "fspo": {"algorithm.objective.trust.log-clip.log_low": 0.05, "algorithm.objective.trust.log-clip.log_high": 0.06},
    "rspo": MOE,
    "turn-gspo": {
        "task.environment": "examples/second_guess.py:SecondGuess",
        "task.train_on_cut": True,  # an untrained model never ends a turn in time
        "rollouts.max_response_tokens": 16,
    },
}
QUICK: dict[str, dict[str, Any]] = {
    "gspo": {"algorithm": "gspo"},
    "uneven": {"algorithm": "gspo-auto", "training.prompts_per_step": 5, "training.updates_per_step": 3},
    "an empty share": {
        "algorithm": "gspo",
        "training.prompts_per_step": 1,
        "training.updates_per_step": 1,
        "rollouts.samples_per_prompt": 2,
    },
    "group scope, epochs": {"algorithm": "gepo", "training.epochs_per_step": 2},
    "update scope on a mixture": {"algorithm": "grpo", **MOE, "algorithm.objective.trust.clip-cov.fraction": 0.2},
    "value head": {"algorithm": "ppo"},
    "two passes and a reference": {
        "algorithm": "grpo",
        "algorithm.objective.penalties.kl.beta": 0.1,
        "training.update_passes": "two",
    },
    "lora": {"algorithm": "gspo", "policy.lora.rank": 2},
    "ahead": {"algorithm": "gspo", "rollouts.ahead": 1, "training.prompts_per_step": 5, "training.updates_per_step": 2},
    "load balance and replay": {
        "algorithm": "rspo",
        **MOE,
        "training.load_balance": 0.01,
        "training.routing_replay": "R2",
        "training.epochs_per_step": 2,
    },
}
MORE: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name, **EXTRA.get(name, {})} for name in ALGORITHMS},
    "one pass, no row left out": {"algorithm": "gspo", "training.update_passes": "one", "training.skip_silent_rows": False},
    "small packs": {"algorithm": "grpo", "training.tokens_per_pack": 32},
    "offloaded optimizer": {"algorithm": "gspo", "training.offload_optimizer": True},
    "padded": {"algorithm": "gspo", "policy.packing": False},
    "recomputed layers": {"algorithm": "gspo", "policy.gradient_checkpointing": True},
    "R3": {"algorithm": "gspo", **MOE, "training.routing_replay": "R3"},
    "router noise": {"algorithm": "gspo", **MOE, "training.router_noise": 0.1},
    "update scope": {"algorithm": "ppo", "algorithm.objective.trust.clip-cov.fraction": 0.2},
    "upcycled": {"algorithm": "gspo", "policy.upcycle.experts": 4, "policy.upcycle.noise": 0.1},
    "sampler as anchor": {"algorithm": "gspo", "training.anchor": "sampler", "training.accept_unsafe_anchor": True},
    "another sampler": {
        "algorithm": "gspo",
        "rollouts.mismatch.kind": "int8",
        "algorithm.objective.corrections.tis.cap": 2.0,
    },
    "dynamic sampling": {"algorithm": "gspo", "task.resampling": "dynamic", "task.max_refills": 2},
    "history": {"algorithm": "srpo", "task.resampling": "history"},
}
SHARDS = ("optimizer", "layers")
KEEPING = {
    f"layers, {kept} kept": {"training.shard": "layers", "training.keep_layers": kept} for kept in ("nothing", "weights")
}
"""The least that divided layers may keep whole during updates. `layers` keeps weights and gradients: there is memory."""
FIRST = [(name, "optimizer") for name in QUICK]
FIRST += [(name, "layers") for name in ("uneven", "an empty share", "two passes and a reference")]
FIRST += [(name, "layers, nothing kept") for name in ("uneven", "an empty share", "update scope on a mixture")]
FIRST += [(name, "layers, weights kept") for name in ("an empty share", "two passes and a reference")]
"""The others with divided layers are among `FULL`, under `make ranks`."""
FULL = [(name, shard) for name in {**QUICK, **MORE} for shard in SHARDS]
FULL += [(name, shard) for name in (*QUICK, "recomputed layers", "offloaded optimizer") for shard in KEEPING]
UNEVEN = [(name, size, shard) for name in ("uneven", "an empty share", "value head") for size in (3, 4) for shard in SHARDS]
UNEVEN += [("uneven", 3, shard) for shard in KEEPING]
MUTATIONS = ("averaging", "own counts", "choice not agreed", "pack too few")


def shard_options(shard: str) -> dict[str, Any]:
    return KEEPING.get(shard, {"training.shard": shard})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    calls: dict[str, Any] = {}
    for name, shard in FIRST:
        # The first step of an empty share has nothing to train; the second one ahead uses groups that an older step drew.
        steps = 2 if name in ("an empty share", "ahead") else 1
        calls[f"{name}, {shard}"] = ("compare", {"options": {**QUICK[name], **shard_options(shard)}, "steps": steps})
    calls |= {f"float32, {shard}": ("one_update_in_float32", {"shard": shard}) for shard in SHARDS}
    calls |= {f"bfloat16, {keep}": ("norm_in_bfloat16", {"keep": keep}) for keep in KEPT}
    calls |= {f"whole, {keep}": ("kept_during_a_step", {"keep": keep}) for keep in KEPT[1:]}
    calls |= {mutation: ("mutated", {"mutation": mutation}) for mutation in MUTATIONS}
    calls |= {"failing rank": ("failing_rank", {}), "apart": ("apart", {}), "pieces": ("pieces", {})}
    calls |= {"not a number": ("not_a_number", {}), "full disk": ("full_disk", {}), "gathered": ("gathered", {})}
    return once(tmp_path_factory, "world-of-two", lambda folder: run_world(folder, 2, calls))


@pytest.fixture(scope="module")
def all_algorithms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    options = {**QUICK, **MORE}
    calls = {f"{name}, {shard}": ("compare", {"options": {**options[name], **shard_options(shard)}}) for name, shard in FULL}
    return once(tmp_path_factory, "all-algorithms", lambda folder: run_world(folder, 2, calls, 1200))


@pytest.fixture(scope="module")
def larger_worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    def run(folder: Path) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for size in (3, 4):
            calls = {
                f"{name}, {size}, {shard}": ("compare", {"options": {**QUICK[name], **shard_options(shard)}})
                for name, each, shard in UNEVEN
                if each == size
            }
            calls[f"gathered, {size}"] = ("gathered", {})
            results |= run_world(folder / str(size), size, calls, 1200)
        return results

    return once(tmp_path_factory, "larger-worlds", run)


def check(result: dict[str, Any]) -> None:
    assert "error" not in result, result
    assert result["moved"] > 0, "nothing was trained, so nothing was compared"
    assert result["weights"] < 1e-10
    assert result["metrics"][0] < 1e-10, result["metrics"]
    assert result["details"] and result["choices"]


@pytest.mark.parametrize(("name", "shard"), FIRST)
def test_two_processes_train_as_one(world: dict[str, Any], name: str, shard: str) -> None:
    check(world[f"{name}, {shard}"][0])


@pytest.mark.ranks
@pytest.mark.timeout(1300)  # with the world that the first of them starts
@pytest.mark.parametrize(("name", "shard"), FULL)
def test_every_algorithm_and_setting_trains_as_on_one_process(all_algorithms: dict[str, Any], name: str, shard: str) -> None:
    check(all_algorithms[f"{name}, {shard}"][0])


@pytest.mark.ranks
@pytest.mark.timeout(1300)  # with the world that the first of them starts
@pytest.mark.parametrize(("name", "size", "shard"), UNEVEN)
def test_three_and_four_processes_train_as_one(larger_worlds: dict[str, Any], name: str, size: int, shard: str) -> None:
    check(larger_worlds[f"{name}, {size}, {shard}"][0])


@pytest.mark.parametrize("shard", SHARDS)
def test_one_update_in_float32_is_that_of_one_process(world: dict[str, Any], shard: str) -> None:
    assert 0 < world[f"float32, {shard}"][0] < 1e-6


@pytest.mark.parametrize("keep", KEPT)
def test_gradients_of_16_bit_layers_are_not_lost(world: dict[str, Any], keep: str) -> None:
    """Autograd makes them in float32 and FSDP2 leaves them where they are added up."""
    for norm, alone in world[f"bfloat16, {keep}"]:
        assert norm == pytest.approx(alone, rel=0.02) and norm > 0


@pytest.mark.parametrize("keep", KEPT[1:])
def test_layers_are_whole_inside_a_step_only(world: dict[str, Any], keep: str) -> None:
    for told in world[f"whole, {keep}"]:
        (inside, count), after = told["inside"], told["after"]
        assert inside == 0 and count > 10
        assert after == [[count, count]] * 2, "an error inside the step divides them again"
        assert told["exchanges"] and told["hooks"] == [0 if keep == "gradients" else 4, 4], (
            "two of FSDP2 on each of 2 layers"
        )


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_fault_between_ranks_is_noticed(world: dict[str, Any], mutation: str) -> None:
    """The comparison fails, or the run stops and says that ranks have come apart."""
    told = world[mutation]
    apart = [each["error"] for each in told if "error" in each]
    if apart:
        assert any("come apart" in each for each in apart), apart
    else:
        assert told[0]["weights"] > 1e-6 or told[0]["metrics"][0] > 1e-6, told


def test_an_error_on_one_rank_is_told_to_the_others(world: dict[str, Any]) -> None:
    waiting, failed = world["failing rank"]
    assert failed == {"told": True}
    assert waiting == {"message": "rank 1: InputError: expected a, got b", "is_input": True, "signal": None}


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(world: dict[str, Any]) -> None:
    assert world["not a number"] == [{"applied": 0.0, "moved": 0.0}] * 2


def test_a_full_disk_on_one_rank_is_raised_on_all(world: dict[str, Any]) -> None:
    assert world["full disk"] == [{"message": "rank 1: no room in /there"}, {"message": "no room in /there"}]


def test_divided_weights_are_gathered_whole(world: dict[str, Any]) -> None:
    assert all(told["same"] and told["divided"] > 10 for told in world["gathered"])


@pytest.mark.ranks
@pytest.mark.timeout(1300)  # with the world that the first of them starts
@pytest.mark.parametrize("size", [3, 4])
def test_weights_that_do_not_divide_evenly_are_gathered_whole(larger_worlds: dict[str, Any], size: int) -> None:
    assert all(told["same"] and told["divided"] > 10 for told in larger_worlds[f"gathered, {size}"])


def test_ranks_that_want_different_things_are_told_so(world: dict[str, Any]) -> None:
    for told in world["apart"]:
        assert "rank 0: gather; rank 1: agree" in told["message"]


def test_the_pieces_of_all_ranks_make_every_weight(world: dict[str, Any]) -> None:
    numbers = {"square": 24, "tall": 10, "flat": 7, "vector": 3}
    for name, count in numbers.items():
        (first, middle), (again, last) = (each[name] for each in world["pieces"])
        assert first == 0 and middle == again and last == count
