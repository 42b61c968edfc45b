"""An engine in another process: requests go down a pipe as lines of JSON, responses come back the same way.

    legato train recipes/tiny.toml rollouts.engine=examples/piped_engine.py:PipedEngine

It shows what an engine needs: a class whose `build` creates the engine, and `submit`, `poll`, `cancel`, and `publish`, since
the other process has its own weights. The process loads the model's folder with transformers and recomputes every token
without a KV cache: small and slow, but requests join and leave at any token, and new weights apply from the next token on.

Lines to the process
    {"submit": 3, "prompt": [...], "seeds": [...], "sampling": {...}, "limits": {...}}
    {"cancel": 3}
    {"publish": "weights.safetensors", "version": 7}      answered by {"published": 7}
Lines from it
    {"finished": 3, "responses": [{"tokens": [...], "logprobs": [...], "version": [...], ...}]}
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import legato
from legato.core.rollout import StopReason
from legato.errors import InputError
from legato.policy.policy import Policy
from legato.rollouts.engine import Capabilities, Engine, Finished, Handle, Limits, Request, Response
from legato.rollouts.randomness import uniform
from legato.rollouts.registry import EngineOptions
from legato.rollouts.sampling import Sampling, choose


class PipedEngine:
    """The class that `rollouts.engine` names."""

    def build(self, policy: Policy, options: EngineOptions) -> Engine:
        if hasattr(policy.model, "peft_config"):
            raise InputError(
                "expected a whole model, got one with adapters (policy.lora); this engine publishes whole weights"
            )
        return _Piped(policy)


class _Piped(Engine):
    """The trainer's end of the pipe."""

    name = "piped"
    capabilities = Capabilities(holds_weights=True)

    def __init__(self, policy: Policy) -> None:
        folder = tempfile.TemporaryDirectory(prefix="legato-piped-")
        self.folder = Path(folder.name)
        policy.model.save_pretrained(self.folder / "model")
        policy.tokenizer.save_pretrained(self.folder / "model")
        self.outstanding: set[int] = set()
        self.submitted = 0
        self.arrived: list[Finished] = []
        """Finished requests that the process reported while the trainer waited for another message."""
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(self.folder / "model")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(legato.__file__).parents[1])},
        )
        self.close = weakref.finalize(self, _close, self.process, folder)

    def submit(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
        handles = [Handle(self.submitted + place) for place in range(len(requests))]
        self.submitted += len(requests)
        for handle, request in zip(handles, requests, strict=True):
            self.outstanding.add(handle.number)
            how = {"sampling": asdict(sampling), "limits": asdict(limits)}
            self._send({"submit": handle.number, "prompt": request.prompt.tolist(), "seeds": request.seeds, **how})
        return handles

    def poll(self) -> list[Finished]:
        while self.outstanding and not self.arrived:
            self._receive()
        reported, self.arrived = self.arrived, []
        return reported

    def cancel(self, handle: Handle) -> None:
        if handle.number in self.outstanding:
            self.outstanding.discard(handle.number)
            self._send({"cancel": handle.number})
        self.arrived = [finished for finished in self.arrived if finished.handle != handle]

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        file = self.folder / "weights.safetensors"
        save_file({name: weight.detach().cpu().contiguous() for name, weight in weights}, file)
        self._send({"publish": str(file), "version": version})
        # The file must not be overwritten before the process has read it.
        while self._receive() != {"published": version}:
            pass
        self.version = version

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None

    def _receive(self) -> dict[str, Any]:
        """Wait for one line; finished requests are kept for the next poll."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self._death()
        message: dict[str, Any] = json.loads(line)
        number = message.get("finished")
        if number in self.outstanding:
            self.outstanding.discard(number)
            self.arrived.append(Finished(handle=Handle(number), responses=[_response(row) for row in message["responses"]]))
        return message

    def _death(self) -> RuntimeError:
        return RuntimeError(f"the piped engine ended with exit code {self.process.wait()}; its own error stands above")


def _response(row: dict[str, Any]) -> Response:
    kept = row["kept_logmass"]
    return Response(
        tokens=torch.tensor(row["tokens"]),
        logprobs=torch.tensor(row["logprobs"], dtype=torch.float32),
        kept_logmass=None if kept is None else torch.tensor(kept, dtype=torch.float32),
        text=row["text"],
        stop=StopReason[row["stop"]],
        version=torch.tensor(row["version"]),
    )


def _close(process: "subprocess.Popen[str]", folder: "tempfile.TemporaryDirectory[str]") -> None:
    """End the process by closing its input."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError):  # the process has died with unread input
        process.stdin.close()
    process.stdout.close()
    process.wait()
    folder.cleanup()


# The other process


@dataclass(kw_only=True)
class _Row:
    """A response being sampled."""

    prompt: list[int]
    seed: int
    sampling: Sampling
    limits: Limits
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    text: str = ""
    stop: StopReason | None = None

    def report(self) -> dict[str, Any]:
        assert self.stop is not None
        return {
            "tokens": self.tokens,
            "logprobs": self.logprobs,
            "kept_logmass": self.kept if self.sampling.truncates else None,
            "version": self.versions,
            "text": self.text,
            "stop": self.stop.name,
        }


class _Server:
    """The other end of the pipe: samples one token of every row of every request at a time."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.requests: dict[int, list[_Row]] = {}
        self.version = 0
        # Output of libraries must not get into the answers.
        self.out, sys.stdout = sys.stdout, sys.stderr
        self.unread = b""

    def serve(self) -> None:
        while self._read():
            if self.requests:
                self._sample_token()

    def _read(self) -> bool:
        """Handle the messages that have arrived; wait for one only if no request is open. False at the end of the input."""
        while select.select([0], [], [], 0 if self.requests else None)[0]:
            piece = os.read(0, 2**16)
            if not piece:
                return False
            *lines, self.unread = (self.unread + piece).split(b"\n")
            for line in lines:
                self._handle(json.loads(line))
        return True

    def _handle(self, message: dict[str, Any]) -> None:
        if "cancel" in message:
            self.requests.pop(message["cancel"], None)
        elif "publish" in message:
            own = dict(self.model.named_parameters())
            with torch.no_grad():
                for name, weight in load_file(message["publish"]).items():
                    if name in own:  # a value head stays with the trainer
                        own[name].copy_(weight)
            self.version = message["version"]
            self._send({"published": self.version})
        else:
            sampling, limits = Sampling(**message["sampling"]), Limits(**message["limits"])
            how = {"prompt": message["prompt"], "sampling": sampling, "limits": limits}
            self.requests[message["submit"]] = [_Row(seed=seed, **how) for seed in message["seeds"]]
            self._report_finished()

    def _send(self, message: dict[str, Any]) -> None:
        self.out.write(json.dumps(message) + "\n")
        self.out.flush()

    @torch.no_grad()
    def _sample_token(self) -> None:
        """Sample one token of every row. Padding comes last, so causal attention does not see it."""
        rows = [row for each in self.requests.values() for row in each if row.stop is None]
        texts = [row.prompt + row.tokens for row in rows]
        width = max(map(len, texts))
        table = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        last = torch.tensor([len(text) - 1 for text in texts])
        logits = self.model(input_ids=table, use_cache=False).logits[torch.arange(len(rows)), last]
        for row, each in zip(rows, logits, strict=True):
            place = uniform(torch.tensor([row.seed]), len(row.tokens))
            choice = choose(each[None], place, row.sampling)
            row.tokens.append(int(choice.tokens))
            row.logprobs.append(float(choice.logprobs))
            if choice.kept_logmass is not None:
                row.kept.append(float(choice.kept_logmass))
            row.versions.append(self.version)
            self._end(row)
        self._report_finished()

    def _end(self, row: _Row) -> None:
        """Set the text of a row, and its stop reason if its last token ends it."""
        ended = row.tokens[-1] in row.limits.end_tokens
        row.text = self.tokenizer.decode(row.tokens[: len(row.tokens) - ended], skip_special_tokens=True)
        before = None if ended else row.limits.before_stop(row.text)
        if before is not None:
            row.text, row.stop = before, StopReason.STOP_STRING
        elif ended:
            row.stop = StopReason.END_TOKEN
        elif len(row.tokens) == row.limits.max_response_tokens:
            row.stop = StopReason.LENGTH

    def _report_finished(self) -> None:
        done = [number for number, rows in self.requests.items() if all(row.stop is not None for row in rows)]
        for number in done:
            self._send({"finished": number, "responses": [row.report() for row in self.requests.pop(number)]})


if __name__ == "__main__":
    torch.set_num_threads(1)
    _Server(sys.argv[1]).serve()
