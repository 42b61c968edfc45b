"""The same engine on a GPU: slots for keys and values, CUDA graphs, shared prompts."""
