"""Functions that may hang or crash, run in processes that can be killed."""
