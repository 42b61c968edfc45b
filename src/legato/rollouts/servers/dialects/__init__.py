"""The words of each kind of server: vLLM, SGLang, and `legato serve`."""
