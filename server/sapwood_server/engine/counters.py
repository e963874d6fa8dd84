"""What the engine has done since its start."""

from __future__ import annotations

from dataclasses import dataclass

from sapwood_server.engine.sequence import SequenceState


@dataclass
class Counters:
    """Running totals; the names and units are those of `EngineStats`."""

    steps: int = 0
    preemptions: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    recomputed_tokens: int = 0
    generation_tokens: int = 0

    def count_computed(self, sequence: SequenceState, start: int, end: int) -> None:
        """Positions `[start, end)` of `sequence` were computed. Each counts once as prompt (or not at all, past the
        prompt); again is recompute, which is never a hit nor a miss."""
        owner = sequence.owner
        seen = sequence.num_seen
        if start < seen:
            again = min(end, seen) - start
            owner.recomputed_tokens += again
            self.recomputed_tokens += again
        if seen < owner.num_prompt_tokens and end > seen:
            prompt = min(end, owner.num_prompt_tokens) - max(start, seen)
            owner.computed_tokens += prompt
            self.prompt_tokens_computed += prompt
        sequence.num_seen = max(seen, end)
