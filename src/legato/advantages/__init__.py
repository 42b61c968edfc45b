"""From rewards to advantages: per response, per turn or per token; and the filters on samples."""

from legato.advantages import batch, filters, gae, group, pass_at_k, turns

__all__ = ["batch", "filters", "gae", "group", "pass_at_k", "turns"]
