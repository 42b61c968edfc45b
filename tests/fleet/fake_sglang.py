"""A server with the request schema of SGLang 0.5.23 over our own engine. It refuses fields that the schema does not have.

As in SGLang 0.5.17, a pause of mode "abort" ends all requests with the tokens that they have, caches cannot be emptied while
requests run, and the last tokens of the context stay unused. A health check waits while the server is paused.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from legato.core.rollout import StopReason
from legato.policy.model.load import copy_weights, read_weights
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits, Request
from legato.rollouts.sampling import Sampling
from legato.rollouts.scoring import score_texts
from tests.serve.running import plain_engine

GENERATE = {"rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len"}
SAMPLING = {
    *("max_new_tokens", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "n", "ignore_eos"),
    *("no_stop_trim", "sampling_seed"),
}
UPDATE = {"model_path", "weight_version", "flush_cache", "abort_all_requests"}


class TooLongError(Exception):
    """The prompt leaves too little of the context."""


class EndedError(Exception):
    """All requests were ended before this one began."""


class NotReadyError(Exception):
    """The server could not generate the token of a health check."""


class FakeSglang:
    """One server on a free port of loopback."""

    def __init__(self, policy: Policy, *, version: str = "0.5.23") -> None:
        self.policy, self.version = policy, version
        self.engine, self.lock = plain_engine(policy), threading.Lock()
        self.weight_version, self.paused, self.calls = "default", False, list[str]()
        self.starting, self.health_seconds = False, 20.0
        """Whether it has not answered its first request yet, and how long a health check waits for its token."""
        self.takes_weights, self.context = True, 256
        self.holds, self.held = False, 0
        """Whether responses stay half done until all requests are ended, and how many did."""
        self.kept = 0
        """How many tokens a response has that is ended; 0: half of them."""
        self.state = threading.Condition()
        self.running, self.ended = 0, 0
        """Requests that are being answered, and how often all of them were ended."""
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                self._answer(json.loads(self.rfile.read(length) or b"{}"))

            def _answer(self, body: Any) -> None:
                try:
                    status, reply = 200, owner.answer(self.path, body)
                except KeyError as error:
                    status, reply = 422, {"error": {"message": f"unknown field or path {error}"}}
                except TooLongError as error:
                    status, reply = 400, {"error": {"message": str(error)}}
                except EndedError as error:
                    status, reply = 499, {"error": {"message": str(error)}}
                except NotReadyError:
                    status, reply = 503, None
                data = json.dumps(reply).encode() if reply is not None else b""
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, path: str, body: Any) -> Any:
        self.calls.append(path)
        if path == "/health":
            # It generates a token, which waits for the end of a pause as other requests do.
            with self.state:
                if self.starting or not self.state.wait_for(lambda: not self.paused, self.health_seconds):
                    raise NotReadyError
            return None
        if path == "/server_info":
            return {"version": self.version, "context_length": self.context}
        if path == "/model_info":
            return {"model_path": "fake", "weight_version": self.weight_version}
        if path == "/pause_generation":
            assert body == {"mode": "abort"}
            assert not self.starting, "SGLang ends itself if its first request is ended"
            with self.state:
                self.paused, self.holds, self.ended = True, False, self.ended + 1
                self.state.notify_all()
                assert self.state.wait_for(lambda: self.running == 0, 30)
            return {"message": "Generation paused successfully.", "status": "ok"}
        if path == "/continue_generation":
            with self.state:
                self.paused = False
                self.state.notify_all()
            return {"message": "Generation continued successfully.", "status": "ok"}
        if path == "/update_weights_from_disk":
            return self._update(body)
        if path == "/generate":
            with self.state:
                if self.paused:
                    # SGLang ends requests until none is left, those that wait for the end of the pause too.
                    self.state.wait_for(lambda: not self.paused, 30)
                    raise EndedError(f"Request {body['rid']} was aborted")
                self.running += 1
                ended = self.ended
            try:
                return self._generate(body, ended)
            finally:
                with self.state:
                    self.running -= 1
                    self.state.notify_all()
        raise KeyError(path)

    def _update(self, body: dict[str, Any]) -> dict[str, Any]:
        if unknown := set(body) - UPDATE:
            raise KeyError(unknown)
        assert self.paused and body["flush_cache"]
        assert self.running == 0, "the caches cannot be emptied while requests run: SGLang ends itself here"
        with self.lock:
            if self.takes_weights:
                copy_weights(self.policy, read_weights(self.policy, Path(body["model_path"])))
                self.engine.publish(self.policy.model.named_parameters(), self.engine.version + 1)
            self.weight_version = body["weight_version"]
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def _generate(self, body: dict[str, Any], ended: int) -> dict[str, Any]:
        parameters = body["sampling_params"]
        if unknown := (set(body) - GENERATE) | (set(parameters) - SAMPLING):
            raise KeyError(unknown)
        prompt = torch.tensor(body["input_ids"])
        if len(prompt) >= self.context - 6:
            raise TooLongError(f"Input length ({len(prompt)} tokens) exceeds the maximum allowed length")
        ends = () if parameters.get("ignore_eos") else (1, *parameters.get("stop_token_ids", ()))
        limits = Limits(
            max_response_tokens=min(parameters["max_new_tokens"], self.context - len(prompt) - 2),
            end_tokens=ends,
            stop=tuple(parameters.get("stop", ())),
        )
        sampling = Sampling(temperature=parameters["temperature"])
        with self.lock:
            request = Request(prompt=prompt, seeds=(parameters["sampling_seed"],))
            ((response,),) = self.engine.generate([request], sampling, limits)
            (scores,) = score_texts(self.policy, [prompt])
            name = self.weight_version
        tokens = response.tokens.tolist()
        reason = {"type": "length", "length": len(tokens)}
        if response.stop is not StopReason.LENGTH:
            reason = {"type": "stop", "matched": tokens[-1]}
        with self.state:
            if self.holds:
                self.held += 1
                assert self.state.wait_for(lambda: self.ended > ended, 30)
                tokens, reason = tokens[: self.kept or len(tokens) // 2], {"type": "abort", "message": "Aborted"}
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": reason,
            "weight_version": name,
            "output_token_logprobs": [
                [value, token, None] for value, token in zip(response.logprobs.tolist(), tokens, strict=False)
            ],
        }
        if body.get("logprob_start_len") == 0:
            values = [None, *scores.logprobs.tolist()]
            # 0.5.17 does not name the last token of the vocabulary (`_process_input_token_logprobs`).
            named = [token if token < self.policy.vocabulary - 1 else 0 for token in prompt.tolist()]
            meta["input_token_logprobs"] = [[value, token, None] for value, token in zip(values, named, strict=True)]
        return {"text": response.text, "output_ids": tokens, "meta_info": meta}
