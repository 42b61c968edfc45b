"""Measures what several processes cost and whether they are right, on one GPU.

    python -m benchmarks.gpu.ranks                       # one H200: about 6 minutes; writes results/ranks-gpu.json
    python -m benchmarks.gpu.ranks --parts two "profile 1.7B"    # some parts; the stored results of the others stay
    python -m benchmarks.gpu.ranks --parts "torchrun 1.7B" --ways "layers, kept"    # one way beside one process
    python -m benchmarks.gpu.ranks --tiny --device cpu --output tiny-ranks.json    # toy shapes, for tests

Parts, each in processes of its own, stored as soon as it is measured. A result that another replaces is kept (`earlier`):

    plain 0.6B       the update phase of one process that torchrun has not started
    plain 0.6B again the same after the next part: how far two such processes differ
    torchrun 0.6B    one rank under torchrun, alternately: as a run has it; with a process group of one rank that divides the
                     optimizer; with FSDP2 that keeps whole layers and gradients during updates ("layers, kept"), as a run
                     has it with memory for both; with FSDP2 that gathers layers in each pass ("layers")
    torchrun 1.7B    the same without that division of the optimizer
    torchrun 8B      as a run has it and with FSDP2 that keeps, for layers of Qwen3-8B, 6 of 36
    profile 1.7B     where the time of a step goes, as a run has it and with FSDP2; only if it is named
    nccl             whether NCCL takes two processes on one GPU
    two              two processes on one GPU: each collective with tensors of the GPU; one update in float32 against one
                     process, for each way of dividing; whole steps in bfloat16 with the local engine
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "ranks-gpu.json"
PARTS: dict[str, tuple[int, float]] = {
    "plain 0.6B": (0, 90.0),
    "torchrun 0.6B": (1, 150.0),
    "plain 0.6B again": (0, 60.0),
    "torchrun 1.7B": (1, 130.0),
    "torchrun 8B": (1, 130.0),
    "profile 1.7B": (1, 90.0),
    "nccl": (2, 40.0),
    "two": (2, 140.0),
}
"""Processes that torchrun starts (0: a process without it), and the most seconds.

The first part on a fresh machine also reads torch from a cold disk and compiles the Triton kernels: "torchrun 0.6B" with its
four policies and 24 steps then takes more than 90 s, "torchrun 1.7B" after it 60 s.
"""
SECONDS = 570.0
"""The most seconds of all parts together: a command on the GPU's machine has ten minutes."""
STEPS = {"0.6B": 9, "1.7B": 7, "8B": 6}
"""Measured steps of each side, after one to warm up. An interval of 95 % needs six."""
LAYERS_OF_8B = 6
KEPT = "layers, kept"
"""FSDP2 with memory for whole layers and gradients; "layers": FSDP2 that gathers layers in each pass."""
WAYS = ("optimizer", KEPT, "layers")
SIDES = {"0.6B": ("one", *WAYS), "1.7B": ("one", KEPT, "layers"), "8B": ("one", KEPT)}
"""What is measured alternately: as many as the memory of the GPU holds at once."""
TAIL = 30
"""Lines of output that are stored of a part that failed."""


def measure(part: str, *, device: str, tiny: bool, ways: Sequence[str] = WAYS) -> dict[str, Any]:
    """The result of a part, in a process that `run_part` has started. Of several ranks that of rank 0 counts.

    `ways`: which ways of dividing are measured beside one process, of those that the part has.
    """
    kind, _, shape = part.removesuffix(" again").partition(" ")
    measures: dict[str, Callable[..., dict[str, Any]]] = {
        "plain": measure_plain,
        "torchrun": partial(measure_one_rank, ways=ways),
        "profile": profile_one_rank,
        "nccl": try_nccl,
        "two": check_two,
    }
    return measures[kind](shape, device=device, tiny=tiny)


def _bench(device: str, tiny: bool) -> Any:
    import torch

    from benchmarks.gpu.measure import Bench

    return Bench(device=torch.device(device), tiny=tiny, deadline=time.monotonic() + 600)


