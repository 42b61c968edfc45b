"""Scoring finished rollouts. So far: shaping by length; verifiers come with the trainer."""
