"""Reference algorithms (hosts) to which tests add a correction, a selection or a penalty: GRPO, DAPO, GSPO and others."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.reference import aggregation, objectives, ratios
from tests.reference.batch import Batch, Result, Rows
from tests.reference.ratios import LogRatio


@dataclass(frozen=True, kw_only=True)
class Host:
    """A member taken apart: its aggregation, the level and limit of its ratio, and its clip."""

    aggregate: Callable[..., Rows]
    level: str
    limit: float | None
    clip: Callable[[Batch, Rows, LogRatio], Result]

    def log_ratio(self, batch: Batch, anchor: str = "old") -> LogRatio:
        """The token log-ratios as this host limits them."""
        return ratios.token_log_ratios(batch, anchor, self.limit)

    def under(self, batch: Batch, *fields: Rows, kept: set[int] | None = None, anchor: str = "old") -> Result:
        """The policy term with extra weights, against either anchor; with `kept`, denominators count only these rows."""
        weight = aggregation.times(batch, self.aggregate(batch, kept), *fields)
        return self.clip(batch, weight, self.log_ratio(batch, anchor))


HOSTS: dict[str, Host] = {
    "grpo": Host(
        aggregate=aggregation.sequence_mean,
        level="token",
        limit=ratios.LIMIT,
        clip=lambda batch, weight, log_ratio: objectives.clipped_tokens(batch, weight, log_ratio, 0.2, 0.2),
    ),
    "dapo": Host(
        aggregate=aggregation.group_token_mean,
        level="token",
        limit=ratios.LIMIT,
        clip=lambda batch, weight, log_ratio: objectives.clipped_tokens(batch, weight, log_ratio, 0.2, 0.28),
    ),
    "srpo": Host(
        aggregate=aggregation.token_mean,
        level="token",
        limit=ratios.LIMIT,
        clip=lambda batch, weight, log_ratio: objectives.clipped_tokens(batch, weight, log_ratio, 0.2, 0.2),
    ),
    "gspo": Host(
        aggregate=aggregation.sequence_mean,
        level="sequence",
        limit=None,
        clip=lambda batch, weight, log_ratio: objectives.clipped_segments(batch, weight, log_ratio, 3e-4, 4e-4),
    ),
    "turn-gspo": Host(
        aggregate=aggregation.sequence_mean,
        level="turn",
        limit=None,
        clip=lambda batch, weight, log_ratio: objectives.clipped_segments(batch, weight, log_ratio, 3e-4, 4e-4, "turn"),
    ),
    "luspo": Host(
        aggregate=aggregation.sequence_sum,
        level="sequence",
        limit=None,
        clip=lambda batch, weight, log_ratio: objectives.clipped_segments(batch, weight, log_ratio, 2e-3, 2.5e-3),
    ),
    "gmpo": Host(
        aggregate=aggregation.sequence_mean,
        level="sequence",
        limit=ratios.LIMIT,
        clip=objectives.log_clipped_tokens_then_mean,
    ),
}
