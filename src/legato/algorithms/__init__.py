"""Named compositions of parts, with the defaults of their papers, and how to change a value by dotted path."""

from legato.algorithms import sequence_family, token_family

__all__ = ["sequence_family", "token_family"]
