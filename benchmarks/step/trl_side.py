"""TRL's side of `benchmarks/step`, in the peers' environment: python -m benchmarks.step.trl_side VERB work.json result.json

TRL's `GRPOTrainer` as a user would build it, with the settings of the comparison. No TRL code is rewritten; two methods are
wrapped for timing.
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
from benchmarks.step.trl_settings import disable_end_token, sequence_settings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import datasets
    import transformers
    import trl


def make_trainer(settings: dict[str, Any], folder: str) -> Any:
    table = settings["rewards"]

    def table_reward(completions: list[Any], number: list[int], **_: Any) -> list[float]:
        # Rows are ordered by prompt, with the samples of a prompt together.
        return [table[prompt][row % work.SAMPLES] for row, prompt in enumerate(number)]

    questions = settings["questions"]
    prompts = [[{"role": "user", "content": text}] for text in questions] if settings["chat"] else questions
    model = transformers.AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=table_reward,
        processing_class=transformers.AutoTokenizer.from_pretrained(settings["model"]),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts, "number": list(range(len(questions)))}),
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
            max_steps=work.UPDATES * len(questions) // work.PROMPTS,
            max_completion_length=work.TOKENS,
        ),
    )
    return disable_end_token(trainer, model)


class Clock(transformers.TrainerCallback):
    """Records the time at the end of every update, and the peak memory at the end of the first step."""

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
            self.peak = work.memory_megabytes()["peak_mb"]
            work.reset_peak()


def time_call(call: Callable[..., Any], seconds: list[float], results: list[Any] | None = None) -> Callable[..., Any]:
    def wrapped(*positional: Any, **keywords: Any) -> Any:
        started = time.perf_counter()
        result = call(*positional, **keywords)
        seconds.append(time.perf_counter() - started)
        if results is not None:
            results.append(result)
        return result

    return wrapped


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(settings, folder)
        loaded = work.memory_megabytes()["now_mb"]
        clock, generating, preparing = Clock(), list[float](), list[float]()
        generated: list[Any] = []
        trainer.add_callback(clock)
        trainer._generate = time_call(trainer._generate, generating, generated)
        trainer._generate_and_score_completions = time_call(trainer._generate_and_score_completions, preparing)
        # This callback prints every update; results go to a file instead.
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
        **work.peak_megabytes(clock.peak),
        "versions": {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__},
    }


def check(settings: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradient of TRL's `_compute_loss` on the batch that our side wrote."""
    from safetensors.torch import load_file

    batch = load_file(settings["batch"])
    tokens, prompt = batch["tokens"], batch["prompt"].expand(len(batch["tokens"]), -1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(settings, folder)
    # TRL's training loop sets this before its first step; no loop runs here.
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
    parameters = trainer.model.named_parameters()
    return {
        "loss": loss.item(),
        "gradients": {name: work.fingerprint(name, p.grad) for name, p in parameters if p.grad is not None},
    }


if __name__ == "__main__":
    torch.set_num_threads(work.THREADS)
    work.write_json(sys.argv[3], {"check": check, "measure": measure}[sys.argv[1]](work.read_json(sys.argv[2])))