def measure_plain(shape: str, *, device: str, tiny: bool) -> dict[str, Any]:
    """Seconds of the update phase on one process."""
    bench = _bench(device, tiny)
    return {"sides": _alternate(bench, {"plain": _trainer(bench, shape, "one", None)}, 1 if tiny else STEPS[shape])}


def measure_one_rank(shape: str, *, device: str, tiny: bool, ways: Sequence[str] = WAYS) -> dict[str, Any]:
    """Seconds of the update phase on one rank under torchrun: as a run has it, and with a process group of one rank."""
    from legato.training.ranks.join import joined

    bench = _bench(device, tiny)
    with joined(alone=True) as world:
        # A run on one rank gets no process group: what torchrun adds is its environment.
        sides: dict[str, Any] = {}
        errors: dict[str, str] = {}
        for way in [each for each in SIDES[shape] if each in ("one", *ways)]:
            started = time.monotonic()
            try:
                sides[way] = _trainer(bench, shape, way, world)
            except Exception:
                errors[way] = _tell()
            # Shown if the part exceeds its limit: what took its time.
            print(f"{way!r} built in {time.monotonic() - started:.1f} s", flush=True)
        seconds = _alternate(bench, sides, 1 if tiny else STEPS[shape])
    return {"sides": seconds, "errors": errors}


def profile_one_rank(shape: str, *, device: str, tiny: bool) -> dict[str, Any]:
    """Of a step as a run has it and with FSDP2: its seconds, those in which the device worked, and the longest operations.

    Operations of several streams may overlap, so that their sum can exceed the seconds of the step.
    """
    from torch.profiler import ProfilerActivity, profile

    from legato.training.ranks.join import joined

    bench, results = _bench(device, tiny), dict[str, Any]()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.cuda else [])]
    with joined(alone=True) as world:
        for way in ("one", KEPT):
            trainer = _trainer(bench, shape, way, world)
            for _ in range(2):
                trainer.step()
            bench.wait()
            started = time.perf_counter()
            with profile(activities=activities) as profiled:
                trainer.step()
                bench.wait()
            seconds, rows = time.perf_counter() - started, profiled.key_averages()

            def by_device(row: Any) -> float:
                return float(row.self_device_time_total if bench.cuda else row.self_cpu_time_total)

            results[way] = {
                "seconds": seconds,
                "operations_seconds": sum(map(by_device, rows)) / 1e6,
                "host_seconds": sum(row.self_cpu_time_total for row in rows) / 1e6,
                "longest": [
                    [row.key[:100], row.count, by_device(row) / 1e6] for row in sorted(rows, key=by_device)[:-26:-1]
                ],
            }
            del trainer
            bench.free()
    return results


def _trainer(bench: Any, shape: str, way: str, world: Any) -> Any:
    """A trainer on the fixed rollouts whose weights are divided in one of three ways."""
    from benchmarks.gpu import update, work

    workload = work.fixed_work(bench.tiny)
    policy = _large_policy(bench) if shape == "8B" and not bench.tiny else work.make_policy(bench, shape)
    logprobs = update.score_workload(policy, workload)
    return update.fixed_trainer(policy, workload, logprobs, **_divide(policy, way, world))


def _divide(policy: Any, way: str, world: Any) -> dict[str, Any]:
    """The arguments of a trainer whose weights are divided; "one": those of one process."""
    from legato.training.pieces import Divided

    if way == "one":
        return {}
    if way == "optimizer":
        return {"world": world, "division": Divided(policy.parameters(), world)}
    from legato.training.ranks.layers import Keep, Layered, divide_layers

    is_half = policy.model.get_input_embeddings().weight.element_size() < 4
    keep = Keep.GRADIENTS if way == KEPT else Keep.NOTHING
    divide_layers(policy, world)
    return {"world": world, "division": Layered(policy, world, is_half=is_half, keep=keep)}


def _large_policy(bench: Any) -> Any:
    """A policy with layers of Qwen3-8B."""
    from benchmarks.gpu import plan, work
    from legato.policy.model.load import Loading, load_policy

    config = plan.config_of(plan.Case(title="", model="qwen3-8b", layers=LAYERS_OF_8B), tiny=False)
    loading = Loading(device=bench.device.type, dtype="bfloat16")
    return load_policy(plan.random_model(config, bench), loading, tokenizer=work.tokenizer())


