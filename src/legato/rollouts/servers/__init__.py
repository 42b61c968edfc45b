"""Clients of HTTP servers that sample: `legato serve`, and vLLM, whose words for tokens and weights it shares."""
