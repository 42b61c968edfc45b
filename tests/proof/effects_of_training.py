"""rollouts.*, training.*, evaluation.* and output.*: what they do."""

import io
import math
import sys
import threading
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from legato.errors import InputError
from legato.policy.policy import Policy
from legato.records.directory import RunDirectory
from legato.rollouts import local_kind
from legato.rollouts.engine import Limits, Request
from legato.rollouts.gpu import budget
from legato.rollouts.sampling import Sampling
from legato.run import wire
from legato.run.display import PlainDisplay
from legato.training import checkpoint
from tests.proof import verdicts
from tests.proof.effects import Bench, effect, rollout

EARLY = {"reward.kind": f"{verdicts.__file__}:early"}


def members(report: Any) -> list[Any]:
    return [member.rollout for group in report.groups for member in group.members]


@effect("rollouts.samples_per_prompt")
def the_size_of_a_group(bench: Bench) -> None:
    report = bench.run({"rollouts.samples_per_prompt": 3}).reports[0]
    assert {len(group.members) for group in report.groups} == {3}


@effect("rollouts.temperature")
def the_temperature(bench: Bench) -> None:
    cold, warm = (bench.run({"rollouts.temperature": t}).reports[0] for t in (1e-3, 1.0))
    assert {rollout.temperature for rollout in members(cold)} == {1e-3}
    assert all(len({m.rollout.text for m in group.members}) == 1 for group in cold.groups)
    assert any(len({m.rollout.text for m in group.members}) > 1 for group in warm.groups)


@effect("rollouts.top_p", "rollouts.top_k", "rollouts.min_p")
def what_is_kept_of_the_distribution(bench: Bench) -> None:
    for options in ({"rollouts.top_p": 1e-6}, {"rollouts.top_k": 1}, {"rollouts.min_p": 0.999}):
        report = bench.run(options).reports[0]
        assert all(len({m.rollout.text for m in group.members}) == 1 for group in report.groups), options
        kept_logmass = torch.cat([rollout.kept_logmass for rollout in members(report)])
        assert bool((kept_logmass < 0).all())
    assert all(rollout.kept_logmass is None for rollout in members(bench.run().reports[0]))


@effect("rollouts.max_response_tokens")
def the_longest_response(bench: Bench) -> None:
    assert bench.run({"rollouts.max_response_tokens": 5}).steps[0]["length/max"] == 5


@effect("rollouts.stop")
def strings_that_end_a_response(bench: Bench) -> None:
    stop = [*"0123456789abcdefghijklmnopqrstuvwxyz"]
    rollouts = members(bench.run({"rollouts.stop": stop, "rollouts.max_response_tokens": 8}).reports[0])
    assert any(rollout.stop.name == "STOP_STRING" for rollout in rollouts)
    assert all(not set(stop) & set(rollout.text) for rollout in rollouts)


@effect("rollouts.rows_at_once")
def how_many_are_decoded_together(bench: Bench) -> None:
    requests = [Request(prompt=torch.tensor([5, 6]), seeds=(1, 2, 3, 4)), Request(prompt=torch.tensor([7]), seeds=(5, 6))]
    for rows, waves in ((256, 1), (3, 2), (1, 6)):
        engine = bench.build_run({"rollouts.rows_at_once": rows}).trainer.source.runner.engine
        ran: list[int] = []
        run = engine._decode_rows

        def counted(parts: Any, *rest: Any, ran: list[int] = ran, run: Any = run) -> Any:
            ran.append(sum(len(seeds) for _, seeds in parts))
            return run(parts, *rest)

        engine._way = "cached"
        bench.patch.setattr(engine, "_decode_rows", counted)
        engine.generate(requests, Sampling(), Limits(max_response_tokens=2, end_tokens=(1,)))
        assert len(ran) == waves and max(ran) <= rows


@effect("rollouts.kv_memory_share")
def the_memory_of_keys_and_values(bench: Bench) -> None:
    pytest.importorskip("triton")
    from legato.rollouts.gpu.engine import GraphedEngine
    from legato.rollouts.gpu.slots import Room

    # The engine of a GPU, on a machine that is said to have room for 64 rows beside what training will ask for.
    def with_slots(policy: Policy, rows: int, exact: str, world: Any, **rest: Any) -> GraphedEngine:
        return GraphedEngine(policy, rows, graphs=False, **rest)

    bench.patch.setattr(local_kind, "local_engine", with_slots)
    room = Room(slots=64, prompts=1, prompt_tokens=64, response_tokens=64)
    slots = []
    for share in (1.0, 0.4, 1e-6):
        engine = bench.build_run({"rollouts.kv_memory_share": share}).trainer.source.runner.engine
        # A float32 gradient and two moments; masters are the weights themselves.
        later = 12 * sum(weight.numel() for weight in engine.policy.parameters().values())
        free = later + room.tokens * budget.bytes_per_token(engine.policy)
        bench.patch.setattr(budget, "free_bytes", lambda device, free=free: free)
        slots.append(engine._prepare(room).room.slots)
    assert slots == [64, 24, 1]


