"""Sequences that come and go over a real cache, by hand; `check()` after every operation."""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_server.cache.manager import Admission, KVCacheManager
from sapwood_server.cache.table import BlockTable
from sapwood_server.cache.tokens import pack_tokens
from sapwood_server.cache.tree import Match


class Scene:
    """A cache whose pages hold 4 tokens unless said otherwise."""

    def __init__(self, num_pages: int, page_size: int = 4, prefix_cache: bool = True) -> None:
        """`num_pages` without the reserved one."""
        self.cache = KVCacheManager(num_pages + 1, page_size, prefix_cache=prefix_cache)

    def match(self, ids: Sequence[int], salt: str = "") -> Match:
        """What is resident of all of `ids`."""
        return self.cache.match(salt, pack_tokens(ids), len(ids))

    def resident(self, ids: Sequence[int], salt: str = "") -> int:
        return self.match(ids, salt).num_tokens

    def admit(self, ids: Sequence[int], salt: str = "") -> Admission:
        """Admit a sequence that reuses what it can of all but its last token."""
        tokens = pack_tokens(ids)
        match = self.cache.match(salt, tokens, len(ids) - 1)
        admission = self.cache.admit(salt, tokens, match)
        self.cache.check()
        return admission

    def compute(self, table: BlockTable, num_tokens: int) -> None:
        """One step that computes positions up to `num_tokens`."""
        self.cache.extend(table, num_tokens - table.num_written)
        self.cache.check()
        self.cache.end_step()
        self.cache.publish(table, num_tokens)
        self.cache.check()

    def grow(self, table: BlockTable, *ids: int) -> None:
        """Decode: draw and compute one token after the other."""
        for token_id in ids:
            table.append(token_id)
            self.compute(table, table.num_tokens)

    def start(self, ids: Sequence[int], salt: str = "") -> BlockTable:
        """Admit and compute all of a sequence, which goes on running."""
        table = self.admit(ids, salt).table
        self.compute(table, len(ids))
        return table

    def end(self, table: BlockTable) -> None:
        self.cache.release(table)
        self.cache.check()

    def fail(self, table: BlockTable, num_tokens: int) -> None:
        """One step that computes positions up to `num_tokens`, shows that they can't be trusted, and is the last."""
        self.cache.extend(table, num_tokens - table.num_written)
        self.cache.end_step()
        self.cache.distrust(table)
        self.cache.check()
        self.end(table)

    def run(self, ids: Sequence[int], salt: str = "") -> list[int]:
        """A sequence from beginning to end; returns its block table."""
        table = self.start(ids, salt)
        self.end(table)
        return table.pages

    @property
    def counts(self) -> tuple[int, int, int]:
        """Pages that are free, cached, active."""
        free, cached = self.cache.num_free, self.cache.num_cached
        return free, cached, self.cache.num_pages - free - cached
