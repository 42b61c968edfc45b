"""Losses and gradients beside TRL and verl."""