@effect("rollouts.exact")
def an_engine_with_the_trainers_bits(bench: Bench) -> None:
    # What it does on a GPU is in tests/rollouts/test_exact.py; without one it cannot be, and must not be ignored.
    with pytest.raises(InputError, match="a Hopper GPU is needed"):
        bench.build_run({"rollouts.exact": "on"})
    for value in ("auto", "off"):
        assert not bench.build_run({"rollouts.exact": value}).trainer.policy.exact


@effect("rollouts.mismatch.kind", "rollouts.mismatch.size", "rollouts.mismatch.updates")
def a_sampler_that_differs(bench: Bench) -> None:
    def gap(options: dict[str, Any]) -> float:
        named = {f"rollouts.mismatch.{name}": value for name, value in options.items()}
        steps = bench.run({**EARLY, **named, "training.steps": 3, "training.anchor": "recompute"}).steps
        return max(float(step["mismatch/max"]) for step in steps)

    assert gap({}) < 1e-5
    for kind in ("bf16", "fp16", "int8", "kv-bf16", "kv-int8"):
        assert gap({"kind": kind}) > 1e-5, kind
    sizes = [gap({"kind": "perturbed", "size": size}) for size in (1e-3, 1e-2)]
    assert sizes[1] > 3 * sizes[0] > 0 and sizes[0] == gap({"kind": "perturbed"})
    ages = [gap({"kind": "stale", "updates": updates}) for updates in (1, 2, 4)]
    assert 1e-3 < ages[0] < ages[1] < ages[2] == gap({"kind": "stale"})


# Training


@effect("training.seed")
def the_seed(bench: Bench) -> None:
    keys = [[group.problem.key for group in bench.run({"training.seed": seed}).reports[0].groups] for seed in (0, 1, 0)]
    assert keys[0] == keys[2] != keys[1]


@effect("training.steps")
def the_number_of_steps(bench: Bench) -> None:
    assert [record["step"] for record in bench.run({"training.steps": 3}).steps] == [1, 2, 3]


@effect("training.prompts_per_step")
def the_number_of_prompts(bench: Bench) -> None:
    assert len(bench.run({"training.prompts_per_step": 3}).reports[0].groups) == 3


@effect("training.updates_per_step", "training.epochs_per_step")
def the_number_of_updates(bench: Bench) -> None:
    def updates(**options: int) -> int:
        trainer = bench.build_run({f"training.{name}": count for name, count in options.items()}).trainer
        trainer.step()
        return int(trainer.optimizer.updates)

    assert updates(updates_per_step=1) == 1
    assert updates(updates_per_step=3) == 3
    assert updates(updates_per_step=3, epochs_per_step=2) == 6
    assert "clip/sequences@2" in bench.run({**EARLY, "training.updates_per_step": 3}).steps[0]


@effect("training.lr", "training.schedule", "training.warm_up_updates", "training.final_lr_share")
def the_learning_rate(bench: Bench) -> None:
    def rates(**options: Any) -> list[float]:
        named = {"training.steps": 10, "training.updates_per_step": 1, "training.lr": 1.0}
        trainer = bench.build_run({**named, **{f"training.{name}": value for name, value in options.items()}}).trainer
        rates_used = []
        for _ in range(10):
            trainer.optimizer.step()
            rates_used.append(trainer.optimizer.inner.param_groups[0]["lr"])
        return rates_used

    assert rates() == [1.0] * 10
    assert rates(lr=0.5) == [0.5] * 10
    rising = rates(warm_up_updates=4)
    assert rising[:4] == sorted(rising[:4]) and 0 < rising[0] < rising[3] <= 1 and rising[4:] == [1.0] * 6
    falling = rates(schedule="linear")
    steps = [one - other for one, other in pairwise(falling)]
    assert steps == pytest.approx([steps[0]] * 9) and steps[0] > 0
    assert rates(schedule="cosine", final_lr_share=0.25)[-1] >= 0.25
    share = rates(schedule="cosine", final_lr_share=0.25, steps=1000)
    assert math.isclose(share[0], 1.0, rel_tol=1e-3)
    assert rates(schedule="linear", final_lr_share=0.5)[-1] > rates(schedule="linear")[-1]


