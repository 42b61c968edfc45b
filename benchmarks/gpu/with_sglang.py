"""Legato's SGLang dialect against a real SGLang: python -m benchmarks.gpu.with_sglang

A model of the Qwen3-0.6B shape with random weights is served by SGLang, which a fleet starts as a run does, on the device
that also holds the policy. Every row of the table is a check of docs/engines.md:

    start      version, seconds until it answers, the probe's gap
    log-probs  of sampled tokens against the policy's own forward pass, at two temperatures; the same after the weights of
               the policy alone were changed, which must be far larger
    seeds      responses of equal seeds that are equal, and of different seeds that differ
    publish    seconds, the probe's gap, and log-probs of later responses
    across     responses in flight during a publish: versions, and log-probs against the weights of each token's version
    kill       SIGKILL in the middle of a batch: every response arrives, drops, rejoins, seconds

LEGATO_SGLANG_PACKAGES names a folder with SGLang's packages (benchmarks/gpu/carry_sglang.sh makes one); absent: this Python
has them. `--engine legato` takes `legato serve` in place of SGLang, to try this script; `--tiny` a model of 20 kB.
The table goes to RESULT.json (--out), row by row; if a check fails, so do the error and the end of the server's log. Checks
for which there is no time left (--seconds) are named as not run. SGLang captures no graphs unless `--graphs` is given, so
that it starts sooner: tokens a second say nothing about its speed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import work
from benchmarks.gpu.measure import Bench
from benchmarks.servers_page import NOT_RUN, SGLANG_PARTS
from legato.errors import describe_error
from legato.policy.policy import Policy
from legato.rollouts.engine import EnginePlace, Limits, Request, Response
from legato.rollouts.sampling import Sampling
from legato.rollouts.scoring import score_texts
from legato.rollouts.servers.dialects.base import Dialect
from legato.rollouts.servers.dialects.own import Own
from legato.rollouts.servers.dialects.sglang import Sglang
from legato.rollouts.servers.fleet import Fleet
from legato.rollouts.servers.member import State
from legato.rollouts.servers.settings import ServerSettings

PACKAGES = "LEGATO_SGLANG_PACKAGES"
PROMPTS, SAMPLES, TOKENS = 16, 8, 64
SHARE = "0.15"
"""Of the GPU's memory, for SGLang's weights and keys."""


def server_arguments(share: str) -> tuple[str, ...]:
    """The words that a cut-down SGLang is started with; `share` of the GPU's memory is for weights and keys."""
    return (
        *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
        *("--mem-fraction-static", share, "--skip-server-warmup", "--skip-tokenizer-init", "--disable-piecewise-cuda-graph"),
    )


WITHOUT_GRAPHS = ("--disable-cuda-graph",)
WITH_GRAPHS = ("--cuda-graph-max-bs", "64")
STANDING_IN = ("torchvision",)
"""Packages that SGLang imports and a dense model never calls: stand-ins take their place where they are missing."""
CHOICES = tuple(part for part in SGLANG_PARTS if part not in ("start", "learn"))
"""The checks that may be left out: all but the start."""
LOG_CHARACTERS = 6000
"""How much of the end of a server's log is shown."""


def wrap_python(packages: str, folder: Path) -> str:
    """A command that runs this Python with SGLang's packages first, and without Legato's."""
    command, more = folder / "python-with-sglang", folder / "standing-in"
    for name in STANDING_IN:
        if find_spec(name) is None:
            (more / name).mkdir(parents=True, exist_ok=True)
            (more / name / "__init__.py").write_text("import stand_in\n\nstand_in.install(__name__)\n", encoding="utf-8")
    lines = [
        "#!/bin/sh",
        f"export PYTHONPATH='{packages}:{more}'",
        # SGLang's kernels name CUDA's libraries (nvrtc among them) without saying where PyTorch has them.
        f"export LD_LIBRARY_PATH='{':'.join(cuda_libraries())}'${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}",
        "export SGLANG_IS_FLASHINFER_AVAILABLE=false SGLANG_ENABLE_JIT_DEEPGEMM=0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1",
        f'exec {sys.executable} "$@"',
    ]
    command.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command.chmod(0o755)
    return str(command)


