"""`legato serve` under many clients beside the same engine called directly: tokens per second and latencies.

    python -m benchmarks.serve                                      # 256 clients, tiny model on this machine
    python -m benchmarks.serve --shape 0.6B --tokens 256 --prompt 256    # a Qwen3 shape with random weights, for a GPU
    python -m benchmarks.serve --shape waiting --tokens 256 --prompt 256 --requests 3    # an engine that only waits as long
    python -m benchmarks.serve --clients 16 --requests 2 --quick    # a trial; nothing is stored

The same requests (token ids, a seed each, log-probs wanted, no end token) are answered three ways, several times in turn:

    direct    all at once to the engine, in this process
    whole     by clients over HTTP, each of which sends the next request of all when it has the answer to its last
    stream    the same with streamed answers

Clients run in processes of their own (`--processes`), so that their work does not slow the server's interpreter down; on a
machine with few cores it slows the server all the same. The target is 85 % of `direct` for 256 clients on a GPU. A result
replaces those of the same load; the variable COMMIT names the commit where there is no history.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "serve.json"
KEY = "a-key-for-benchmarks"
TARGET = 0.85
NUMBER_BYTES = 4
GENERATE = "/inference/v1/generate"
SMALL = {
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_hidden_layers": 8,
    "vocab_size": 8192,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
"""A shape for CPUs whose forward passes are not over before the answers are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests of a measurement. Prompts and lengths depend on the number of a request alone."""

    clients: int
    requests: int
    """Of each client, in the mean: clients take the next of all requests, so that none has more to do at the end."""
    prompt: int
    tokens: int
    ragged: bool
    """Whether responses have lengths from a quarter of `tokens` to `tokens`."""
    vocabulary: int

    def length(self, number: int) -> int:
        return self.tokens if not self.ragged else self.tokens // 4 + (number * 2654435761) % (self.tokens * 3 // 4 + 1)

    def prompt_ids(self, number: int) -> list[int]:
        state, ids = number * 7919 + 1, []
        for _ in range(self.prompt):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            ids.append(3 + (state >> 33) % (self.vocabulary - 3))
        return ids

    def body(self, number: int, stream: bool) -> dict[str, Any]:
        parameters = {"max_tokens": self.length(number), "seed": number, "logprobs": 0, "ignore_eos": True}
        return {"token_ids": self.prompt_ids(number), "sampling_params": parameters, "stream": stream}

    @property
    def count(self) -> int:
        return self.clients * self.requests

    @property
    def all_tokens(self) -> int:
        return sum(self.length(number) for number in range(self.count))


# Clients, in processes of their own. Nothing here imports torch.


def run_clients(url: str, load: Load, clients: int, numbers: int, stream: bool) -> dict[str, Any]:
    """Let some clients send requests until there are no more: their tokens, and the seconds of each request.

    `numbers`: the file descriptor of a pipe with the numbers of requests; all clients of all processes take from it.
    """
    from legato.rollouts.servers.http import HttpClient

    http_client = HttpClient(url, KEY)

    def run(_: int) -> tuple[int, list[float], list[float]]:
        tokens, seconds, firsts = 0, [], []
        while taken := os.read(numbers, NUMBER_BYTES):
            body, began = load.body(int.from_bytes(taken, "little"), stream), time.perf_counter()
            first = None
            if stream:
                for event in http_client.stream(GENERATE, body, seconds=3600.0):
                    first = first or time.perf_counter() - began
                    tokens += sum(len(choice["token_ids"]) for choice in event["choices"])
            else:
                tokens += len(http_client.post(GENERATE, body, seconds=3600.0)["choices"][0]["token_ids"])
            seconds.append(time.perf_counter() - began)
            firsts.append(first or seconds[-1])
        return tokens, seconds, firsts

    with ThreadPoolExecutor(clients) as pool:
        results = list(pool.map(run, range(clients)))
    http_client.close()
    return {
        "tokens": sum(tokens for tokens, _, _ in results),
        "seconds": [value for _, seconds, _ in results for value in seconds],
        "first": [value for _, _, firsts in results for value in firsts],
    }


def measure_clients(url: str, load: Load, processes: int, stream: bool) -> dict[str, Any]:
    """Start the clients' processes, let them begin together, and measure until the last has its last answer."""
    shares = [len(range(load.clients)[place::processes]) for place in range(processes)]
    started = []
    numbers, write = os.pipe()
    for share in shares:
        words = [sys.executable, "-m", "benchmarks.serve", "--as-clients"]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[numbers])
        assert process.stdin is not None and process.stdout is not None
        print(
            json.dumps({"url": url, "load": asdict(load), "clients": share, "numbers": numbers, "stream": stream}),
            file=process.stdin,
            flush=True,
        )
        started.append(process)
    os.close(numbers)
    filling = threading.Thread(target=_fill, args=(write, load.count), daemon=True)  # a pipe holds 16,384 numbers
    filling.start()
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    began = time.perf_counter()
    for process in started:
        assert process.stdin is not None
        print("go", file=process.stdin, flush=True)
    answers = []
    for process in started:
        assert process.stdout is not None
        answers.append(json.loads(process.stdout.readline()))
    seconds = time.perf_counter() - began
    filling.join()
    for process in started:
        process.wait(30)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
    tokens = sum(answer["tokens"] for answer in answers)
    assert tokens == load.all_tokens, (tokens, load.all_tokens)
    times = sorted(value for answer in answers for value in answer["seconds"])
    firsts = sorted(value for answer in answers for value in answer["first"])
    return {
        "tokens_per_second": tokens / seconds,
        "seconds": seconds,
        "request_seconds": {"median": statistics.median(times), "p95": times[int(0.95 * (len(times) - 1))]},
        "first_token_seconds": {"median": statistics.median(firsts), "p95": firsts[int(0.95 * (len(firsts) - 1))]},
    }


