"""Trials of what a run promises when the world is hostile: `make trust`, docs/trust.md."""
