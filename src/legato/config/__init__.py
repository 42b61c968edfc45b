"""The options of a run: from files, words and Python values to one checked value."""
