"""The agent harness: an append-only loop over an OpenAI-compatible endpoint."""
