"""The step, its updates, the optimizer, evaluation and checkpoints."""
