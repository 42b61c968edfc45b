"""Definitions of all metrics and how they are computed."""
