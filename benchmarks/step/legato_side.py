"""Our side of `benchmarks/step`, run in its own process: python -m benchmarks.step.legato_side VERB work.json result.json

prepare   write the folder of the tiny model, find that of SmolLM2
check     compute loss and gradient of one fixed batch, and write the batch for TRL's side
measure   time whole steps of the trainer
"""

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import legato
from benchmarks.step import work as work
from legato.config.load import load
from legato.core.rollout import Problem, Rollout
from legato.core.texts import Texts
from legato.policy.model.smollm2 import smollm2_folder
from legato.policy.model.tiny import ALPHABET, END, PAD, UNKNOWN, TinyShape, tiny_model
from legato.run import wire
from legato.tasks.source import Pool
from legato.training.report import StepReport
from legato.training.step import Trainer

VOCABULARY = 49152
"""The size of SmolLM2's vocabulary: a small model with a real vocabulary spends most of its time in the head."""


def prepare(settings: dict[str, Any]) -> dict[str, Any]:
    """Write a Qwen3 of 7.1M parameters and return the model folders.

    Its tokenizer has one token per character; unused words pad the vocabulary to the size of a real one.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [PAD, END, UNKNOWN, *ALPHABET]
    words += [f"<{number}>" for number in range(len(words), VOCABULARY)]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    folder = Path(settings["folder"]) / "tiny"
    build: Any = PreTrainedTokenizerFast
    build(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, unk_token=UNKNOWN).save_pretrained(folder)
    model = tiny_model(TinyShape(hidden=128, layers=4, heads=4), vocabulary=VOCABULARY, seed=0)
    model.save_pretrained(folder)
    result = {"tiny": str(folder), "tiny_parameters": model.num_parameters(), "torch": torch.__version__}
    try:
        return {**result, "smollm2": str(smollm2_folder())}
    except (ValueError, ImportError) as error:
        return {**result, "smollm2": None, "smollm2_missing": str(error)}


def make_trainer(settings: dict[str, Any]) -> Trainer:
    """The trainer that `legato train` would build, on the fixed problems and rewards."""
    table = settings["rewards"]

    def table_reward(rollout: Rollout) -> float:
        return float(table[rollout.problem.fields["number"]][rollout.rollout_id % work.SAMPLES])

    problems = [Problem(prompt=text, fields={"number": number}) for number, text in enumerate(settings["questions"])]
    objects = wire.PythonObjects(problems=problems, reward=table_reward)
    resolved = load(
        [],
        (),
        {
            "algorithm": "gspo",
            "policy.model": settings["model"],
            "policy.device": "cpu",
            "policy.chat": "always" if settings["chat"] else "never",
            "rollouts.samples_per_prompt": work.SAMPLES,
            "rollouts.temperature": 1.0,
            "rollouts.max_response_tokens": work.TOKENS,
            "training.steps": len(problems) // work.PROMPTS,
            "training.prompts_per_step": work.PROMPTS,
            "training.updates_per_step": work.UPDATES,
            "training.lr": work.LEARNING_RATE,
            **settings.get("options", {}),
        },
    )
    policy = wire.policy_of(resolved, objects)
    # No problem is held out or shuffled: problem n is row n of the reward table on both sides.
    source = Pool(problems, share=0.0, seed=0, shuffle=False)
    collector = wire.collector_of(resolved.config, policy, source, wire.reward_of(resolved.config, objects))
    # No model writes this end token, so every response has its full length.
    collector.runner.limits = dataclasses.replace(collector.runner.limits, end_tokens=(policy.vocabulary,))
    return wire.trainer_of(resolved, policy, collector, None)


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds, phases and counts of each step. The first step is the warm-up and includes the probe."""
    trainer = make_trainer(settings)
    loaded = work.memory_megabytes()["now_mb"]
    steps, peak = [], 0.0
    for number in range(len(settings["questions"]) // work.PROMPTS):
        if number == 1:
            peak = work.memory_megabytes()["peak_mb"]
            work.reset_peak()
        updates, started, cpu = trainer.optimizer.updates, time.perf_counter(), time.process_time()
        report = trainer.step()
        elapsed = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}
        steps.append({**elapsed, "updates": trainer.optimizer.updates - updates, **counts(report)})
    return {
        "steps": steps,
        "anchor": trainer.anchor_choice,
        "loaded_mb": loaded,
        **work.peak_megabytes(peak),
        "versions": {"legato": legato.__version__, "torch": torch.__version__},
    }


def counts(report: StepReport) -> dict[str, Any]:
    members = [member.rollout for group in report.groups for member in group.members]
    metrics = report.metrics
    return {
        "response_tokens": sum(len(rollout.tokens) for rollout in members),
        "prompt_tokens": sum(len(rollout.prompt_tokens) for rollout in members),
        "prompts": work.digest(group.members[0].rollout.prompt_tokens.tolist() for group in report.groups),
        "rewards": [member.score.reward for group in report.groups for member in group.members],
        "phases": {name: metrics[f"time/{name}_seconds"] for name in ("rollouts", "anchor", "update")},
        "silent": metrics["groups/zero_variance"],
        "skipped": metrics["update/skipped_rows"],
        "clipped": metrics["clip/sequences"],
    }


def check(settings: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradient of one group of fixed tokens. The batch is written to a file for TRL's side."""
    trainer = make_trainer(settings)
    policy = trainer.policy
    generator = torch.Generator().manual_seed(0)
    prompt = trainer.source.runner.rendering.prompt(Problem(prompt=settings["questions"][0]))
    tokens = torch.randint(3, policy.vocabulary, (work.SAMPLES, work.TOKENS), generator=generator)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    texts = Texts(
        prompts=prompt[None],
        prompt_lengths=torch.tensor([len(prompt)]),
        tokens=tokens,
        lengths=mask.sum(1),
        mask=mask,
        group=torch.zeros(work.SAMPLES, dtype=torch.int64),
        temperature=torch.ones(work.SAMPLES),
    )
    rows = torch.arange(work.SAMPLES)
    noise = 0.25 * torch.randn(tokens.shape, generator=generator)
    log_ratios = torch.tensor(work.CHECK_LOG_S)
    old = policy.score(texts, rows).logprobs - (noise - noise.mean(1, keepdim=True) + log_ratios[:, None])
    advantages = torch.tensor(work.CHECK_ADVANTAGES)
    save_file(
        {"prompt": prompt, "tokens": tokens, "old": old.contiguous(), "advantages": advantages},
        settings["batch"],
    )
    losses = []
    with policy.accumulate_gradient(texts, rows) as forward:
        for piece in forward.pieces():  # a single piece, because the group is small
            outcome = legato.loss(
                trainer.algorithm,
                logprobs=piece.channels.logprobs,
                old_logprobs=old,
                advantages=advantages,
                mask=mask,
                group=texts.group,
            )
            losses.append(outcome.loss.item())
            piece.backward(outcome.field)
    gradients = {name: work.fingerprint(name, p.grad) for name, p in policy.parameters().items() if p.grad is not None}
    return {"loss": sum(losses), "gradients": gradients}


if __name__ == "__main__":
    torch.set_num_threads(work.THREADS)
    work.write_json(
        sys.argv[3], {"prepare": prepare, "check": check, "measure": measure}[sys.argv[1]](work.read_json(sys.argv[2]))
    )