def _fill(write: int, count: int) -> None:
    """Write the numbers of all requests into a pipe, and its end."""
    with open(write, "wb") as pipe:
        for number in range(count):
            pipe.write(number.to_bytes(NUMBER_BYTES, "little"))


def main_of_clients() -> None:
    """A process of clients: reads its orders from standard input."""
    order = json.loads(sys.stdin.readline())
    load = Load(**order["load"])
    from legato.rollouts.servers import http  # noqa: F401  imported before the clock runs

    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(run_clients(order["url"], load, order["clients"], order["numbers"], order["stream"])), flush=True)


# The server and the engine


class _Numbers:
    """A stand-in for the tokenizer of a model with random weights: every token is a letter."""

    eos_token_id, pad_token_id, unk_token_id, chat_template, name_or_path = 1, 0, None, None, "numbers"

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)

    def batch_decode(self, rows: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(row) for row in rows]


def make_policy(shape: str) -> Any:
    """The tiny model, or a Qwen3 of a shape with random weights, on the GPU if there is one."""
    from legato.policy.model.load import Loading, choose_device, choose_dtype, load_policy
    from legato.policy.policy import Policy

    if shape == "tiny":
        return load_policy("tiny", Loading())
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from benchmarks.gpu.work import HEADS, SHAPES

    sizes = SMALL if shape == "17M" else {**SHAPES[shape], **HEADS}
    config = Qwen3Config(**sizes, max_position_embeddings=8192, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0)
    device = choose_device("auto")
    torch.manual_seed(0)
    auto_class: Any = AutoModelForCausalLM
    with device:
        model = auto_class.from_config(config, dtype=choose_dtype("auto", device))
    with torch.no_grad():
        model.get_decoder().norm.weight.fill_(4.0)  # else the policy is nearly uniform
    return Policy(model=model.eval(), tokenizer=_Numbers(), name=shape)


def make_policy_and_engine(shape: str, rows: int) -> tuple[Any, Any]:
    """A policy and the engine for it on this machine; "waiting": an engine that computes nothing."""
    from benchmarks.waiting import WaitingEngine
    from legato.rollouts.local.select import local_engine

    policy = make_policy("17M" if shape == "waiting" else shape)
    return policy, WaitingEngine(rows) if shape == "waiting" else local_engine(policy, rows)


@contextlib.contextmanager
def serving(policy: Any, engine: Any, load: Load) -> Iterator[str]:
    """A server over the engine in a thread of this process, as `legato serve` runs it; yields its address."""
    import uvicorn

    from legato.rollouts.render import Rendering
    from legato.serve.app import application
    from legato.serve.limits import ServeLimits
    from legato.serve.served import Served
    from legato.serve.server import allowed_hosts, listen, shared_interpreter, short_collections, uvicorn_config
    from legato.serve.weights import Weights

    served = Served(
        name="model",
        policy=policy,
        engine=engine,
        rendering=Rendering(tokenizer=policy.tokenizer),
        end_tokens=(1,),
        limits=ServeLimits(context_tokens=load.prompt + load.tokens, response_tokens=load.tokens),
        weights=Weights(policy, engine, "0"),
        software="benchmark",
    )
    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    config = uvicorn_config(application(served, key=KEY, hosts=allowed_hosts("127.0.0.1", port)))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        with shared_interpreter(), short_collections():
            yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)