def _alternate(bench: Any, trainers: dict[str, Any], steps: int) -> dict[str, Any]:
    """Seconds of the steps of all trainers in turn, without rollouts. A trainer that fails is left out from then on."""
    results: dict[str, Any] = {way: {"samples": [], "gradient_norms": []} for way in trainers}
    for number in range(1 + steps):
        for way in [each for each in trainers if "error" not in results[each]]:
            try:
                bench.wait()
                started = time.perf_counter()
                report = trainers[way].step()
                bench.wait()
                seconds = time.perf_counter() - started - report.metrics["time/rollouts_seconds"]
            except Exception:
                results[way]["error"] = _tell()
                continue
            print(f"step {number} of {way!r}: {seconds:.2f} s without rollouts", flush=True)
            results[way]["gradient_norms"].append(report.metrics["gradient/norm"])
            results[way]["fused"] = trainers[way].policy.trains_fused
            if number:
                results[way]["samples"].append(seconds)
    for result in results.values():
        if result["samples"]:
            result["seconds"] = statistics.median(result["samples"])
    return results


def try_nccl(shape: str, *, device: str, tiny: bool) -> dict[str, Any]:
    """Whether NCCL sums a tensor of two processes that share one GPU."""
    import torch
    import torch.distributed as dist

    if device == "cpu":
        return {"takes_two": None, "why": "there is no GPU"}
    torch.cuda.set_device(0)
    try:
        dist.init_process_group("nccl")
        table = torch.ones(4, device="cuda")
        dist.all_reduce(table)
        torch.cuda.synchronize()
        return {"takes_two": bool((table == 2).all())}
    except Exception as error:
        return {"takes_two": False, "why": " ".join(str(error).split())[:400]}


def check_two(shape: str, *, device: str, tiny: bool) -> dict[str, Any]:
    """Two processes on one device: collectives, one update against one process, and whole steps with an engine."""
    import torch

    from legato.training.ranks.join import joined

    bench, results = _bench(device, tiny), dict[str, Any]()
    with joined() as world:
        results["backend"] = "gloo"
        checks: dict[str, Callable[[], Any]] = {"collectives": partial(_try_collectives, world, torch.device(device))}
        # A crash ends all that comes after it: what FSDP2 does on its own comes last.
        for way in WAYS:
            checks[f"float32, {way}"] = partial(_one_update, bench, world, way, "float32")
            checks[f"engine, {way}"] = partial(_whole_steps, bench, world, way)
        checks |= {f"bfloat16, {way}": partial(_one_update, bench, world, way, "bfloat16") for way in WAYS}
        for name, check in checks.items():
            started = time.perf_counter()
            try:
                results[name] = {**check(), "wall_seconds": time.perf_counter() - started}
            except Exception:
                results[name] = {"error": _tell()}
            _store_child(results)
            # A rank that fails where the other does not would leave it waiting: both go on, or neither.
            failed = world.gather("error" in results[name])
            if any(failed) and not all(failed):
                results["ended"] = f"rank {failed.index(True)} failed alone in {name!r}"
                break
    return results


def _try_collectives(world: Any, device: Any) -> dict[str, Any]:
    """Whether each exchange that a division uses works with tensors of the device; exact sums."""
    import torch

    own = torch.arange(8.0, device=device) + world.rank

    def reduce_scatter() -> bool:
        part = world.reduce_scatter(own.clone())
        return bool((part == (2 * torch.arange(8.0, device=device) + 1)[4 * world.rank : 4 * world.rank + 4]).all())

    def all_gather() -> bool:
        whole = torch.empty(16, device=device)
        world.all_gather(whole, own)
        return bool((whole == torch.cat([torch.arange(8.0), torch.arange(8.0) + 1]).to(device)).all())

    def all_gather_16_bits() -> bool:
        whole = torch.empty(16, device=device, dtype=torch.bfloat16)
        world.all_gather(whole, own.to(torch.bfloat16))
        return bool((whole == torch.cat([torch.arange(8.0), torch.arange(8.0) + 1]).to(device)).all())

    def sum_table() -> bool:
        return bool((world.sum_table(own) == 2 * torch.arange(8.0, device=device) + 1).all())

    def broadcast() -> bool:
        held = own.clone()
        world.broadcast(held)
        return bool((held == torch.arange(8.0, device=device)).all())

    return {each.__name__: each() for each in (sum_table, reduce_scatter, all_gather, all_gather_16_bits, broadcast)}


