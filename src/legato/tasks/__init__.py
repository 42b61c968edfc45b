"""Where problems come from."""
