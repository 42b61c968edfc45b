"""Ratio, trust region, corrections, penalties and aggregation as small parts, and how they compose into a loss."""

from legato.objectives import aggregates, clips, corrections, gates, masks, penalties, ratios

__all__ = ["aggregates", "clips", "corrections", "gates", "masks", "penalties", "ratios"]
