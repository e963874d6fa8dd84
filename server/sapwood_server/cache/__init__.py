"""Pages, the prefix tree and eviction; page ids only, no torch."""
