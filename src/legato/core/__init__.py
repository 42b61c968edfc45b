"""The nouns everything else speaks in, the masked reductions, and the declaration of a part."""
