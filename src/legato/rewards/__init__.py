"""Scoring finished rollouts: verifiers, rewards of an environment or of your own, their weighted sum, shaping by length."""
