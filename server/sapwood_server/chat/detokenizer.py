"""From the bytes of generated tokens to text, never half a character."""

from __future__ import annotations

import codecs


class Detokenizer:
    """Decodes one choice's bytes as they come.

    A character whose bytes are not all there is held back. Bytes that can't be UTF-8, and what is left over at the
    end, become U+FFFD, one for each maximal ill-formed part (Unicode 15, section 3.9): the texts returned, joined, are
    the decoding of all bytes at once, however they were cut.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes, *, last: bool = False) -> str:
        """The text that `data` completes; with `last`, also what was held back."""
        return self._decoder.decode(data, last)
