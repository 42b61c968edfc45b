"""Several processes as one world."""
