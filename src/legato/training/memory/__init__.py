"""What a step needs of memory, and whether it fits."""