def cuda_libraries() -> list[str]:
    """The folders of the CUDA libraries that came with PyTorch."""
    spec = find_spec("nvidia")
    roots = [] if spec is None or spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    return sorted(str(folder) for root in roots for folder in Path(root).glob("*/lib"))


class Check:
    """A fleet of one server beside the policy, and the rows of the table."""

    def __init__(self, policy: Policy, fleet: Fleet, out: Path | None, prompt_tokens: int) -> None:
        self.policy, self.fleet, self.out = policy, fleet, out
        self.prompt_tokens = prompt_tokens
        self.rows: list[tuple[str, str, Any]] = []
        self.failure: dict[str, str] = {}
        """What ended the checks, and the end of the server's log; empty if nothing did."""

    def note(self, part: str, what: str, value: Any) -> None:
        """Add a row to the table."""
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        print(f"{part:10} {what:62} {shown}", flush=True)
        self.rows.append((part, what, value))
        self.store()

    def store(self) -> None:
        """Write the table, if it is to be stored."""
        if self.out is not None:
            table = {"commit": os.environ.get("COMMIT", ""), "day": time.strftime("%Y-%m-%d"), "rows": self.rows}
            self.out.write_text(json.dumps(table | self.failure, indent=1) + "\n", encoding="utf-8")

    def requests(self, first_seed: int = 0, prompts: int = PROMPTS, samples: int = SAMPLES) -> list[Request]:
        source = torch.Generator().manual_seed(7)
        highest = min(len(self.policy.tokenizer), self.policy.vocabulary)
        return [
            Request(
                prompt=torch.randint(3, highest, (self.prompt_tokens + place,), generator=source),
                seeds=tuple(range(first_seed + samples * place, first_seed + samples * (place + 1))),
            )
            for place in range(prompts)
        ]

    def scores(self, batch: Sequence[Request], rows: Sequence[Sequence[Response]], temperature: float) -> list[torch.Tensor]:
        """The policy's log-probs of the tokens of every response."""
        pairs = [(one.prompt, each.tokens) for one, row in zip(batch, rows, strict=True) for each in row]
        found = score_texts(self.policy, [torch.cat(pair) for pair in pairs], [temperature] * len(pairs))
        return [each.logprobs[len(prompt) - 1 :] for each, (prompt, _) in zip(found, pairs, strict=True)]

    def gap(self, batch: Sequence[Request], rows: Sequence[Sequence[Response]], temperature: float) -> tuple[float, float]:
        """Mean and largest |log-prob of the server - log-prob of the policy| over all tokens."""
        responses = [each for row in rows for each in row]
        pairs = zip(responses, self.scores(batch, rows, temperature), strict=True)
        differences = torch.cat([(each.logprobs - scores).abs() for each, scores in pairs])
        return float(differences.mean()), float(differences.max())

    def change_weights(self, factor: float) -> None:
        with torch.no_grad():
            self.policy.model.get_decoder().norm.weight.mul_(factor)
            self.policy.model.get_decoder().layers[0].self_attn.q_proj.weight.mul_(2.0 - factor)

    def log_probs(self) -> None:
        limits = Limits(max_response_tokens=TOKENS, end_tokens=(1,))
        for temperature in (1.0, 0.7):
            batch, began = self.requests(), time.monotonic()
            rows = self.fleet.generate(batch, Sampling(temperature=temperature), limits)
            seconds = time.monotonic() - began
            tokens = sum(len(each.tokens) for row in rows for each in row)
            mean, largest = self.gap(batch, rows, temperature)
            self.note("log-probs", f"temperature {temperature}: mean gap over {tokens} tokens", mean)
            self.note("log-probs", f"temperature {temperature}: largest gap", largest)
            self.note("log-probs", f"temperature {temperature}: tokens a second, first use included", tokens / seconds)
            versions = {int(version) for row in rows for each in row for version in each.version.unique()}
            self.note("log-probs", "versions of the tokens", sorted(versions))
        self.change_weights(1.1)
        self.note("log-probs", "mean gap after the policy alone was changed", self.gap(batch, rows, 0.7)[0])
        self.change_weights(1 / 1.1)

    def seeds(self) -> None:
        limits = Limits(max_response_tokens=32, end_tokens=())
        batch = self.requests(prompts=4)
        first, second = (self.fleet.generate(batch, Sampling(), limits) for _ in range(2))
        texts = [[tuple(each.tokens.tolist()) for row in rows for each in row] for rows in (first, second)]
        equal = sum(one == two for one, two in zip(*texts, strict=True))
        self.note("seeds", f"responses of equal seeds that are equal, of {len(texts[0])}", equal)
        self.note("seeds", f"different responses of {len(texts[0])} seeds", len(set(texts[0])))

    def publish(self) -> None:
        limits = Limits(max_response_tokens=TOKENS, end_tokens=(1,))
        for factor in (1.1, 1.1):
            self.change_weights(factor)
            began = time.monotonic()
            self.fleet.publish(self.policy.model.named_parameters(), self.fleet.version + 1)
            self.note("publish", "seconds: written, loaded, compared", time.monotonic() - began)
            self.note("publish", "the probe's gap", self.fleet.servers[0].gap)
            self.note("publish", "restarted because it kept old weights", not self.fleet.servers[0].reloads)
        batch = self.requests(1000)
        mean, largest = self.gap(batch, self.fleet.generate(batch, Sampling(), limits), 1.0)
        self.note("publish", "mean gap of later responses", mean)
        self.note("publish", "largest gap of later responses", largest)

    def across(self) -> None:
        limits = Limits(max_response_tokens=4 * TOKENS, end_tokens=())
        batch = self.requests(2000, prompts=4)
        before = self.fleet.version
        old = {name: weight.detach().clone() for name, weight in self.policy.model.named_parameters()}
        handles = self.fleet.submit(batch, Sampling(), limits)
        time.sleep(0.6)
        self.change_weights(1.15)
        self.fleet.publish(self.policy.model.named_parameters(), before + 1)
        finished: dict[Any, Sequence[Response]] = {}
        while len(finished) < len(handles):
            finished |= {one.handle: one.responses for one in self.fleet.poll()}
        rows = [finished[handle] for handle in handles]
        responses = [each for row in rows for each in row]
        now = self.scores(batch, rows, 1.0)
        with torch.no_grad():
            for name, weight in self.policy.model.named_parameters():
                old[name], weight.data = weight.detach().clone(), old[name]
        was = self.scores(batch, rows, 1.0)
        with torch.no_grad():
            for name, weight in self.policy.model.named_parameters():
                weight.data = old[name]
        both = sum(len(each.version.unique()) > 1 for each in responses)
        self.note("across", f"responses with tokens of two versions, of {len(responses)}", both)
        triples = list(zip(responses, was, now, strict=True))
        named = [(r.logprobs - torch.where(r.version == before, w, n)).abs() for r, w, n in triples]
        self.note("across", "mean gap to the weights of each token's named version", float(torch.cat(named).mean()))
        either = [torch.minimum((r.logprobs - w).abs(), (r.logprobs - n).abs()) for r, w, n in triples]
        self.note("across", "mean gap to the nearer of both weights", float(torch.cat(either).mean()))
        first = torch.cat([(r.logprobs - w).abs()[:8] for r, w, _ in triples])
        last = torch.cat([(r.logprobs - n).abs()[-8:] for r, _, n in triples])
        self.note("across", "mean gap of the first 8 tokens to the old weights", float(first.mean()))
        self.note("across", "mean gap of the last 8 tokens to the new weights", float(last.mean()))

    def kill(self) -> None:
        limits = Limits(max_response_tokens=4 * TOKENS, end_tokens=())
        batch = self.requests(3000)
        handles = self.fleet.submit(batch, Sampling(), limits)
        time.sleep(0.5)
        began = time.monotonic()
        for process in server_processes(self.fleet):
            os.kill(process, signal.SIGKILL)
        finished: dict[Any, Sequence[Response]] = {}
        while len(finished) < len(handles):
            finished |= {one.handle: one.responses for one in self.fleet.poll()}
        self.note("kill", "seconds until all responses were there", time.monotonic() - began)
        rows = [finished[handle] for handle in handles]
        self.note("kill", f"responses, of {PROMPTS * SAMPLES}", sum(map(len, rows)))
        counts = self.fleet.servers[0].counts
        self.note("kill", "drops, rejoins", [counts.drops, counts.rejoins])
        self.note("kill", "mean gap", self.gap(batch, rows, 1.0)[0])


