"""Decoder layers as fused parts on a GPU, and their twin on a CPU."""
