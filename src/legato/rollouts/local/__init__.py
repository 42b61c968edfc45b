"""The engine that samples from the weights being trained, in plain PyTorch."""