def server_processes(fleet: Fleet) -> list[int]:
    """The processes of the server, without its leash."""
    started = fleet.servers[0].started
    assert started is not None and started.process is not None
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    family = [started.process.pid]
    for process in family:
        family += [child for child, parent in pairs if parent == process]
    return family[1:]


def main() -> None:
    """Run the checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["sglang", "legato"], default="sglang")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, in float32")
    parser.add_argument("--graphs", action="store_true", help="let SGLang capture graphs")
    parser.add_argument("--seconds", type=float, default=110.0, help="no check begins that would end later")
    parser.add_argument("--deterministic", action="store_true", help="start SGLang with --enable-deterministic-inference")
    parser.add_argument("--parts", nargs="+", choices=CHOICES, default=CHOICES)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(device=device, tiny=options.tiny, deadline=deadline)
    policy = work.make_policy(bench, "0.6B")
    folder = Path(tempfile.mkdtemp(prefix="with-sglang-"))
    dialect: Dialect = Own() if options.engine == "legato" else Sglang()
    arguments = (
        (*server_arguments(SHARE), *(WITH_GRAPHS if options.graphs else WITHOUT_GRAPHS))
        if options.engine == "sglang"
        else ()
    )
    if options.deterministic:
        arguments += ("--enable-deterministic-inference",)
    python = sys.executable
    if options.engine == "sglang" and os.environ.get(PACKAGES):
        python = wrap_python(str(Path(os.environ[PACKAGES]).resolve()), folder)
    prompt_tokens = 4 if options.tiny else 64
    settings = ServerSettings(
        start=1,
        python=python,
        arguments=arguments,
        start_seconds=max(1.0, 0.8 * options.seconds),
        # Two implementations in bfloat16 differ by 0.03 on this model of random weights, whose last norm is large.
        probe_tolerance=0.2,
        # A server that died without being killed ends the checks, with its log.
        pause_seconds=max(20.0, 0.6 * options.seconds),
    )
    fleet = Fleet(policy, dialect, settings, rows_at_once=64, context_tokens=2048)
    check = Check(policy, fleet, options.out, prompt_tokens)
    running = "start"
    try:
        began = time.monotonic()
        fleet.open(EnginePlace(folder=folder, say=lambda text: print(f"  {text}", flush=True)))
        assert fleet.servers[0].facts is not None and fleet.servers[0].state is State.UP
        start_seconds = time.monotonic() - began
        check.note("start", f"seconds until {fleet.servers[0].facts.software} answered", start_seconds)
        fleet.publish(policy.model.named_parameters(), 0)
        check.note("start", "the probe's gap", fleet.servers[0].gap)
        seconds_needed = {
            "log-probs": (check.log_probs, 10.0),
            "seeds": (check.seeds, 5.0),
            "publish": (check.publish, 12.0),
            "across": (check.across, 15.0),
            "kill": (check.kill, start_seconds + 20.0),  # the server is started again
        }
        for part in [part for part in CHOICES if part in options.parts]:
            run, seconds = seconds_needed[part]
            if time.monotonic() + seconds > deadline:
                check.note(part, NOT_RUN, f"{deadline - time.monotonic():.0f} s were left")
                continue
            running = part
            run()
    except BaseException as error:
        check.failure = {"failed": describe_error(error), "stopped_in": running}
        raise
    finally:
        fleet.close()
        for log in sorted(folder.glob("server-*.log")):
            end = log.read_text(encoding="utf-8", errors="replace")[-LOG_CHARACTERS:]
            print(f"--- the end of {log.name}\n{end}", flush=True)
            if check.failure:
                check.failure["log"] = end
        check.store()


if __name__ == "__main__":
    main()
