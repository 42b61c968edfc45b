"""New weights while requests are in flight: pause, load, name, resume; and the checkpoints of a run."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from legato.errors import InputError
from legato.policy.policy import Policy
from legato.rollouts.scoring import score_texts
from legato.serve.served import Served
from tests.serve.running import RunningServer, chat_policy, make_served, running

GENERATE = "/inference/v1/generate"
PROMPT = [5, 9, 33, 40, 12]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Model folders of two policies with the same shape and other weights."""
    made = []
    for seed in (3, 4):
        folder = tmp_path_factory.mktemp("weights") / str(seed)
        policy = chat_policy(seed)
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        made.append(folder)
    return made


def score(policy: Policy, tokens: list[int], temperature: float) -> Tensor:
    (scores,) = score_texts(policy, [torch.tensor(PROMPT + tokens)], [temperature])
    return scores.logprobs[len(PROMPT) - 1 :]


def publish(server: RunningServer, folder: Path, name: str) -> None:
    """The words in which vLLM takes new weights."""
    assert server.post("/pause?mode=keep") == {"status": "paused"}
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    assert server.post("/collective_rpc", body) == {"results": [None]}
    assert server.post("/reset_prefix_cache") == {"success": True}
    told = server.post("/update_weight_version", {"new_version": name})
    assert told == {"success": True, "new_version": name}
    assert server.post("/resume") == {"status": "resumed"}


def wait_until(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def tokens_so_far(served: Served) -> list[int]:
    """How many tokens each response in the engine has."""
    streams = list(served.thread.engine._streams.values())  # type: ignore[attr-defined]
    return [len(row.tokens) for stream in streams for row in list(stream.rows)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_responses_across_a_publish_have_both_versions_and_the_log_probs_of_each(
    folders: list[Path], temperature: float
) -> None:
    served = make_served(chat_policy(3), context_tokens=4096, version="11")
    with running(served) as server, ThreadPoolExecutor(6) as pool:
        parameters = {"max_tokens": 250, "ignore_eos": True, "logprobs": 0, "temperature": temperature}
        futures: list[Future[Any]] = [
            pool.submit(server.post, GENERATE, {"token_ids": PROMPT, "sampling_params": {**parameters, "seed": seed}})
            for seed in range(4)
        ]
        streamed = pool.submit(
            server.events, GENERATE, {"token_ids": PROMPT, "stream": True, "sampling_params": {**parameters, "seed": 9}}
        )
        wait_until(lambda: len(tokens_so_far(served)) == 5 and min(tokens_so_far(served)) >= 3)
        publish(server, folders[1], "12")
        answers = [future.result(60)["choices"][0] for future in futures]
        events = streamed.result(60)
        after = server.post(GENERATE, {"token_ids": PROMPT, "sampling_params": {**parameters, "max_tokens": 5}})
        assert after["choices"][0]["weight_versions"] == [{"version": "12", "start": 0, "end": 5}]
    pieces = [each for event in events for each in event["choices"]]
    joined = [token for piece in pieces for token in piece["token_ids"]]
    entries = [entry for piece in pieces for entry in piece["logprobs"]["content"]]
    answers.append({**pieces[-1], "token_ids": joined, "logprobs": {"content": entries}})
    old, new = chat_policy(3), chat_policy(4)
    for answer in answers:
        first, second = answer["weight_versions"]
        assert (first["version"], second["version"]) == ("11", "12")
        assert first["start"] == 0 and first["end"] == second["start"] and second["end"] == 250
        tokens, cut = answer["token_ids"], first["end"]
        expected = torch.cat([score(old, tokens, temperature)[:cut], score(new, tokens, temperature)[cut:]])
        got = torch.tensor([entry["logprob"] for entry in answer["logprobs"]["content"]])
        assert 0 < cut < 250 and float((got - expected).abs().max()) <= 1e-4
        other = torch.cat([score(new, tokens, temperature)[:cut], score(old, tokens, temperature)[cut:]])
        assert float((got - other).abs().max()) > 1e-2


def test_a_probe_sees_the_new_weights(folders: list[Path]) -> None:
    with running(make_served(chat_policy(3))) as server:
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.7}}

        def probe() -> list[float]:
            rows = server.post(GENERATE, body)["prompt_logprobs"][1:]
            return [row[str(token)]["logprob"] for token, row in zip(PROMPT[1:], rows, strict=True)]

        for place, seed in ((0, 3), (1, 4)):
            if place:
                publish(server, folders[1], "1")
            (expected,) = score_texts(chat_policy(seed), [torch.tensor(PROMPT)])
            assert probe() == pytest.approx(expected.logprobs.tolist(), abs=1e-5)


