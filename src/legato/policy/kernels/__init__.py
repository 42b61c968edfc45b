"""Kernels for one GPU, in Triton. Each has a plain-torch oracle in its tests and runs in Triton's interpreter on a CPU."""
