"""Tests of what a run directory shows to a person."""
