"""`legato serve`: an engine as an HTTP server with the endpoints of OpenAI's API and of vLLM."""
