"""The health watch: rules over the metrics of a run, the watch that applies them, and what they say in words."""
