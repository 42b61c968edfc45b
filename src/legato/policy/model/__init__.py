"""Where a policy comes from: loading, models built in code, adapters, the reference, the self-check."""