@effect("training.weight_decay", "training.betas", "training.epsilon", "training.value_lr")
def the_numbers_of_adam(bench: Bench) -> None:
    options = {"training.weight_decay": 0.3, "training.betas": [0.5, 0.6], "training.epsilon": 1e-4}
    inner = bench.build_run(options).trainer.optimizer.inner
    decays = {tensor.dim() >= 2: group["weight_decay"] for group in inner.param_groups for tensor in group["params"]}
    assert decays == {True: 0.3, False: 0.0}
    assert all((group["betas"], group["eps"]) == ((0.5, 0.6), 1e-4) for group in inner.param_groups)
    trainer = bench.build_run({"algorithm": "ppo", "training.value_lr": 0.25, "training.lr": 0.5}).trainer
    trainer.optimizer.step()
    head = [*trainer.policy.value_head.parameters()]
    rates = {
        any(tensor is each for each in head): group["lr"]
        for group in trainer.optimizer.inner.param_groups
        for tensor in group["params"]
    }
    assert rates == {True: 0.25, False: 0.5}


@effect("training.gradient_clip")
def the_largest_gradient(bench: Bench) -> None:
    def moved(limit: float) -> float:
        trainer = bench.build_run({**EARLY, "training.gradient_clip": limit, "training.updates_per_step": 1}).trainer
        trainer.step()
        moments = [state["exp_avg"] for state in trainer.optimizer.inner.state.values()]
        return float(torch.cat([moment.flatten() for moment in moments]).norm())

    assert moved(1e-3) == pytest.approx(0.1 * 1e-3, rel=1e-3)
    assert moved(0.0) > 0.1 * 1e-2


@effect("training.anchor")
def where_the_anchor_comes_from(bench: Bench) -> None:
    words = {
        choice: next(r for r in bench.run({"training.anchor": choice}).metrics if r["kind"] == "probe")["words"]
        for choice in ("recompute", "sampler", "auto")
    }
    assert "recomputed" in words["recompute"]
    assert "engine's log-probs are the anchor" in words["sampler"] and "engine's" in words["auto"]
    gap = {c: bench.run({**EARLY, "training.anchor": c}).steps[0]["mismatch/max"] for c in ("recompute", "sampler")}
    assert gap["sampler"] == 0 <= gap["recompute"] < 1e-4
    passes = {
        choice: len([1 for rows, _, gradient in bench.forwards({**EARLY, "training.anchor": choice}) if not gradient])
        for choice in ("recompute", "sampler")
    }
    assert passes["recompute"] > passes["sampler"]


@effect("training.accept_unsafe_anchor")
def an_anchor_that_is_not_safe(bench: Bench) -> None:
    options = {**EARLY, "training.anchor": "sampler", "rollouts.mismatch.kind": "int8"}
    with pytest.raises(ValueError, match="is not safe here"):
        bench.run(options)
    taken = bench.run({**options, "training.accept_unsafe_anchor": True})
    words = next(record for record in taken.metrics if record["kind"] == "probe")["words"]
    assert "the engine's log-probs are the anchor" in words and "warning: engine and trainer differ" in words


@effect("training.update_passes")
def one_pass_or_two(bench: Bench) -> None:
    shares = {p: bench.run({**EARLY, "training.update_passes": p}).steps[0]["update/two_pass"] for p in ("one", "two")}
    assert shares == {"one": 0, "two": 1}


@effect("training.skip_silent_rows")
def rows_that_teach_nothing(bench: Bench) -> None:
    runs = {skip: bench.run({"training.skip_silent_rows": skip}) for skip in (True, False)}
    assert runs[False].steps[0]["update/silent_rows"] == 0.0
    silent = runs[True].steps[0]
    assert silent["update/silent_rows"] == silent["groups/zero_variance"] > 0.0
    one, other = (bench.weights({**EARLY, "training.skip_silent_rows": skip}) for skip in (True, False))
    assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)


