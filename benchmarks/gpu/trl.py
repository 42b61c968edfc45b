"""TRL's `GRPOTrainer` in sequence mode on a GPU, as a user would build it. Two methods are wrapped for timing, not changed.

`defaults`: float32 weights under bfloat16 autocast, gradient checkpointing. `strong`: bfloat16 weights (and moments),
no checkpointing, the largest micro-batch that fits, Liger's layers if they apply. TRL pads every response of a step to the
longest one and never trims, so sorting by length would not help.
"""

import contextlib
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu import work as work
from benchmarks.gpu.measure import GIB, Bench, describe_error
from benchmarks.gpu.work import Work
from benchmarks.step.trl_settings import disable_end_token, sequence_settings

FIRST_MICRO = {("0.6B", True): 64, ("1.7B", True): 32, ("0.6B", False): 64, ("1.7B", False): 64}
"""The first micro-batch size to try, in rows. It is halved until it fits into memory."""


def make_trainer(
    bench: Bench,
    shape: str,
    workload: Work,
    folder: str,
    *,
    strong: bool,
    micro: int,
    steps: int,
    liger: bool,
    **options: Any,
) -> Any:
    """TRL's trainer on the fixed rollouts. With `prompts` in the options, it decodes the responses with `generate`."""
    import datasets
    import trl

    prompts, samples = len(workload.prompts), len(workload.rewards[0])
    texts: list[str] | None = options.pop("prompts", None)
    longest = options.pop("tokens", max(len(row) for group in workload.responses for row in group))

    def fixed_rollouts(prompts: list[str], _: Any) -> dict[str, Any]:
        rows = [(int(text), row % samples) for row, text in enumerate(prompts)]
        return {
            "prompt_ids": [list(workload.prompts[number]) for number, _ in rows],
            "completion_ids": [list(workload.responses[number][sample]) for number, sample in rows],
            "logprobs": [[0.0] * len(workload.responses[number][sample]) for number, sample in rows],
        }

    def table_reward(completions: list[Any], number: list[int], **_: Any) -> list[float]:
        return [workload.rewards[prompt][row % samples] for row, prompt in enumerate(number)]

    rows = prompts * samples // work.UPDATES
    numbers = [number % prompts for number in range(prompts * steps)]
    model = work.make_model(bench, shape, dtype=bench.dtype if strong else torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=table_reward,
            processing_class=work.tokenizer(),
            train_dataset=datasets.Dataset.from_dict(
                {"prompt": [str(n) if texts is None else texts[n] for n in numbers], "number": numbers}
            ),
            rollout_func=fixed_rollouts if texts is None else None,
            args=trl.GRPOConfig(
                output_dir=folder,
                **sequence_settings(
                    updates=work.UPDATES, learning_rate=work.LEARNING_RATE, low=work.CLIP_LOW, high=work.CLIP_HIGH
                ),
                use_cpu=not bench.cuda,
                bf16=bench.cuda,
                gradient_checkpointing=not strong,
                use_liger_kernel=liger,
                per_device_train_batch_size=micro,
                gradient_accumulation_steps=rows // micro,
                steps_per_generation=work.UPDATES * rows // micro,
                num_generations=samples,
                max_steps=work.UPDATES * steps,
                max_completion_length=longest,
                **options,
            ),
        )
    return disable_end_token(trainer, model)


def time_steps(bench: Bench, trainer: Any) -> tuple[list[dict[str, float]], list[Any]]:
    """Train, and return the seconds of each phase of every step but the first, and TRL's log entries of all steps."""
    import transformers

    ends: list[float] = []
    generating, preparing = list[float](), list[float]()

    class Clock(transformers.TrainerCallback):
        def _note(self, *_: Any, **__: Any) -> None:
            bench.wait()
            ends.append(time.perf_counter())

        on_train_begin = on_step_end = _note

    trainer.add_callback(Clock())
    trainer._generate = time_call(bench, trainer._generate, generating)
    trainer._generate_and_score_completions = time_call(bench, trainer._generate_and_score_completions, preparing)
    trainer.remove_callback(transformers.PrinterCallback)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    samples = []
    for number in range(1, len(generating)):
        whole = ends[(number + 1) * work.UPDATES] - ends[number * work.UPDATES]
        update = whole - preparing[number]
        phase = whole - generating[number]
        samples.append(
            {"rollouts": generating[number], "anchor": phase - update, "update": update, "phase": phase, "step": whole}
        )
    logs = [entry for entry in trainer.state.log_history if "frac_reward_zero_std" in entry]
    return samples, logs


