"""Compare our losses with TRL's and verl's on one seeded batch. Writes `benchmarks/results/peers.json`, which
`make docs` turns into `docs/peers.md`. Run by `make peers`, in an environment with tests/peers/requirements.txt and verl.

Each comparison declares beforehand whether both sides should agree, and if not, why. The run fails if a result contradicts
its declaration.
"""

import datetime
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "peers.json"
PACKAGES = ("torch", "trl", "transformers", "verl", "numpy")

sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    peer: str
    ours: str
    """Our algorithm and its settings."""
    theirs: str
    """The peer's settings, with its own names."""
    sides: Callable[[], tuple]
    """Computes our side and the peer's side."""
    tolerance: float = 1e-12
    reason: str = ""
    """Why both sides differ. Empty if they should agree."""


def setting_words(*parts: str | dict[str, object]) -> str:
    """Settings as one line: names, then `key = value`."""

    def spell(part: str | dict[str, object]) -> str:
        if isinstance(part, str):
            return part
        return ", ".join(
            f"{key} = {value:g}" if isinstance(value, float) else f"{key} = {value}" for key, value in part.items()
        )

    return ", ".join(spell(part) for part in parts if part)


def trl_comparisons() -> Iterator[Comparison]:
    from tests.peers.sides import Batch, fixed_batch, ours, with_empty_row
    from tests.peers.trl_trainer import model_sides, trl_side

    batch, empty = fixed_batch(), with_empty_row(fixed_batch())
    ref = {"ref_logprobs": batch.ref_logprobs}
    gspo = {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4}
    grpo = {"importance_sampling_level": "token", "loss_type": "grpo", "epsilon": 0.2, "epsilon_high": 0.2}
    dapo = {"importance_sampling_level": "token", "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}
    token_mean = {"aggregate": "token-mean"}
    weighted_kl = {"objective.penalties.kl-ratio-weighted.beta": 0.04}

    def compare(
        algorithm: str,
        overrides: dict[str, object],
        settings: dict[str, object],
        *,
        compared: Batch = batch,
        note: str = "",
        signals: dict[str, object] | None = None,
        tolerance: float = 1e-12,
        reason: str = "",
    ) -> Comparison:
        return Comparison(
            peer="TRL",
            ours=setting_words(algorithm, overrides, note),
            theirs=setting_words(settings),
            sides=lambda: (ours(compared, algorithm, overrides, **(signals or {})), trl_side(compared, **settings)),
            tolerance=tolerance,
            reason=reason,
        )

    for algorithm, settings in (("gspo", gspo), ("grpo", grpo)):
        yield Comparison(
            peer="TRL",
            ours=f"{algorithm}, through a tiny Qwen3 in float32: the gradient of every parameter",
            theirs=setting_words(settings),
            sides=lambda algorithm=algorithm, settings=settings: model_sides(algorithm, **settings),
            tolerance=1e-5,
        )
    yield compare("gspo", {}, gspo)
    yield compare("grpo", {}, grpo)
    yield compare("grpo", {"objective.trust.dual-clip.cap": 3.0}, grpo | {"delta": 3.0})
    yield compare(
        "grpo",
        {"objective.penalties.kl.beta": 0.04},
        grpo | {"beta": 0.04, "use_bias_correction_kl": False},
        signals=ref,
    )
    yield compare("grpo", weighted_kl, grpo | {"beta": 0.04, "use_bias_correction_kl": True}, signals=ref)
    yield compare(
        "grpo",
        {"objective.trust.opsm.threshold": 0.01, "objective.trust.opsm.anchor": "old"},
        grpo | {"off_policy_mask_threshold": 0.01},
    )
    yield compare("dr-grpo", {"aggregate.constant": 16.0}, grpo | {"loss_type": "dr_grpo", "max_completion_length": 16})
    yield compare("luspo", {}, gspo | {"loss_type": "luspo", "epsilon": 2e-3, "epsilon_high": 2.5e-3})
    yield compare("vespo", {}, {"loss_type": "vespo"})
    yield compare("sapo", {}, {"loss_type": "sapo"}, note="TRL holds 1.05 in float32", tolerance=1e-7)
    yield compare("dapo", token_mean, dapo)
    yield compare("cispo", token_mean, {"loss_type": "cispo", "epsilon_high": 5.0})
    yield compare("gspo", token_mean, gspo | {"loss_type": "dapo"})
    yield compare(
        "gspo",
        {},
        gspo | {"loss_type": "dapo"},
        reason="TRL's default loss divides by tokens, which weighs each response by its length (it logs a warning); "
        "GSPO is a mean of responses. Ours with a token mean equals it.",
    )
    yield compare(
        "dapo",
        {},
        dapo,
        reason="DAPO's formula takes the token mean in each group, then the mean of groups, and so do we; TRL takes "
        "one token mean. They are equal where all groups have as many tokens.",
    )
    yield compare(
        "gspo",
        {},
        gspo,
        compared=empty,
        note="one more response, all masked",
        reason="TRL counts a fully masked response in its mean, ours leaves it out of N: a factor 8/9 here.",
    )
    yield compare(
        "gspo",
        weighted_kl,
        gspo | {"beta": 0.04, "use_bias_correction_kl": True},
        signals=ref,
        reason="The weight that makes k3 unbiased is each token's own ratio; at sequence level TRL multiplies by the "
        "ratio of the response.",
    )


def verl_comparisons() -> Iterator[Comparison]:
    from tests.peers.sides import Batch, fixed_batch, ours, with_empty_row
    from tests.peers.verl_functions import load, verl_side

    core = load()
    batch, empty, drifted = fixed_batch(), with_empty_row(fixed_batch()), fixed_batch()
    drifted.logprobs[7] = drifted.old_logprobs[7] + 12.0
    gspo = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
    sequence_mean, token_mean = "seq-mean-token-mean", "token-mean"

    def compare(
        algorithm: str,
        overrides: dict[str, object],
        loss: str,
        aggregation: str,
        config: dict[str, object],
        *,
        compared: Batch = batch,
        note: str = "",
        signals: dict[str, object] | None = None,
        tolerance: float = 1e-7,
        reason: str = "",
    ) -> Comparison:
        return Comparison(
            peer="verl",
            ours=setting_words(algorithm, overrides, note),
            theirs=setting_words(loss, aggregation, config),
            sides=lambda: (
                ours(compared, algorithm, overrides, **(signals or {})),
                verl_side(core, compared, loss, aggregation, **config),
            ),
            tolerance=tolerance,
            reason=reason,
        )

    ours_token_mean = {"aggregate": "token-mean"}
    yield compare("gspo", {}, "gspo", sequence_mean, gspo)
    yield compare("gspo-token", {}, "gspo", sequence_mean, gspo)
    yield compare("gspo", ours_token_mean, "gspo", token_mean, gspo)
    yield compare("grpo", {}, "vanilla", sequence_mean, {"clip_ratio": 0.2, "clip_ratio_c": 1e9})
    yield compare(
        "grpo",
        {"objective.trust.dual-clip.cap": 3.0},
        "vanilla",
        sequence_mean,
        {"clip_ratio": 0.2, "clip_ratio_c": 3.0},
    )
    yield compare("gmpo", {}, "geo_mean", "", {"clip_ratio": 0.4})
    yield compare("sapo", {}, "sapo", "", {"tau_pos": 1.0, "tau_neg": 1.05})
    yield compare("cispo", ours_token_mean, "cispo", token_mean, {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0})
    for divergence, loss, threshold in (("total-variation", "dppo_tv", 0.05), ("kl", "dppo_kl", 0.005)):
        part = "objective.trust.divergence-mask"
        yield compare(
            "dppo",
            {f"{part}.divergence": divergence, f"{part}.threshold": threshold},
            loss,
            token_mean,
            {"clip_ratio": threshold, "clip_ratio_c": 20.0},
            signals={"sampler_logprobs": batch.old_logprobs},
        )
    yield compare(
        "gspo",
        {},
        "gspo",
        token_mean,
        gspo,
        reason="verl's actor config says token-mean, which weighs each response by its length; GSPO is a mean of "
        "responses. Ours with a token mean equals it.",
    )
    yield compare(
        "grpo",
        {},
        "vanilla",
        sequence_mean,
        {"clip_ratio": 0.2, "clip_ratio_c": 3.0},
        reason="verl's dual clip at 3 is always on; with us it is a part to add.",
    )
    yield compare(
        "cispo",
        ours_token_mean,
        "cispo",
        token_mean,
        {"clip_ratio": 0.2},
        reason="CISPO has no lower bound on the weight; verl clips to .8 and 1.2 by default, ours caps at 5.",
    )
    yield compare(
        "gspo",
        {},
        "gspo",
        sequence_mean,
        gspo,
        compared=drifted,
        note="one response with log s = 12 and a negative advantage",
        reason="verl stops the ratio at e^10, with no gradient beyond; ours has no limit on log s.",
    )
    yield compare(
        "gmpo",
        {},
        "geo_mean",
        "",
        {"clip_ratio": 0.4},
        compared=empty,
        note="one more response, all masked",
        reason="verl's geo_mean counts a fully masked response in its mean, ours leaves it out of N: 8/9 here.",
    )


ADVANTAGE_REASONS = {
    "TRL": "TRL divides by the sample deviation (ddof 1) plus 1e-4; ours by the deviation of the group itself (ddof 0) "
    "plus 1e-6, so that rewards 1 0 1 0 give +-1. `advantage.ddof` and `advantage.epsilon` are fields.",
    "verl": "verl divides by the sample deviation (ddof 1) plus 1e-6; ours by the deviation of the group itself (ddof "
    "0). `advantage.ddof` is a field.",
}


def advantage_comparisons() -> Iterator[Comparison]:
    """Comparisons of advantages. They are stored in place of the gradient, and their mean square in place of the loss."""
    import torch

    import legato
    from tests.peers.sides import Side, fixed_batch
    from tests.peers.trl_trainer import trl_advantages
    from tests.peers.verl_functions import load, verl_advantages

    rewards = torch.tensor([1.0, 0.0, 0.0, 0.5, 0.2, 0.9, 0.4, 0.7])
    batch, core = fixed_batch(), load()

    def side(advantages: torch.Tensor) -> Side:
        return Side(loss=advantages.double().square().mean().item(), gradient=advantages.double())

    def mine(overrides: dict[str, object]) -> Side:
        algorithm = legato.algorithm("grpo", overrides)
        return side(legato.advantages(algorithm, rewards=rewards, group=batch.group).advantages)

    def theirs(peer: str) -> Side:
        if peer == "TRL":
            return side(trl_advantages(rewards.tolist(), scale_rewards="group"))
        return side(verl_advantages(core, "grpo", rewards, batch.mask, batch.group)[0][:, 0])

    settings = {"TRL": 'scale_rewards="group"', "verl": "compute_grpo_outcome_advantage"}
    for peer, epsilon in (("TRL", 1e-4), ("verl", 1e-6)):
        matched = {"advantage.ddof": 1, "advantage.epsilon": epsilon}
        yield Comparison(
            peer=peer,
            ours=f"advantages of grpo, ddof 1, epsilon {epsilon:g} (float32)",
            theirs=settings[peer],
            sides=lambda matched=matched, peer=peer: (mine(matched), theirs(peer)),
            tolerance=1e-5,
        )
        yield Comparison(
            peer=peer,
            ours="advantages of grpo",
            theirs=settings[peer],
            sides=lambda peer=peer: (mine({}), theirs(peer)),
            tolerance=1e-5,
            reason=ADVANTAGE_REASONS[peer],
        )


def measure(comparison: Comparison) -> dict[str, object]:
    from tests.peers.sides import agree, difference

    our_side, their_side = comparison.sides()
    gap = difference(our_side, their_side)
    return {
        "peer": comparison.peer,
        "ours": comparison.ours,
        "theirs": comparison.theirs,
        "our_loss": our_side.loss,
        "their_loss": their_side.loss,
        "loss_difference": gap.loss,
        "gradient_difference": (our_side.gradient - their_side.gradient).abs().max().item(),
        "gradient_difference_relative": gap.gradient,
        "tolerance": comparison.tolerance,
        "agrees": agree(our_side, their_side, tolerance=comparison.tolerance),
        "agreement_expected": not comparison.reason,
        "reason": comparison.reason,
    }


def run() -> dict[str, object]:
    import torch

    torch.set_num_threads(1)
    sources = (trl_comparisons, verl_comparisons, advantage_comparisons)
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "comparisons": [measure(comparison) for source in sources for comparison in source()],
    }


def main() -> int:
    results = run()
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    surprises = 0
    for entry in results["comparisons"]:
        expected = entry["agrees"] == entry["agreement_expected"]
        surprises += not expected
        verdict = ("agrees" if entry["agrees"] else "differs") + ("" if expected else "  <- NOT EXPECTED")
        print(
            f"{entry['peer']:5} {entry['ours']:<70} loss {entry['loss_difference']:.1e} "
            f"gradient {entry['gradient_difference_relative']:.1e}  {verdict}"
        )
    return 1 if surprises else 0


if __name__ == "__main__":
    raise SystemExit(main())
