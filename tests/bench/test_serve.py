"""The benchmark of the server: its loads, a small measurement, and the figures of the page."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import serve
from benchmarks.waiting import WaitingEngine

ROOT = Path(__file__).parents[2]
LOAD = serve.Load(clients=3, requests=2, prompt=5, tokens=8, ragged=True, vocabulary=81)


def test_requests_depend_on_their_number_alone() -> None:
    assert LOAD.prompt_ids(4) == LOAD.prompt_ids(4) != LOAD.prompt_ids(5)
    assert all(3 <= token < 81 for number in range(6) for token in LOAD.prompt_ids(number))
    assert {LOAD.length(number) for number in range(50)} == set(range(2, 9))
    assert LOAD.body(1, True)["stream"] is True and LOAD.body(1, True)["sampling_params"]["seed"] == 1


def test_clients_get_all_their_tokens() -> None:
    from legato.rollouts.local.engine import LocalEngine

    policy = serve.make_policy("tiny")
    engine = LocalEngine(policy, 8)
    assert serve.measure_direct(engine, LOAD)["tokens_per_second"] > 0
    with serve.serving(policy, engine, LOAD) as url:
        for stream in (False, True):
            numbers, write = os.pipe()
            serve._fill(write, LOAD.count)
            results = serve.run_clients(url, LOAD, 3, numbers, stream)
            os.close(numbers)
            assert results["tokens"] == LOAD.all_tokens and len(results["seconds"]) == len(results["first"]) == 6


def test_an_engine_that_only_waits_takes_the_time_of_a_gpu_and_answers_all() -> None:
    waits: list[float] = []
    engine = WaitingEngine(256, waits.append)
    load = serve.Load(clients=256, requests=2, prompt=256, tokens=256, ragged=False, vocabulary=81)
    assert serve.measure_direct(engine, load)["tokens_per_second"] > 0
    stored = next(each for each in json.loads(serve.RESULTS.read_text()) if each["shape"] == "0.6B")
    assert load.all_tokens / sum(waits) == pytest.approx(stored["ways"]["direct"]["tokens_per_second"], rel=0.1)
    policy, engine = serve.make_policy_and_engine("waiting", 8)
    engine.wait = waits.append
    with serve.serving(policy, engine, LOAD) as url:
        for stream in (False, True):
            numbers, write = os.pipe()
            serve._fill(write, LOAD.count)
            assert serve.run_clients(url, LOAD, 3, numbers, stream)["tokens"] == LOAD.all_tokens
            os.close(numbers)


@pytest.mark.slow
def test_the_benchmark_stores_what_it_measures(tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    words = ["--clients", "4", "--requests", "2", "--tokens", "8", "--repeats", "1", "--output", str(file)]
    for _ in range(2):
        subprocess.run([sys.executable, "-m", "benchmarks.serve", *words], check=True, cwd=ROOT, capture_output=True)
    (result,) = json.loads(file.read_text())
    assert result["shape"] == "tiny" and set(result["share_of_direct"]) == {"whole", "stream"}
