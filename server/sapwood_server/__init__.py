"""The inference server: a paged engine with a token-exact prefix cache behind an OpenAI-compatible endpoint."""
