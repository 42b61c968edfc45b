"""A run: its configuration, from files and words to one checked value."""