@effect("training.tokens_per_pack")
def the_size_of_a_pack(bench: Bench) -> None:
    options = {**EARLY, "training.anchor": "recompute", "training.update_passes": "one"}
    many = [width for _, width, gradient in bench.forwards({**options, "training.tokens_per_pack": 12}) if gradient]
    few = [width for _, width, gradient in bench.forwards(options) if gradient]
    assert len(many) > len(few)
    assert max(many) <= 12 < max(few)
    one, other = bench.weights(options), bench.weights({**options, "training.tokens_per_pack": 12})
    assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)


@effect("training.offload_optimizer")
def masters_on_the_host(bench: Bench) -> None:
    def names(offload: bool) -> set[str]:
        tensors, _ = bench.build_run({"training.offload_optimizer": offload}).trainer.optimizer.state()
        return set(tensors)

    assert not names(False)
    assert all(name.startswith("master|") for name in names(True)) and names(True)


@effect("training.probe_every_steps")
def how_often_noise_is_measured(bench: Bench) -> None:
    def probes(every: int) -> list[int]:
        metrics = bench.run({"training.steps": 5, "training.probe_every_steps": every}).metrics
        return [record["step"] for record in metrics if record["kind"] == "probe"]

    assert probes(2) == [0, 2, 4]
    assert probes(0) == [0]


@effect("training.minimum_scored")
def how_much_must_be_scored(bench: Bench) -> None:
    calls = [0]

    def fails_sometimes(rollout: Any) -> float:
        calls[0] += 1
        if calls[0] % 4 == 0:
            raise OSError("the judge is away")
        return float(calls[0] % 2)

    strict, lax = (bench.run({"training.minimum_scored": m}, reward=fails_sometimes).steps[0] for m in (0.9, 0.5))
    assert strict["rollouts/unscorable"] == lax["rollouts/unscorable"] == 0.25
    assert (strict["update/applied"], lax["update/applied"]) == (0, 1)


# Evaluation


def evaluations(run: SimpleNamespace) -> list[dict[str, Any]]:
    return [record for record in run.metrics if record["kind"] == "evaluation"]


@effect("evaluation.every_steps")
def how_often_it_is_evaluated(bench: Bench) -> None:
    for every, expected in ((2, [0, 2, 3]), (0, [0, 3])):
        run = bench.run({"training.steps": 3, "evaluation.every_steps": every})
        assert [record["step"] for record in evaluations(run)] == expected


@effect("evaluation.samples_per_problem", "evaluation.greedy")
def what_is_evaluated(bench: Bench) -> None:
    judged: list[Any] = []

    def count(rollout: Any) -> float:
        judged.append(rollout)
        return 1.0

    options = {"evaluation.samples_per_problem": 3, "task.held_out": 2, "evaluation.greedy": False}
    run = bench.run(options, reward=count)
    assert len(judged) == 16 + 2 * (2 * 3)
    assert all("eval/accuracy_greedy" not in record for record in evaluations(run))
    judged.clear()
    run = bench.run({**options, "evaluation.greedy": True}, reward=count)
    assert len(judged) == 16 + 2 * (2 * 3 + 2)
    assert all("eval/accuracy_greedy" in record for record in evaluations(run))


@effect("evaluation.temperature")
def the_temperature_of_an_evaluation(bench: Bench) -> None:
    cold = evaluations(bench.run({**EARLY, "evaluation.temperature": 1e-4, "rollouts.max_response_tokens": 8}))[0]
    warm = evaluations(bench.run({**EARLY, "evaluation.temperature": 1.0, "rollouts.max_response_tokens": 8}))[0]
    assert cold["eval/accuracy_sampled"] == cold["eval/accuracy_greedy"]
    assert warm["eval/accuracy_sampled"] != cold["eval/accuracy_sampled"]


def even(rollout: Any) -> float:
    return float(int(rollout.tokens[0]) % 2 == 0)


REVERSED: dict[str, Any] = {"task": {"kind": "reversal", "length": 2}, "reward": f"{__file__}:even", "problems": 3}


def sets_of(bench: Bench, *sets: dict[str, Any]) -> list[Any]:
    """The evaluation sets of a run that is not started."""
    options = {"evaluation.sets": [{"name": f"set{place}", **REVERSED, **each} for place, each in enumerate(sets)]}
    run = bench.build_run({**options, "policy.max_prompt_tokens": 64})
    return wire.sets_of(run.config, run.policy, run.collector.runner, run.collector.judge)


