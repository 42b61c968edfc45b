"""Tests and what they share; helpers are imported as `tests.proof`, `tests.policy` and so on."""
