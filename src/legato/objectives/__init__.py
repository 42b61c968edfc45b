"""Ratio, trust region, corrections, penalties and aggregation as small parts, and how they compose into a loss."""

from legato.objectives import adaptive, aggregates, clips, corrections, gates, masks, penalties, ratios

__all__ = ["adaptive", "aggregates", "clips", "corrections", "gates", "masks", "penalties", "ratios"]