def _small_policy(bench: Any, dtype: str) -> Any:
    """A Qwen3 of four layers with random weights, the same on all ranks."""
    import torch

    from benchmarks.gpu import same_speed, work
    from legato.policy.model.load import Loading, load_policy

    model = same_speed.small_model(bench, moe=False).to(getattr(torch, dtype))
    return load_policy(model, Loading(device=bench.device.type, dtype=dtype), tokenizer=work.tokenizer())


_ALONE: dict[str, Any] = {}
"""Weights and gradient norm after an update of one process, by dtype."""


def _one_update(bench: Any, world: Any, way: str, dtype: str) -> dict[str, Any]:
    """How far weights and gradient norm of two processes are from those of one, after one update on the same rollouts."""
    from benchmarks.gpu import update, work
    from legato.training.optimizer import OptimizerSettings

    dtype = dtype if bench.cuda else "float32"
    workload = work.fixed_work(True)
    # A large epsilon: Adam divides by the size of a gradient, and would make rounding of tiny ones as large as a step.
    settings = OptimizerSettings(lr=1e-3, epsilon=1e-4)

    def train(own_way: str) -> tuple[dict[str, Any], float, bool]:
        policy = _small_policy(bench, dtype)
        logprobs = update.score_workload(policy, workload)
        trainer = update.fixed_trainer(policy, workload, logprobs, optimizer=settings, **_divide(policy, own_way, world))
        trainer.settings = replace(trainer.settings, updates_per_step=1, tokens_per_pack=256)
        report = trainer.step()
        weights = {name: _whole(weight, world) for name, weight in policy.parameters().items()}
        return weights, float(report.metrics["gradient/norm"]), policy.trains_fused

    weights, norm, fused = train(way)
    if world.rank:
        return {}
    if dtype not in _ALONE:
        _ALONE[dtype] = train("one")
    alone, expected, _ = _ALONE[dtype]
    largest = max(float((weights[name].double() - weight.double()).abs().max()) for name, weight in alone.items())
    return {"weights": largest, "gradient_norm": norm, "of_one_process": expected, "fused": fused, "dtype": dtype}


def _whole(weight: Any, world: Any) -> Any:
    """A weight on the host, gathered if it is divided."""
    from legato.training.ranks.layers import gather_weight

    return gather_weight(weight, world).cpu()


def _whole_steps(bench: Any, world: Any, way: str) -> dict[str, Any]:
    """Two steps with the local engine of each rank. The trainer itself compares hashes of the ranks in each."""
    import torch

    from benchmarks.gpu import update, work
    from legato.rollouts.engine import Limits
    from legato.rollouts.local_kind import Local
    from legato.rollouts.registry import EngineOptions
    from legato.training.ranks.layers import gather_weights
    from legato.training.ranks.same import digest

    policy = _small_policy(bench, "bfloat16" if bench.cuda else "float32")
    prompts = work.fixed_work(True).prompts
    workload = work.Work(
        prompts=prompts, responses=tuple(((3,),) * 4 for _ in prompts), rewards=work.reward_table(len(prompts), 4, 0.0)
    )
    engine = Local().build(policy, EngineOptions(rows_at_once=32, copied=way != "optimizer"))
    trainer = update.fixed_trainer(policy, workload, [], **_divide(policy, way, world))
    runner = trainer.source.runner
    runner.engine, runner.limits = engine, Limits(max_response_tokens=16, end_tokens=(policy.vocabulary,))
    if way != "optimizer":
        runner.weights = partial(gather_weights, policy, world)
    norms = [float(trainer.step().metrics["gradient/norm"]) for _ in range(2)]
    weights = [_whole(weight, world).to(torch.float32) for _, weight in policy.parameters().items()]
    hashes = world.gather(digest(*weights))
    return {"gradient_norms": norms, "equal_on_ranks": len(set(hashes)) == 1}


