"""What a run directory shows to a person. It reads run directories and imports nothing that a run names."""
