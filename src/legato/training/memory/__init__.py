"""How many bytes training needs, and whether they fit."""