# The command


def _tell() -> str:
    """The error that is being handled; its traceback is printed."""
    traceback.print_exc()
    error = sys.exc_info()[1]
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def _store_child(result: dict[str, Any]) -> None:
    """Write what this process has measured so far, where the command reads it; only rank 0 does."""
    target = os.environ.get("LEGATO_RANKS_OUTPUT")
    if target and os.environ.get("RANK", "0") == "0":
        Path(target).write_text(json.dumps(result))


def run_part(part: str, limit: float, options: argparse.Namespace) -> dict[str, Any]:
    """The result of a part, measured in processes of its own that end after `limit` seconds."""
    processes, _ = PARTS[part]
    own = ["-m", "benchmarks.gpu.ranks", "--child", part, "--device", options.device, *(["--tiny"] if options.tiny else [])]
    own += ["--ways", *options.ways]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes else []
    with tempfile.TemporaryDirectory() as folder:
        target, log = Path(folder) / "result.json", Path(folder) / "log"
        # A crash in native code then says where it was.
        environment = {**os.environ, "LEGATO_RANKS_OUTPUT": str(target), "PYTHONFAULTHANDLER": "1"}
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, *launch, *own], stdout=stream, stderr=subprocess.STDOUT, env=environment
            )
            try:
                code: int | str = process.wait(limit)
            except subprocess.TimeoutExpired:
                # torchrun ends its processes when it is asked to.
                process.terminate()
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    process.kill()
                code = f"more than {limit:.0f} s"
        result: dict[str, Any] = json.loads(target.read_text()) if target.is_file() else {}
        lines = log.read_text(errors="replace").splitlines()
    if code != 0:
        result["exit"] = code
    if code != 0 or any(_errors(result)):
        # torchrun's own summary comes last and tells nothing of the cause.
        lines = [line for line in lines if line.strip() and "torch/distributed/" not in line]
        result["tail"] = [line[:300] for line in lines[-TAIL:]]
        print("\n".join(line[:300] for line in lines[-4 * TAIL :]), flush=True)
    return result


def _errors(result: Any) -> Iterator[str]:
    """All errors inside a result."""
    if isinstance(result, dict):
        for key, value in result.items():
            if key == "error":
                yield value
            else:
                yield from _errors(value)


