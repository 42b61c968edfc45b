"""Measurements on one GPU: heads, updates, decoding, numerics, memory, whole steps."""