@effect(
    "evaluation.sets",
    "evaluation.sets.NAME.task.kind",
    "evaluation.sets.NAME.task.OPTION",
    "evaluation.sets.NAME.problems",
    "evaluation.sets.NAME.samples_per_problem",
    "evaluation.sets.NAME.every_steps",
    "evaluation.sets.NAME.temperature",
    "evaluation.sets.NAME.top_p",
    "evaluation.sets.NAME.max_response_tokens",
)
def an_evaluation_set(bench: Bench) -> None:
    changed = {
        "task": {"kind": "reversal", "length": 4},
        "problems": 2,
        "samples_per_problem": 8,
        "every_steps": 7,
        "temperature": 0.0,
        "top_p": 0.5,
        "max_response_tokens": 9,
    }
    plain, other, added = sets_of(bench, {}, changed, {"task": {"kind": "arithmetic"}})
    assert [len(each.problems) for each in (plain, other)] == [3, 2]
    assert [len(each.problems[0].prompt) for each in (plain, other)] == [3, 5] and "+" in added.problems[0].prompt
    assert [each.samples for each in (plain, other)] == [1, 8]
    assert [each.is_due(7, last=False) for each in (plain, other)] == [False, True]
    assert [each.is_due(3, last=True) for each in (plain, other)] == [True, True]
    assert [(each.sampling.temperature, each.sampling.top_p) for each in (plain, other)] == [(1.0, 1.0), (0.0, 0.5)]
    assert [each.limits.max_response_tokens for each in (plain, other)] == [3, 9]


@effect("evaluation.sets.NAME.reward", "evaluation.sets.NAME.reward.kind", "evaluation.sets.NAME.reward.OPTION")
def the_reward_of_a_set(bench: Bench) -> None:
    loose = {"kind": "number", "tolerance": 1.0}
    file = bench.folder / "a.jsonl"
    file.write_text('{"problem": "6*7=", "answer": "42"}')
    usual = {"task": {"kind": "aime-24", "path": str(file), "instruction": False}, "reward": False}
    judges = [each.judge for each in sets_of(bench, {"reward": "exact"}, {"reward": loose}, usual, {"reward": False})]
    # In turn: to the letter, about as much, the final answer, and the reward of the run: the last number.
    for text, scores in (
        ("42", [1, 1, 1, 1]),
        ("so 42", [0, 1, 0, 1]),
        ("43", [0, 1, 0, 0]),
        (r"\boxed{42}", [0, 1, 1, 1]),
    ):
        assert [judge([rollout(text)])[0].accuracy for judge in judges] == scores


@effect("evaluation.best_metric")
def what_the_best_checkpoint_is_chosen_by(bench: Bench) -> None:
    sets = [{"name": "mine", **REVERSED, "samples_per_problem": 2}]
    run = bench.run({"evaluation.sets": sets, "evaluation.best_metric": "eval/mine/pass@2", "evaluation.every_steps": 1})
    assert run.metrics[-1]["best"]["metric"] == "eval/mine/pass@2"
    assert "best" not in bench.run({"evaluation.sets": sets}).metrics[-1]


@effect("evaluation.target", "evaluation.target_greedy")
def a_target(bench: Bench) -> None:
    for name in ("target", "target_greedy"):
        options = {f"evaluation.{name}": 0.9, "evaluation.every_steps": 1, "training.steps": 3}
        assert bench.run(options, reward=lambda _: 1.0).run.reason == "the target was reached"
        missed = bench.run(options, reward=lambda _: 0.5)
        assert (missed.run.reason, len(missed.steps)) == ("all steps done", 3)


# Output


@effect("output.directory", "output.name")
def where_a_run_is_written(bench: Bench) -> None:
    options = {"output.directory": str(bench.folder / "there"), "output.name": "mine"}
    assert bench.run(options).folder == bench.folder / "there" / "mine"


@effect("output.checkpoint_every_steps", "output.keep_last")
def which_checkpoints_stay(bench: Bench) -> None:
    def kept(every: int, last: int) -> list[int]:
        options = {"output.checkpoint_every_steps": every, "output.keep_last": last, "training.steps": 5}
        return RunDirectory.open(bench.run(options).folder).checkpoint_steps()

    assert kept(2, 9) == [2, 4, 5]
    assert kept(1, 2) == [4, 5]
    assert kept(0, 9) == [5]


@effect("output.checkpoint_at_end")
def whether_the_end_leaves_a_checkpoint(bench: Bench) -> None:
    def kept(at_end: bool, every: int) -> list[int]:
        options = {"output.checkpoint_at_end": at_end, "output.checkpoint_every_steps": every, "training.steps": 5}
        return RunDirectory.open(bench.run(options).folder).checkpoint_steps()

    assert (kept(True, 0), kept(False, 0), kept(False, 2)) == ([5], [], [2, 4])


