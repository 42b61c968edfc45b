"""Tests of training, and their hand-made batches."""
