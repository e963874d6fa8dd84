"""Token ids as bytes: how the tree stores, hashes and compares them."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

TOKEN_BYTES = 4

_XOR_BYTES = 256
"""Below this length one big-integer XOR finds the first difference faster than further halving."""


def pack_tokens(ids: Sequence[int]) -> bytes:
    """Ids as unsigned big-endian 32-bit words, so that byte order is token order.

    Equal bytes are equal tokens: a lookup keyed by them can't be fooled by a hash collision. Raises OverflowError for
    an id outside `[0, 2**32)`.
    """
    words = array("I", ids)
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


def common_tokens(a: bytes, b: bytes) -> int:
    """Number of leading tokens that two packed runs share; O(shared bytes), at the speed of memcmp."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size // TOKEN_BYTES
    low, high = 0, size  # a[:low] == b[:low], and the first difference lies in [low, high)
    while high - low > _XOR_BYTES:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    difference = int.from_bytes(a[low:high], "big") ^ int.from_bytes(b[low:high], "big")
    return (high - (difference.bit_length() + 7) // 8) // TOKEN_BYTES