def load_results(path: Path) -> dict[str, Any]:
    """The stored results; without a file, none."""
    empty = {"machine": {}, "date": "", "parts": {}, "earlier": []}
    results: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else empty
    return results


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How many times as long an update phase takes on one side as on another, in the steps of one command."""

    name: str
    ratio: float
    """The median over steps. A step does the same work on both sides, in the same order of steps."""
    low: float
    """The interval of that median, which is 95 % or more from six steps on (`median_interval`)."""
    high: float
    steps: int
    norms_apart: float
    """The largest distance of their gradient norms, as a share: more than 0 where the sides did not train the same."""
    date: str
    commit: str


def compare(stored: dict[str, Any]) -> list[Comparison]:
    """All comparisons of stored results, newer ones first: under torchrun beside without it, a process group beside none.

    Machines differ by more than torchrun adds, so that only results of one command are compared.
    """
    results = [*stored["parts"].items(), *((each["part"], each) for each in stored.get("earlier", []))]
    comparisons = list[Comparison]()
    for part, result in results:
        if "sides" in result:
            beside = {name: each for name, each in results if "sides" in each and _command(each) == _command(result)}
            comparisons += _compare_part(part, result, beside)
    return comparisons


def _command(result: dict[str, Any]) -> Any:
    """What the results of one command have in common; the first ones hold no time."""
    return result.get("run") or (result.get("date"), result.get("commit"))


def _compare_part(part: str, result: dict[str, Any], beside: dict[str, Any]) -> Iterator[Comparison]:
    """The comparisons of the sides of a part, with each other and with the plain runs `beside` them."""
    date, commit = result.get("date", ""), result.get("commit", "")
    sides = {way: side for way, side in result["sides"].items() if side.get("seconds") is not None}
    plain = [each["sides"]["plain"] for name, each in beside.items() if name.startswith("plain")]
    plain = [each for each in plain if each.get("seconds") is not None]

    def compared(name: str, side: dict[str, Any], others: Sequence[dict[str, Any]]) -> Comparison:
        steps = zip(side["samples"], *(each["samples"] for each in others), strict=False)
        ratios = [own / statistics.mean(rest) for own, *rest in steps]
        low, high = median_interval(ratios)
        return Comparison(
            name=name,
            ratio=statistics.median(ratios),
            low=low,
            high=high,
            steps=len(ratios),
            norms_apart=max(
                [abs(a / b - 1) for each in others for a, b in zip(_norms(side), _norms(each), strict=False)], default=0.0
            ),
            date=date,
            commit=commit,
        )

    if part == "plain 0.6B again" and len(plain) == 2:
        yield compared("plain again over plain, 0.6B", plain[1], plain[:1])
    one, shape = sides.pop("one", None), part.partition(" ")[2]
    if one is None:
        return
    if plain and shape == "0.6B":
        yield compared("torchrun over plain, 0.6B", one, plain)
    for way, side in sides.items():
        yield compared(f"{way} over one process, {shape}", side, [one])
    if KEPT in sides and "optimizer" in sides:
        # FSDP2 alone: both have a process group of one rank.
        yield compared(f"{KEPT} over optimizer, {shape}", sides[KEPT], [sides["optimizer"]])


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """An interval of the median from the order of the values alone, so that single slow steps do not move it.

    Its level is at least `level` where there are enough values (six for 95 %); of fewer it is all of their range.
    """
    ordered, count = sorted(values), len(values)
    outside, left_out = 0.0, 0
    # Without the k smallest and the k largest, the median is missed on one side if at most k of `count` coins show heads.
    while 2 * left_out < count - 1:
        outside += math.comb(count, left_out) / 2**count
        if 2 * outside > 1 - level:
            break
        left_out += 1
    left_out = max(0, left_out - 1)
    return ordered[left_out], ordered[count - 1 - left_out]


def _norms(side: dict[str, Any]) -> list[float]:
    """The gradient norms of a side; the first results hold only that of the last step."""
    return side["gradient_norms"] if "gradient_norms" in side else [side["gradient_norm"]] if "gradient_norm" in side else []


def run_all(options: argparse.Namespace) -> None:
    """Measure the wanted parts and store each result at once."""
    import torch
    import transformers

    deadline = time.monotonic() + options.seconds
    results, run = load_results(options.output), time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    for part in options.parts:
        started, left = time.monotonic(), deadline - time.monotonic()
        result = {"skipped": "the time of the command is up"}
        if left > 10:
            result = run_part(part, min(left, PARTS[part][1]), options)
        results["date"] = time.strftime("%Y-%m-%d", time.gmtime())
        kept = results["parts"].get(part, {})
        # A part that failed now does not replace one that did not.
        if not kept or not ("skipped" in result or ("exit" in result and "exit" not in kept)):
            if "sides" in kept:
                results["earlier"] = [{"part": part, **kept}, *results.get("earlier", [])]
            results["parts"][part] = {**result, "date": results["date"], "commit": options.commit, "run": run}
        results["machine"] = {
            "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        beside = options.output.with_suffix(".part")
        beside.write_text(json.dumps(results, indent=1) + "\n")
        beside.replace(options.output)
        print(f"{part} ({time.monotonic() - started:.0f} s): {json.dumps(result)[:1500]}", flush=True)
    for each in compare(results):
        interval = f"{each.low:.3f} to {each.high:.3f}, {each.steps} steps"
        print(f"{each.name}: {each.ratio:.3f} ({interval}), {each.date} {each.commit}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=[part for part in PARTS if not part.startswith("profile")]
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="of dividing, in the parts under torchrun")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="all parts end after this many seconds")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", default="", help="stored with the results; the GPU's machine has no history")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", choices=PARTS, help="measure this part in this process")
    options = parser.parse_args()
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ.setdefault(name, "1")
    if options.child:
        _store_child(measure(options.child, device=options.device, tiny=options.tiny, ways=options.ways))
        return
    run_all(options)


if __name__ == "__main__":
    main()
