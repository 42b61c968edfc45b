"""The learning rate of adapters: about ten times that of all weights (LoRA Without Regret)."""

FACTOR = 10
ORIGIN = f"policy.lora: {FACTOR} times the default of all weights"
"""The origin of a learning rate that follows from `policy.lora`."""
LOWEST_USUAL = 5e-6
"""A lower learning rate of adapters looks like one for all weights."""