def time_call(bench: Bench, call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def wrapped(*positional: Any, **keywords: Any) -> Any:
        bench.wait()
        started = time.perf_counter()
        result = call(*positional, **keywords)
        bench.wait()
        seconds.append(time.perf_counter() - started)
        return result

    return wrapped


@contextlib.contextmanager
def restore_layers() -> Iterator[None]:
    """Restore the layers of the Qwen3 module on exit.

    Liger replaces them for the rest of the process, and later sides must not use Liger's layers.
    """
    from transformers.models.qwen3 import modeling_qwen3 as module

    names = dict(vars(module))
    forwards = {kind: kind.forward for kind in names.values() if isinstance(kind, type) and "forward" in vars(kind)}
    try:
        yield
    finally:
        vars(module).update(names)
        for kind, forward in forwards.items():
            kind.forward = forward


def train_largest_fitting(
    bench: Bench, shape: str, workload: Work, *, strong: bool, steps: int, **options: Any
) -> dict[str, Any]:
    """Train with the largest micro-batch that fits. The strong setting uses Liger's layers unless they fail."""
    rows = len(workload.prompts) * len(workload.rewards[0]) // work.UPDATES
    micro = min(rows, options.pop("micro", None) or (4 if bench.tiny else FIRST_MICRO[shape, strong]))
    liger, notes = strong and bench.cuda, list[str]()
    while True:
        bench.free()
        before, result = bench.held_bytes(), dict[str, Any]()
        error = None
        try:
            with tempfile.TemporaryDirectory() as folder, bench.peak(result), restore_layers():
                trainer = make_trainer(
                    bench, shape, workload, folder, strong=strong, micro=micro, steps=1 + steps, liger=liger, **dict(options)
                )
                samples, logs = time_steps(bench, trainer)
            result["static_gib"] = (bench.held_bytes() - before) / GIB
            clipped = [entry.get("clip_ratio/region_mean", 0.0) for entry in logs[1:]]
            return {
                **result,
                "samples": samples,
                "micro": micro,
                "liger": liger,
                "notes": notes,
                **_versions(),
                "clipped": clipped,
            }
        except torch.OutOfMemoryError:
            error = f"{micro} rows a micro-batch did not fit"
            if micro == 1:
                raise
            micro //= 2
        except Exception as failure:
            if not liger:
                raise
            liger, error = False, f"Liger's layers: {describe_error(failure)}"
        # Outside the except block, so that the frames that hold the model are freed before the next try.
        notes.append(error)
        trainer = None


def _versions() -> dict[str, str]:
    import trl

    return {"trl": trl.__version__}


def update_phase(bench: Bench, shape: str, workload: Work, *, strong: bool, steps: int) -> dict[str, Any]:
    """TRL's side of B4."""
    result = train_largest_fitting(bench, shape, workload, strong=strong, steps=steps)
    model = work.make_model(bench, shape) if bench.tiny else meta_model(shape)
    result["flops_anchor"] = work.rectangle_flops(model, workload, passes=(False,)).total
    result["flops_update"] = work.rectangle_flops(model, workload, passes=(True,)).total
    return result


def meta_model(shape: str) -> Any:
    """The model on the meta device: shapes without values."""
    with torch.device("meta"):
        return work.make_model(Bench(device=torch.device("meta"), tiny=False, deadline=0.0), shape)
