"""From hidden states to log-probs and entropies."""
