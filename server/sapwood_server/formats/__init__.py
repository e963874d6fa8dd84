"""Token bytes, stop matching and the per-family formats; no torch."""
