"""What a run needs on which GPUs, from a model's configuration alone: memory, time, and what to change so that it fits.

Nothing is loaded and nothing runs on a GPU. Memory comes from the formulas of `training/memory`; times from the roofline and
from factors that were measured (`measured.json`). A figure made of these is "calculated"; only a stored result of a machine
is "measured".
"""
