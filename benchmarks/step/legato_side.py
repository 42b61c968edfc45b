"""Our side of `benchmarks/step`, a process of its own: python -m benchmarks.step.legato_side VERB work.json found.json

prepare   write the tiny model's folder, find SmolLM2's
check     loss and gradient of one fixed batch, and the batch itself for the other side
measure   whole steps of the trainer
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
"""SmolLM2's: the head is what a small model with a real vocabulary spends its time on."""


def prepare(given: dict[str, Any]) -> dict[str, Any]:
    """Qwen3 of 7.1M parameters with a tokenizer of characters, filled up with words nobody writes to a real vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [PAD, END, UNKNOWN, *ALPHABET]
    words += [f"<{number}>" for number in range(len(words), VOCABULARY)]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    folder = Path(given["folder"]) / "tiny"
    build: Any = PreTrainedTokenizerFast
    build(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, unk_token=UNKNOWN).save_pretrained(folder)
    model = tiny_model(TinyShape(hidden=128, layers=4, heads=4), vocabulary=VOCABULARY, seed=0)
    model.save_pretrained(folder)
    found = {"tiny": str(folder), "tiny_parameters": model.num_parameters(), "torch": torch.__version__}
    try:
        return {**found, "smollm2": str(smollm2_folder())}
    except (ValueError, ImportError) as error:
        return {**found, "smollm2": None, "smollm2_missing": str(error)}


def trainer_of(given: dict[str, Any]) -> Trainer:
    """The trainer that `legato train` would build, on problems and rewards of ours."""
    table = given["rewards"]

    def table_reward(rollout: Rollout) -> float:
        return float(table[rollout.problem.fields["number"]][rollout.rollout_id % work.SAMPLES])

    problems = [Problem(prompt=text, fields={"number": number}) for number, text in enumerate(given["questions"])]
    objects = wire.Given(problems=problems, reward=table_reward)
    resolved = load(
        [],
        (),
        {
            "algorithm": "gspo",
            "policy.model": given["model"],
            "policy.device": "cpu",
            "policy.chat": "always" if given["chat"] else "never",
            "rollouts.samples_per_prompt": work.SAMPLES,
            "rollouts.temperature": 1.0,
            "rollouts.max_response_tokens": work.TOKENS,
            "training.steps": len(problems) // work.PROMPTS,
            "training.prompts_per_step": work.PROMPTS,
            "training.updates_per_step": work.UPDATES,
            "training.lr": work.LEARNING_RATE,
            **given.get("options", {}),
        },
    )
    policy = wire.policy_of(resolved, objects)
    # Nothing is held out and nothing shuffled: problem n is row n of the table on both sides.
    source = Pool(problems, share=0.0, seed=0, shuffle=False)
    collector = wire.collector_of(resolved.config, policy, source, wire.reward_of(resolved.config, objects))
    # An end token that no model writes: every response has its full length.
    collector.runner.limits = dataclasses.replace(collector.runner.limits, end_tokens=(policy.vocabulary,))
    return wire.trainer_of(resolved, policy, collector, None)


def measure(given: dict[str, Any]) -> dict[str, Any]:
    """Each step's seconds, phases and counts; the first is the warm-up and holds the probe."""
    trainer = trainer_of(given)
    loaded = work.memory()["now_mb"]
    steps, peak = [], 0.0
    for number in range(len(given["questions"]) // work.PROMPTS):
        if number == 1:
            peak = work.memory()["peak_mb"]
            work.forget_peak()
        updates, started, cpu = trainer.optimizer.updates, time.perf_counter(), time.process_time()
        report = trainer.step()
        took = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}
        steps.append({**took, "updates": trainer.optimizer.updates - updates, **counts(report)})
    return {
        "steps": steps,
        "anchor": trainer.anchor_choice,
        "loaded_mb": loaded,
        **work.peaks(peak),
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


def check(given: dict[str, Any]) -> dict[str, Any]:
    """One group of fixed tokens through the policy's packs and `legato.loss`; the batch is written for the other side."""
    trainer = trainer_of(given)
    policy = trainer.policy
    generator = torch.Generator().manual_seed(0)
    prompt = trainer.source.runner.rendering.prompt(Problem(prompt=given["questions"][0]))
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
    wanted = torch.tensor(work.CHECK_LOG_S)
    old = policy.score(texts, rows).logprobs - (noise - noise.mean(1, keepdim=True) + wanted[:, None])
    advantages = torch.tensor(work.CHECK_ADVANTAGES)
    save_file(
        {"prompt": prompt, "tokens": tokens, "old": old.contiguous(), "advantages": advantages},
        given["batch"],
    )
    losses = []
    with policy.accumulate_gradient(texts, rows) as forward:
        for piece in forward.pieces():  # one: the group is small
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
    work.write(sys.argv[3], {"prepare": prepare, "check": check, "measure": measure}[sys.argv[1]](work.read(sys.argv[2])))
