from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_server.cache.tokens import common_tokens, pack_tokens
from support.digest_kv import common_prefix, unpack
from support.scale import scaled

# Ids whose bytes are shifted, swapped or prefixes of one another: comparing bytes where tokens are meant fails.
_LOOKALIKES = st.sampled_from([0, 1, 255, 256, 257, 65536, 65537, 1 << 24, (1 << 24) + 1, (1 << 32) - 1])


def test_packs_big_endian_words() -> None:
    assert pack_tokens((1, 258, 49151)) == bytes([0, 0, 0, 1, 0, 0, 1, 2, 0, 0, 0xBF, 0xFF])


@given(a=st.lists(_LOOKALIKES), b=st.lists(_LOOKALIKES))
@settings(max_examples=scaled(1000, 50))
def test_byte_order_is_token_order(a: list[int], b: list[int]) -> None:
    assert (pack_tokens(a) < pack_tokens(b)) == (a < b)
    assert list(unpack(pack_tokens(a))) == a


@given(shared=st.lists(_LOOKALIKES, max_size=300), a=st.lists(_LOOKALIKES), b=st.lists(_LOOKALIKES))
@settings(max_examples=scaled(1000, 50))
def test_common_tokens_counts_whole_equal_tokens(shared: list[int], a: list[int], b: list[int]) -> None:
    left, right = shared + a, shared + b
    assert common_tokens(pack_tokens(left), pack_tokens(right)) == common_prefix(left, right)


@pytest.mark.parametrize("position", [0, 1, 63, 64, 65, 4_000, 99_999])
def test_common_tokens_of_long_runs(position: int) -> None:
    ids = list(range(100_000))
    other = list(ids)
    other[position] ^= 1 << 31
    assert common_tokens(pack_tokens(ids), pack_tokens(other)) == position


def test_an_id_that_is_no_word_is_refused() -> None:
    with pytest.raises(OverflowError):
        pack_tokens([-1])
