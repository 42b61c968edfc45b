"""TRL's side of `benchmarks/step`, in the peers' environment: python -m benchmarks.step.trl_side VERB work.json found.json

Its `GRPOTrainer` as a user would build it, with the settings of the comparison. Nothing of it is rewritten; two of its
methods are wrapped to be timed.
"""

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.step import work as work
from benchmarks.step.trl_settings import never_ending, sequence_settings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import datasets
    import transformers
    import trl


def trainer_of(given: dict[str, Any], folder: str) -> Any:
    table = given["rewards"]

    def table_reward(completions: list[Any], number: list[int], **_: Any) -> list[float]:
        # Rows come prompt by prompt, each prompt's samples together.
        return [table[prompt][row % work.SAMPLES] for row, prompt in enumerate(number)]

    asked = given["questions"]
    prompts = [[{"role": "user", "content": text}] for text in asked] if given["chat"] else asked
    model = transformers.AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32)
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=table_reward,
        processing_class=transformers.AutoTokenizer.from_pretrained(given["model"]),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts, "number": list(range(len(asked)))}),
        args=trl.GRPOConfig(
            output_dir=folder,
            **sequence_settings(
                updates=work.UPDATES, learning_rate=work.LEARNING_RATE, low=work.CLIP_LOW, high=work.CLIP_HIGH
            ),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=work.SAMPLES * work.PROMPTS // work.UPDATES,
            gradient_accumulation_steps=1,
            steps_per_generation=work.UPDATES,
            num_generations=work.SAMPLES,
            max_steps=work.UPDATES * len(asked) // work.PROMPTS,
            max_completion_length=work.TOKENS,
        ),
    )
    return never_ending(trainer, model)


class Clock(transformers.TrainerCallback):
    """The time of every update's end, and the peak of memory at the end of the first step."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.cpu: list[float] = []
        self.peak = 0.0

    def _note(self) -> None:
        self.ends.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._note()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._note()
        if len(self.ends) == 1 + work.UPDATES:
            self.peak = work.memory()["peak_mb"]
            work.forget_peak()


def time_call(call: Callable[..., Any], seconds: list[float], results: list[Any] | None = None) -> Callable[..., Any]:
    def wrapped(*positional: Any, **named: Any) -> Any:
        started = time.perf_counter()
        found = call(*positional, **named)
        seconds.append(time.perf_counter() - started)
        if results is not None:
            results.append(found)
        return found

    return wrapped


def measure(given: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(given, folder)
        loaded = work.memory()["now_mb"]
        clock, generating, preparing = Clock(), list[float](), list[float]()
        generated: list[Any] = []
        trainer.add_callback(clock)
        trainer._generate = time_call(trainer._generate, generating, generated)
        trainer._generate_and_score_completions = time_call(trainer._generate_and_score_completions, preparing)
        # It speaks of every update; what is measured is written to a file.
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "frac_reward_zero_std" in entry]
    steps = []
    for number, (prompts, responses, *_) in enumerate(generated):
        first, last = number * work.UPDATES, (number + 1) * work.UPDATES
        start, end = clock.ends[first], clock.ends[last]
        steps.append(
            {
                "seconds": end - start,
                "cpu_seconds": clock.cpu[last] - clock.cpu[first],
                "updates": min(work.UPDATES, trainer.state.global_step - number * work.UPDATES),
                "response_tokens": sum(map(len, responses)),
                "prompt_tokens": sum(map(len, prompts)),
                "prompts": work.digest(prompts[:: work.SAMPLES]),
                "reward_mean": logs[number]["reward"],
                "phases": {
                    "rollouts": generating[number],
                    "anchor": preparing[number] - generating[number],
                    "update": end - start - preparing[number],
                },
                "silent": logs[number]["frac_reward_zero_std"],
                "clipped": logs[number].get("clip_ratio/region_mean"),
            }
        )
    return {
        "steps": steps,
        "loaded_mb": loaded,
        **work.peaks(clock.peak),
        "versions": {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__},
    }


def check(given: dict[str, Any]) -> dict[str, Any]:
    """`_compute_loss` on the batch that our side wrote."""
    from safetensors.torch import load_file

    batch = load_file(given["batch"])
    tokens, prompt = batch["tokens"], batch["prompt"].expand(len(batch["tokens"]), -1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(given, folder)
    # The training loop sets this before its first step; no loop runs here.
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": prompt,
            "prompt_mask": torch.ones_like(prompt),
            "completion_ids": tokens,
            "completion_mask": torch.ones_like(tokens),
            "advantages": batch["advantages"],
            "old_per_token_logps": batch["old"],
            "num_items_in_batch": torch.tensor(tokens.numel()),
        },
    )
    loss.backward()
    named = trainer.model.named_parameters()
    return {
        "loss": loss.item(),
        "gradients": {name: work.fingerprint(name, p.grad) for name, p in named if p.grad is not None},
    }


if __name__ == "__main__":
    torch.set_num_threads(work.THREADS)
    work.write(sys.argv[3], {"check": check, "measure": measure}[sys.argv[1]](work.read(sys.argv[2])))
