"""Other engines behind the server: the slots of a GPU (its kernels in torch), and one that answers whole requests only."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from legato.rollouts.engine import Limits, Request
from legato.rollouts.sampling import Sampling
from legato.rollouts.scripted import ScriptedEngine
from legato.serve.engine_thread import pause_after_report
from tests.serve.running import chat_policy, make_served, plain_engine, running

GENERATE = "/inference/v1/generate"
PROMPT = [5, 9, 33, 40, 12]


def test_slots_are_served_with_streams_and_new_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from legato.rollouts.gpu.engine import GraphedEngine
    from tests.rollouts import in_torch

    in_torch.install(monkeypatch)
    other = chat_policy(4)
    other.model.save_pretrained(tmp_path)
    other.tokenizer.save_pretrained(tmp_path)
    policy = chat_policy(3)
    engine = GraphedEngine(policy, 8, graphs=False)
    engine.reserve(8, 64)
    served = make_served(policy, engine=engine)
    with running(served) as server, ThreadPoolExecutor(8) as pool:
        bodies = []
        for seed in range(6):
            parameters = {"max_tokens": 4 + 3 * seed, "seed": seed, "logprobs": 0}
            bodies.append({"token_ids": PROMPT[: 2 + seed % 3], "sampling_params": parameters})
        whole = list(pool.map(lambda body: server.post(GENERATE, body)["choices"][0], bodies))
        streams = list(pool.map(lambda body: server.events(GENERATE, {**body, "stream": True}), bodies))
        for body, choice, events in zip(bodies, whole, streams, strict=True):
            prompt, asked = torch.tensor(body["token_ids"]), body["sampling_params"]
            limits = Limits(max_response_tokens=asked["max_tokens"], end_tokens=served.end_tokens)  # type: ignore[index]
            request = Request(prompt=prompt, seeds=(asked["seed"],))  # type: ignore[index]
            ((expected,),) = plain_engine(policy).generate([request], Sampling(), limits)
            assert choice["token_ids"] == expected.tokens.tolist()
            pieces = [each for event in events for each in event["choices"]]
            assert [token for piece in pieces for token in piece["token_ids"]] == choice["token_ids"]
        long = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 60, "ignore_eos": True, "seed": 1, "stop": "~"}}
        future = pool.submit(server.post, GENERATE, long)
        while served.thread.running == 0 and not future.done():
            time.sleep(0.001)
        server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}})
        spans = future.result(60)["choices"][0]["weight_versions"]
        assert spans[-1]["version"] == "unnamed-1" and spans[-1]["end"] == 60
        assert served.thread.running == 0 and not engine.jobs


def test_an_engine_that_cannot_decode_in_pieces_is_served_whole() -> None:
    policy = chat_policy()
    engine = ScriptedEngine(lambda prompt, sample: ([30, 31, 32, 33], [-0.5] * 4), policy.tokenizer.decode)
    with running(make_served(policy, engine=engine)) as server:
        text = policy.tokenizer.decode([30, 31, 32, 33])
        asked = {"prompt": "12", "max_tokens": 8, "return_token_ids": True}
        assert server.post("/v1/completions", asked)["choices"][0]["text"] == text
        cut = server.post("/v1/completions", {**asked, "stop": text[2]})["choices"][0]
        assert cut["text"] == text[:2] and cut["token_ids"] == [30, 31, 32]
        events = server.events("/v1/completions", {**asked, "stream": True, "stop_token_ids": [31]})
        assert "".join(event["choices"][0]["text"] for event in events) == text[0]


def test_special_tokens_are_text_if_a_client_wants_them() -> None:
    policy = chat_policy()
    special = policy.tokenizer.convert_tokens_to_ids("<|im_start|>")
    engine = ScriptedEngine(lambda prompt, sample: ([30, special, 31], [-0.5] * 3), policy.tokenizer.decode)
    with running(make_served(policy, engine=engine)) as server:
        for path, body in (("/v1/completions", {"prompt": "12"}), ("/v1/completions", {"prompt": "12", "stream": True})):
            for skip, text in ((True, "bc"), (False, "b<|im_start|>c")):
                asked = {**body, "skip_special_tokens": skip}
                if body.get("stream"):
                    shown = "".join(event["choices"][0]["text"] for event in server.events(path, asked))
                else:
                    shown = server.post(path, {**asked, "stop": "~"})["choices"][0]["text"]
                assert shown == text


def test_many_streams_are_written_to_less_often() -> None:
    """Writing to 256 streams every 20 ms would take all the time of the event loop."""
    assert pause_after_report(0.001) == pytest.approx(0.003)
    assert pause_after_report(0.05) == pytest.approx(0.15) and pause_after_report(30.0) == 1.0
