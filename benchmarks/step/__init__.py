"""Whole steps beside TRL on a CPU."""
