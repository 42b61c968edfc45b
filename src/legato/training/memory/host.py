"""The least bytes of host memory for the Python objects of a run: rollouts, problems, plans.

Each constant is at most two thirds of the bytes measured (of a rollout: 5,500 with a response of one token), so that a run
which does not fit by these numbers certainly does not fit.
"""

ROLLOUT = 2048
"""A rollout with a response of one token, its score and its place in a group."""
PROBLEM = 256
"""A problem made in code, without its prompt's tokens."""
PLACE = 24
"""A place in the order of an epoch."""
EXAMPLE = 512
"""Prompt and answer of a supervised example."""
PLANNED_UPDATE = 256
PLANNED_ROW = 8
"""A row number in a planned update."""
