"""Metrics that a run records besides those of its objective (`definitions.py`): one definition per key."""

from legato.diagnostics.metrics.definitions import Metric, table

RUN_METRICS: tuple[Metric, ...] = (
    Metric("reward/mean", "mean reward of all scored rollouts of the step, dropped groups included", "any", "falling over many steps: look at samples"),
    Metric("reward/deviation", "population std of the same", ">= 0", "0: every response scores alike, nothing can be learnt"),
    Metric("reward/NAME", "mean of the reward's component NAME", "any", "a shaping term that grows while accuracy does not"),
    Metric("accuracy/mean", "mean unshaped accuracy of the same rollouts", "[0, 1]", "near 0 or 1: problems too hard or too easy"),
    Metric("length/truncated", "responses cut at the length limit / responses", "[0, 1]", "rising: the limit is too low, or responses run away"),
    Metric("groups/zero_variance", "groups whose responses all have the same reward / groups sampled", "[0, 1]", "near 1: most of the work teaches nothing"),
    Metric("groups/all_right", "groups with every response right / groups sampled", "[0, 1]", "near 1: the task is solved; go to a harder one"),
    Metric("groups/all_wrong", "groups with every response wrong / groups sampled", "[0, 1]", "near 1: the task is too hard for this policy"),
    Metric("groups/rounds", "rounds of sampling (dynamic sampling refills)", ">= 1", "at its bound: the step goes on with fewer groups"),
    Metric("groups/too_few_scored", "groups dropped because fewer than two responses could be scored", ">= 0", "above 0: the reward fails"),
    Metric("rollouts/unscorable", "rollouts that could not be scored / rollouts", "[0, 1]", "above 0: look at the reasons that were printed"),
    Metric("rollouts/repetition", "mean over responses of at least 8 tokens of: runs of 4 tokens that stood in the response before / its runs of 4 tokens", "[0, 1]", "rising: responses begin to loop"),
    Metric("prompts/too_long", "problems left out because of policy.max_prompt_tokens", ">= 0", "many: the limit is too low"),
    Metric("tokens/response", "response tokens sampled", ">= 0", "-"),
    Metric("tokens/per_second", "response tokens / seconds of the whole step", ">= 0", "falling: see the times"),
    Metric("gradient/norm", "mean over updates of the gradient norm before clipping", ">= 0", "a spike: one batch dominates"),
    Metric("gradient/norm_max", "the largest of them", ">= 0", "as above"),
    Metric("state/PART.NUMBER", "what the adaptive part PART holds after the step; of auto-clip log_low and log_high (bounds on |log r|), noise and updates (that told something)", "any", "of auto-clip: a bound at its floor or ceiling for long"),
    Metric("optimizer/lr", "learning rate of the next update", ">= 0", "-"),
    Metric("update/applied", "updates whose gradient was finite / updates; 0 where too few rollouts could be scored or no group was left to train on", "[0, 1]", "below 1: non-finite gradients were dropped"),
    Metric("update/silent_rows", "rows left out of an update beforehand (advantage 0, no penalty) / rows; objective metrics are over the others", "[0, 1]", "near 1: see groups/zero_variance"),
    Metric("update/skipped_rows", "rows whose backward was skipped / rows", "[0, 1]", "near 1: the trust region leaves nothing"),
    Metric("update/two_pass", "updates done in two passes / updates", "[0, 1]", "-"),
    Metric("router/replay_missing", "tokens read under replay without a record of their routes / tokens read", "[0, 1]", "above 0: the engine did not record them, and they went their own way"),
    Metric("router/balance", "E times the sum over experts of share of choices times mean probability, mean over layers; with training.load_balance on", "> 0", "1 where the load is even; growing: the loss is too weak"),
    Metric("noise/same_tokens", "tokens whose log-prob differs in any bit between a pass with and one without a gradient over one pack / tokens", "[0, 1]", "above 0: s is not exactly 1 before the first update"),
    Metric("noise/same_max", "largest |log s| of a response between those two passes", ">= 0", "above 0: as above"),
    Metric("noise/same_rms", "root mean square of the same", ">= 0", "as above"),
    Metric("noise/same_ratio", "largest |r - 1| between them, r the algorithm's own ratio (of a response, a turn or a token)", ">= 0", "as above"),
    Metric("noise/same_clipped", "responses outside the algorithm's band between them / responses; of tokens where the ratio or the clip is of tokens", "[0, 1]", "as above"),
    Metric("noise/packs_max", "largest |log s| of a response scored twice by one policy in different packs", ">= 0", "above a third of the clip band: the clip sees rounding"),
    Metric("noise/packs_rms", "root mean square of the same", ">= 0", "as above"),
    Metric("noise/packs_ratio", "largest |r - 1| of the algorithm's own ratio between them", ">= 0", "as above"),
    Metric("noise/packs_clipped", "responses (or tokens) outside the band between them, though nothing was trained", "[0, 1]", "above 0: the clip cuts off rounding"),
    Metric("noise/engine_max", "largest |log s| between what the engine reported and what the trainer computes", ">= 0", "above a third of the clip band: the anchor must be recomputed"),
    Metric("noise/engine_rms", "root mean square of the same", ">= 0", "as above"),
    Metric("noise/engine_token_max", "largest |log-ratio| of one token between engine and trainer", ">= 0", "above a third of the clip band of a token ratio: the anchor must be recomputed"),
    Metric("noise/engine_ratio", "largest |r - 1| of the algorithm's own ratio between engine and trainer", ">= 0", "as above"),
    Metric("noise/engine_clipped", "responses (or tokens) outside the band between engine and trainer, though nothing was trained", "[0, 1]", "above 0: the anchor must be recomputed"),
    Metric("eval/accuracy_sampled", "mean accuracy on held-out problems at evaluation.temperature; suffixes _low _high: 95 % interval", "[0, 1]", "falling while the reward rises: the reward is being gamed"),
    Metric("eval/accuracy_greedy", "the same, greedy", "[0, 1]", "as above"),
    Metric("eval/length_sampled", "mean length of those responses", ">= 0", "-"),
    Metric("eval/length_greedy", "mean length of those responses", ">= 0", "-"),
    Metric("eval/problems", "held-out problems", ">= 1", "few: the interval is wide"),
    Metric("eval/NAME/avg@K", "mean accuracy on the evaluation set NAME over K samples a problem; suffixes _low _high: 95 % interval over problems", "[0, 1]", "as above"),
    Metric("eval/NAME/pass@K", "unbiased estimate of the share of its problems that at least one of K samples answers right; suffixes _low _high as above", "[0, 1]", "falling while avg@K rises: answers become alike"),
    Metric("eval/NAME/length", "mean length of those responses", ">= 0", "-"),
    Metric("eval/NAME/problems", "problems of the set", ">= 1", "few: the interval is wide"),
    Metric("time/rollouts_seconds", "sampling and scoring", ">= 0", "-"),
    Metric("time/anchor_seconds", "planning, probe, old and reference log-probs, advantages", ">= 0", "-"),
    Metric("time/update_seconds", "forwards, backwards and optimizer steps", ">= 0", "-"),
    Metric("time/step_seconds", "the sum of the three", ">= 0", "-"),
)  # fmt: skip


def document() -> str:
    """The second part of `docs/metrics.md`."""
    return "\n".join(
        [
            "",
            "## Of a run",
            "",
            "Recorded once per step in `metrics.jsonl`. Metrics of the objective above are over all updates of the step; those",
            "marked `@0`, `@1` ... are of the first, the second ... update of the step, counted through its epochs. Losses are",
            "means over the updates.",
            "",
            *table(RUN_METRICS),
        ]
    )
