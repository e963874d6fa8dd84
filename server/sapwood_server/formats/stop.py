"""Stop strings, matched on the bytes of the generated text as they come."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of a request and what matching them needs, shared by all its choices. Nothing here changes."""

    def __init__(self, stops: Sequence[bytes]) -> None:
        """Raises ValueError for an empty stop string."""
        if not all(stops):
            raise ValueError(f"stop strings are {list(stops)}; accepted: non-empty ones")
        self.stops = tuple(stops)
        self.borders = tuple(_borders(stop) for stop in self.stops)
        """Per stop string and prefix of it, the length of the prefix's longest proper prefix that is also its suffix:
        where the automaton goes when the next byte does not match."""


class StopMatcher:
    """Finds the first of several stop strings in a byte stream and holds back what may be the beginning of one.

    The first is the one that is complete first; of several that complete at the same byte, the longest. So the result
    does not depend on how the stream is cut into tokens. Each stop string runs the Knuth-Morris-Pratt automaton:
    O(stop strings) per byte, whatever their length.
    """

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._lengths = [0] * len(strings.stops)
        """Per stop string, how many of its first bytes the stream ends with."""
        self._held = bytearray()
        """The last bytes of the stream that were not released: as many as the longest of `_lengths`, at least."""
        self.matched = False

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; return those that are now certain to be before any stop string.

        Once a stop string is complete, `matched` is set, everything before it has been returned, and the rest is
        dropped. Raises ValueError when called after that.
        """
        if self.matched:
            raise ValueError("the stream has ended at a stop string; nothing may follow")
        self._held += data
        pending = len(self._held) - len(data)
        for position, byte in enumerate(data, start=pending + 1):
            longest = self._advance(byte)
            if longest:
                self.matched = True
                return self._release(position - longest)
        return self._release(len(self._held) - max(self._lengths, default=0))

    def flush(self) -> bytes:
        """The stream ended without a stop string (or with one): what is still held back, once."""
        return b"" if self.matched else self._release(len(self._held))

    def _advance(self, byte: int) -> int:
        """Feed one byte to each automaton; the length of the longest stop string that it completes, or 0."""
        longest = 0
        for index, (stop, borders) in enumerate(zip(self._strings.stops, self._strings.borders, strict=True)):
            length = self._lengths[index]
            while length and stop[length] != byte:
                length = borders[length - 1]
            if stop[length] == byte:
                length += 1
            self._lengths[index] = length
            if length == len(stop):
                longest = max(longest, length)
        return longest

    def _release(self, count: int) -> bytes:
        released = bytes(self._held[:count])
        del self._held[:count]
        return released


def _borders(stop: bytes) -> tuple[int, ...]:
    """See `StopStrings.borders`."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[length] != stop[index]:
            length = borders[length - 1]
        if stop[length] == stop[index]:
            length += 1
        borders[index] = length
    return tuple(borders)
