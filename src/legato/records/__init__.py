"""The run directory: its format, and reading and writing its JSON-lines files."""
