"""Engines that turn prompts into rollouts, and how problems become prompts."""
