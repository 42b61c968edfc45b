"""The experiment that decides whether the engine can equal the trainer to the bit, and at what cost."""
