"""Messages to token ids and token bytes to text; no torch."""