@effect("output.save_in_background")
def which_thread_writes_checkpoints(bench: Bench) -> None:
    def threads(wanted: str) -> set[str]:
        seen, write = set[str](), checkpoint.write_share
        with pytest.MonkeyPatch.context() as patch:
            watch = lambda *each: (seen.add(threading.current_thread().name), write(*each))[1]  # noqa: E731
            patch.setattr(checkpoint, "write_share", watch)
            options = {"output.save_in_background": wanted, "output.checkpoint_every_steps": 1, "training.steps": 3}
            run = bench.run(options)
        assert RunDirectory.open(run.folder).checkpoint_steps()[-1] == 3
        checkpoint.verify(run.folder / "checkpoints" / "step-000003")
        return seen

    assert threads("on") == {"checkpoint"}
    assert threads("off") == threads("auto") == {threading.current_thread().name}


@effect("output.rollouts_every_steps", "output.rollout_tokens")
def which_rollouts_are_written(bench: Bench) -> None:
    directory = RunDirectory.open(bench.run({"output.rollouts_every_steps": 2, "training.steps": 5}).folder)
    assert directory.rollout_steps() == [0, 2, 4, 5]
    assert len([row for row in directory.read_rollouts(2) if not row.get("held_out")]) == 16
    for every in (0, 1):
        options = {"output.rollouts_every_steps": 0, "training.steps": 2, "evaluation.every_steps": every}
        never = RunDirectory.open(bench.run(options).folder)
        assert all(row.get("held_out") for step in never.rollout_steps() for row in never.read_rollouts(step))
    few = RunDirectory.open(bench.run({"output.rollout_tokens": 9, "training.steps": 2}).folder).read_rollouts(1)
    assert sum(len(row["details"]["pieces"]) for row in few if "details" in row) == 9


@effect("output.log_every_steps", "output.log_every_seconds")
def when_a_line_is_printed(bench: Bench) -> None:
    def printed(steps: int, seconds: float) -> list[str]:
        stream = io.StringIO()
        options = {"output.log_every_steps": steps, "output.log_every_seconds": seconds, "training.steps": 4}
        bench.run(options, watcher=PlainDisplay(stream))
        return [line.split()[1] for line in stream.getvalue().splitlines() if line.startswith("step ")]

    assert printed(2, 0.0) == ["1/4", "2/4", "4/4"]
    assert printed(0, 0.0) == ["1/4", "4/4"]
    assert printed(0, 1e-9) == ["1/4", "2/4", "3/4", "4/4"]


@effect("output.tensorboard")
def files_for_tensorboard(bench: Bench) -> None:
    pytest.importorskip("tensorboard")
    assert list((bench.run({"output.tensorboard": True}).folder / "tensorboard").glob("events*"))
    assert not (bench.run().folder / "tensorboard").exists()


@effect("output.wandb", "output.project", "output.tags")
def a_run_at_weights_and_biases(bench: Bench) -> None:
    arguments, logged = dict[str, Any](), list[int]()

    def init(**settings: Any) -> SimpleNamespace:
        arguments.update(settings)
        quiet = {"define_metric": lambda name, step_metric: None, "finish": lambda: None}
        return SimpleNamespace(log=lambda metrics: logged.append(metrics["step"]), id="abc", **quiet)

    bench.patch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Table=lambda columns, data: data))
    bench.run({"output.wandb": True, "output.project": "mine", "output.tags": ["a", "b"]})
    assert (arguments["project"], arguments["tags"], arguments["name"]) == ("mine", ["a", "b"], "run")
    assert 1 in logged
    arguments.clear()
    bench.run()
    assert not arguments


@effect("output.trackio")
def a_run_at_trackio(bench: Bench) -> None:
    arguments, logged = dict[str, Any](), list[int]()

    def init(**settings: Any) -> SimpleNamespace:
        arguments.update(settings)
        return SimpleNamespace(log=lambda metrics, step: logged.append(step), finish=lambda: None)

    bench.patch.setitem(sys.modules, "trackio", SimpleNamespace(init=init, Table=lambda columns, data: data))
    bench.run({"output.trackio": True, "output.project": "mine"})
    assert arguments["project"] == "mine" and arguments["name"].startswith("run-") and 1 in logged
    arguments.clear()
    bench.run()
    assert not arguments