def measure_direct(engine: Any, load: Load) -> dict[str, Any]:
    """All requests at once to the engine."""
    import torch

    from legato.rollouts.engine import Limits, Request
    from legato.rollouts.sampling import Sampling

    groups: dict[int, list[Any]] = {}
    for number in range(load.count):
        request = Request(prompt=torch.tensor(load.prompt_ids(number)), seeds=(number,))
        groups.setdefault(load.length(number), []).append(request)
    began = time.perf_counter()
    places = {}
    for length, requests in groups.items():
        limits = Limits(max_response_tokens=length, end_tokens=())
        places |= dict.fromkeys(engine.submit(requests, Sampling(), limits))
    tokens = 0
    while places:
        for finished in engine.poll():
            del places[finished.handle]
            tokens += sum(len(response.tokens) for response in finished.responses)
    seconds = time.perf_counter() - began
    assert tokens == load.all_tokens
    return {"tokens_per_second": tokens / seconds, "seconds": seconds}


def measure(shape: str, load: Load, *, rows: int, processes: int, repeats: int) -> dict[str, Any]:
    """All ways in turn, `repeats` times after one round that counts for nothing; medians of tokens per second."""
    policy, engine = make_policy_and_engine(shape, rows)
    load = Load(**{**asdict(load), "vocabulary": policy.vocabulary})
    engine.reserve(load.prompt, load.tokens)
    rounds: dict[str, list[dict[str, Any]]] = {"direct": [], "whole": [], "stream": []}
    for number in range(repeats + 1):
        results = {"direct": measure_direct(engine, load)}
        with serving(policy, engine, load) as url:
            for name in ("whole", "stream"):
                results[name] = measure_clients(url, load, processes, name == "stream")
        for name, result in results.items():
            print(f"round {number} {name:7} {result['tokens_per_second']:10.0f} tokens/s", file=sys.stderr, flush=True)
            if number:
                rounds[name].append(result)
    middle = {
        name: sorted(results, key=lambda result: result["tokens_per_second"])[len(results) // 2]
        for name, results in rounds.items()
    }
    direct = middle["direct"]["tokens_per_second"]
    return {
        "shape": shape,
        "device": describe_device(policy),
        "load": asdict(load),
        "rows_at_once": rows,
        "client_processes": processes,
        "repeats": repeats,
        "notes": policy.notes,
        "ways": middle,
        "share_of_direct": {name: middle[name]["tokens_per_second"] / direct for name in ("whole", "stream")},
        "target": TARGET,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": os.environ.get("COMMIT", ""),
    }


def describe_device(policy: Any) -> str:
    import torch

    if policy.device.type == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), torch {torch.__version__}, {torch.get_num_threads()} threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--as-clients", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--shape", default="tiny", choices=("tiny", "17M", "0.6B", "1.7B", "waiting"))
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--requests", type=int, default=4, help="of each client, in the mean")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a response")
    parser.add_argument("--ragged", action="store_true", help="responses from a quarter of that length to all of it")
    parser.add_argument("--rows", type=int, help="rows that the engine decodes at once; else one for each client")
    parser.add_argument("--processes", type=int, default=2, help="processes of clients")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="store nothing")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.as_clients:
        main_of_clients()
        return
    load = Load(
        clients=options.clients,
        requests=options.requests,
        prompt=options.prompt,
        tokens=options.tokens,
        ragged=options.ragged,
        vocabulary=0,
    )
    result = measure(
        options.shape,
        load,
        rows=options.rows or options.clients,
        processes=options.processes,
        repeats=1 if options.quick else options.repeats,
    )
    print(json.dumps(result, indent=1))
    if not options.quick:
        stored = json.loads(options.output.read_text()) if options.output.is_file() else []
        key = ("shape", "device", "load", "rows_at_once")
        kept = [each for each in stored if any(each[name] != result[name] for name in key)]
        options.output.write_text(json.dumps([*kept, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
