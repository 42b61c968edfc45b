"""Tests and their shared helpers, which are imported as `tests.proof`, `tests.policy` and so on."""
