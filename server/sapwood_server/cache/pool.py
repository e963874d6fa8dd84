"""The fixed set of KV pages, and which of them are free."""

from __future__ import annotations

from sapwood_server.cache.integrity import require


class PagePool:
    """Page ids `1 .. num_pages - 1`; page 0 is reserved, all zeros, and never handed out.

    The pool knows only free from taken. Free pages are reused last in, first out, from page 1 upwards at the start:
    a page used a moment ago is the likeliest to be warm in the processor's caches.
    """

    def __init__(self, num_pages: int) -> None:
        """`num_pages` counts page 0. Raises ValueError if no page is left to hand out."""
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; accepted: at least 2, as page 0 is reserved")
        self._free = list(range(num_pages - 1, 0, -1))
        self._is_free = bytearray(b"\x00" + b"\x01" * (num_pages - 1))
        self.num_usable = num_pages - 1
        """Pages that can be handed out at all."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A free page, or None if there is none."""
        if not self._free:
            return None
        page = self._free.pop()
        self._is_free[page] = 0
        return page

    def give_back(self, page: int) -> None:
        """Make `page` free. Raises ValueError unless it was taken."""
        if not 0 < page <= self.num_usable or self._is_free[page]:
            raise ValueError(f"page {page} is not taken (pages are 1 to {self.num_usable})")
        self._is_free[page] = 1
        self._free.append(page)

    def is_free(self, page: int) -> bool:
        return bool(self._is_free[page])

    def check(self) -> None:
        """Raise IntegrityError unless the free list holds each free page once, and never page 0."""
        require(len(set(self._free)) == len(self._free), f"a page is free twice: {self._free}")
        flagged = {page for page, flag in enumerate(self._is_free) if flag}
        require(set(self._free) == flagged, "free list and free flags differ")
        require(0 not in flagged, "page 0 is in the free list")
