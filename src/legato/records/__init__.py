"""The run directory: its format, its files of lines, reading and following them."""
