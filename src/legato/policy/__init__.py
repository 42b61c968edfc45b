"""The trained model: tokens to log-probs, entropies and values `[B, T]`; packing, attention, LoRA, the reference."""
