"""A teacher: another model whose log-probs of the policy's own responses tell each token how far it is from the teacher.

On-policy distillation. The reverse KL of the policy from the teacher is the mean over sampled tokens of
log pi - log teacher, so that A_t = log teacher - log pi is its advantage, token by token. log pi is the engine's, whose
samples they are.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from legato.core.device import to_device
from legato.core.fields import choice, number, text
from legato.core.segments import ordered_sum
from legato.core.settings import settings
from legato.core.world import World
from legato.errors import InputError
from legato.policy.model.reference import Reference
from legato.policy.policy import Policy
from legato.training.plan import micro_batches
from legato.training.tables import Tables


@settings()
class TeacherSettings:
    """The model to distil from, and how its word is weighed."""

    model: str | None = text(
        default=None,
        says='The teacher: a folder or a hub name, with the tokenizer of the policy; or "tiny". absent: no teacher.',
        optional=True,
    )
    use: str = choice(
        "advantage",
        "penalty",
        default="advantage",
        says="'advantage': log teacher - log policy of each token is added to its advantage; 'penalty': the teacher is the"
        ' reference of the KL penalties of the algorithm (algorithm.objective.penalties = ["kl-ratio-weighted"]).',
    )
    weight: float = number(default=1.0, says="Weight of the teacher's advantage.", minimum=0.0)
    baseline: str = choice(
        "none",
        "problem",
        default="problem",
        says="What is subtracted from the teacher's advantage: nothing, or its mean over the tokens of the problem's"
        " responses. It changes no expected gradient and makes it less noisy.",
    )
    reward_weight: float = number(
        default=1.0, says="Weight of the reward's advantage beside it; 0: distillation alone.", minimum=0.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """A frozen model beside the policy."""

    reference: Reference
    settings: TeacherSettings

    @classmethod
    def of(cls, teacher: Policy, student: Policy, settings: TeacherSettings) -> "Teacher":
        """InputError if both read different tokens."""
        own, other = (each.tokenizer.get_vocab() for each in (student, teacher))
        if own != other:
            differing = sorted({*own.items()} ^ {*other.items()})[:3]
            raise InputError(
                f"expected a teacher with the tokenizer of the policy ({len(own)} tokens), got {teacher.name} with"
                f" {len(other)} tokens, which differ at {', '.join(repr(word) for word, _ in differing)} (teacher.model);"
                " take a model of the same family"
            )
        teacher.model.requires_grad_(False)
        return cls(reference=Reference(policy=teacher, adapters=False), settings=settings)

    def score(self, tables: Tables, tokens_per_pack: int, world: World) -> Tensor:
        """[B, T]: the teacher's log-probs of the responses at their temperatures; each rank scores its share."""
        texts, device = tables.texts, tables.device
        scores = torch.zeros(texts.tokens.shape, dtype=self.reference.policy.dtype, device=device)
        batches = micro_batches(texts, range(len(texts.prompts)), tokens_per_pack, shared=self.reference.policy.packing)
        for rows in batches[world.rank :: world.size]:
            channels = self.reference.score(texts, rows)
            scores[to_device(rows, device), : channels.logprobs.shape[1]] = channels.logprobs
        return world.sum_table(scores)

    def add_to(self, tables: Tables, scores: Tensor) -> Tables:
        """The tables with the teacher's advantage, token by token, beside that of the reward."""
        assert tables.advantages is not None
        dtype = tables.advantages.dtype
        gap = torch.where(tables.mask, scores.to(dtype) - tables.sampler_logprobs.to(dtype), 0.0)
        if self.settings.baseline == "problem":
            problem = tables.texts.siblings.to(gap.device)
            count, total = (
                ordered_sum(each, problem, tables.texts.problems)[problem].unsqueeze(1)
                for each in (tables.mask.sum(1).to(dtype), gap.sum(1))
            )
            gap = torch.where(tables.mask, gap - total / count.clamp(min=1), 0.0)
        own = torch.where(tables.mask, tables.advantages, 0.0)  # [B, 1] is spread over its tokens
        return replace(tables, advantages=self.settings.reward_weight * own + self.settings.weight * gap)


def reverse_kl(tables: Tables, scores: Tensor) -> float:
    """The mean over tokens of log pi - log teacher."""
    gap = (tables.sampler_logprobs.double() - scores.double())[tables.mask]
    return float(gap.mean()) if gap.numel() else float("nan")