def test_versions_are_named_by_clients(folders: list[Path]) -> None:
    with running(make_served(chat_policy(3), version="0")) as server:
        generate = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}

        def version() -> str:
            name: str = server.post(GENERATE, generate)["choices"][0]["weight_versions"][0]["version"]
            assert server.ask("GET", "/weight_info").json() == {"weight_version": name}
            assert server.ask("GET", "/v1/models").json()["data"][0]["weight_version"] == name
            return name

        assert version() == "0"
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folders[1])}}
        server.post("/collective_rpc", reload)
        assert version() == "unnamed-1", "weights that nobody has named are not taken for the old ones"
        server.post("/update_weight_version", {"new_version": "step-7"})
        assert version() == "step-7"
        server.post("/update_weight_version", {"new_version": "step-8"})
        assert version() == "step-8"
        chat = server.post("/v1/completions", {"prompt": "12", "max_tokens": 1})
        assert chat["system_fingerprint"] == "legato-step-8"


def test_weights_of_another_model_change_nothing(folders: list[Path], tmp_path: Path) -> None:
    with running(make_served(chat_policy(3))) as server:
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 8, "seed": 1}}
        before = server.post(GENERATE, body)["choices"][0]["token_ids"]
        (tmp_path / "empty").mkdir()
        other = tmp_path / "other"
        from legato.policy.model.tiny import TinyShape, tiny_model

        tiny_model(TinyShape(hidden=64, heads=2), vocabulary=83, seed=0).save_pretrained(other)
        chat_policy().tokenizer.save_pretrained(other)
        damaged = tmp_path / "damaged"
        damaged.mkdir()
        for file in folders[1].iterdir():
            (damaged / file.name).write_bytes(file.read_bytes()[: 10_000 if file.suffix == ".safetensors" else None])
        for folder in (tmp_path / "empty", other, damaged, tmp_path / "nowhere", folders[1] / "config.json", "gpt2", "a/b"):
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            refused = server.ask("POST", "/collective_rpc", reload)
            assert refused.status == 400 and refused.error()["code"] == "weights_not_loaded", folder
        after = server.post(GENERATE, body)["choices"][0]
        assert after["token_ids"] == before and after["weight_versions"][0]["version"] == "0"


def test_a_pause_keeps_waits_or_aborts() -> None:
    served = make_served(chat_policy(), context_tokens=4096)
    with running(served) as server, ThreadPoolExecutor(4) as pool:
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 60, "ignore_eos": True, "seed": 2}}
        expected = server.post(GENERATE, body)["choices"][0]["token_ids"]
        long = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3000, "ignore_eos": True}}

        server.post("/pause?mode=keep")
        assert server.ask("GET", "/is_paused").json() == {"is_paused": True}
        kept = pool.submit(server.post, GENERATE, body)
        wait_until(lambda: served.thread.waiting == 1)
        time.sleep(0.05)
        assert not kept.done(), "a paused server decodes nothing"
        server.post("/resume")
        assert kept.result(30)["choices"][0]["token_ids"] == expected

        waited = pool.submit(server.post, GENERATE, body)
        wait_until(lambda: served.thread.running == 1 or waited.done())
        server.post("/pause?mode=wait")
        assert waited.done() or waited.result(1), "the pause was answered after the response"
        server.post("/resume")

        aborted = pool.submit(server.post, GENERATE, long)
        streamed = pool.submit(server.events, GENERATE, {**long, "stream": True})
        wait_until(lambda: served.thread.running == 2)
        time.sleep(0.02)
        server.post("/pause")  # vLLM's default is abort
        assert aborted.result(10)["choices"][0]["finish_reason"] == "abort"
        last = streamed.result(10)[-1]["choices"][0]
        assert last["finish_reason"] == "abort" and served.thread.running == 0
        server.post("/resume")
        assert server.post(GENERATE, body)["choices"][0]["token_ids"] == expected


def test_requests_are_aborted_by_their_ids() -> None:
    served = make_served(chat_policy(), context_tokens=4096)
    with running(served) as server, ThreadPoolExecutor(2) as pool:
        long = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3000, "ignore_eos": True}}
        one, other = (pool.submit(server.post, GENERATE, {**long, "request_id": name}) for name in ("one", "other"))
        wait_until(lambda: served.thread.running == 2)
        assert server.post("/abort_requests", {"request_ids": ["one", "none"]}) == {"status": "aborted", "aborted": 1}
        assert one.result(10)["choices"][0]["finish_reason"] == "abort" and not other.done()
        assert server.post("/abort_requests")["aborted"] == 1
        other.result(10)


class FolderCheckpoints:
    """The checkpoints of a run that is being written."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders, self.steps = folders, [1]

    def newest_step(self) -> int | None:
        return max(self.steps, default=None)

    def model_folder(self, step: int | None) -> tuple[int, Path]:
        step = self.newest_step() if step is None else step
        if step not in self.steps:
            raise InputError(f"there is no checkpoint of step {step}")
        assert step is not None
        return step, self.folders[(step - 1) % 2]


def test_the_newest_checkpoint_is_taken_over_on_request(folders: list[Path]) -> None:
    checkpoints = FolderCheckpoints(folders)
    with running(make_served(chat_policy(3), version="1", checkpoints=checkpoints)) as server:
        assert server.post("/reload_checkpoint") == {"weight_version": "1", "changed": False}
        checkpoints.steps.append(2)
        assert server.post("/reload_checkpoint", {}) == {"weight_version": "2", "changed": True}
        (choice,) = server.post(GENERATE, {"token_ids": PROMPT, "sampling_params": {"max_tokens": 9, "logprobs": 0}})[
            "choices"
        ]
        got = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
        assert float((got - score(chat_policy(4), choice["token_ids"], 1.0)).abs().max()) <= 1e-4
        assert choice["weight_versions"][0]["version"] == "2"
        assert server.post("/reload_checkpoint", {"step": 1}) == {"weight_version": "1", "changed": True}
        assert server.ask("POST", "/reload_checkpoint", {"step": 5}).status == 400


def test_a_followed_run_is_taken_over_by_itself(folders: list[Path], capfd: pytest.CaptureFixture[str]) -> None:
    checkpoints = FolderCheckpoints(folders)
    served = make_served(chat_policy(3), version="1", checkpoints=checkpoints)
    with running(served, follow_seconds=0.02) as server:
        wanted = threading.Event()

        def ask() -> None:
            while not wanted.is_set():
                server.post(GENERATE, {"token_ids": PROMPT, "sampling_params": {"max_tokens": 20}})

        asking = threading.Thread(target=ask)
        asking.start()
        checkpoints.steps.append(2)
        wait_until(lambda: served.weights.name == "2")
        checkpoints.folders = [folders[0] / "gone", folders[1]]
        checkpoints.steps.append(3)
        wait_until(lambda: "step 3 is not served" in capfd.readouterr().err)
        checkpoints.folders = folders
        checkpoints.steps.append(4)
        wait_until(lambda: served.weights.name == "4")
        wanted.set()
        asking.join(10)
