"""What the bytes of a ggml block stand for, one number at a time, after ggml's definitions (`ggml-quants.c`)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence

Block = Sequence[int]
"""Its bytes."""


def _half(block: Block, at: int) -> float:
    value: float = struct.unpack("<e", bytes(block[at : at + 2]))[0]
    return value


def _signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def _nibbles(data: Block) -> list[int]:
    """All low halves, then all high ones."""
    return [byte & 15 for byte in data] + [byte >> 4 for byte in data]


def _fifth_bits(data: Block) -> list[int]:
    bits = int.from_bytes(bytes(data), "little")
    return [bits >> index & 1 for index in range(32)]


def q8_0(block: Block) -> Iterator[float]:
    yield from (_half(block, 0) * _signed(byte) for byte in block[2:34])


def q4_0(block: Block) -> Iterator[float]:
    yield from (_half(block, 0) * (quant - 8) for quant in _nibbles(block[2:18]))


def q4_1(block: Block) -> Iterator[float]:
    yield from (_half(block, 0) * quant + _half(block, 2) for quant in _nibbles(block[4:20]))


def q5_0(block: Block) -> Iterator[float]:
    quants = zip(_nibbles(block[6:22]), _fifth_bits(block[2:6]), strict=True)
    yield from (_half(block, 0) * (low + 16 * high - 16) for low, high in quants)


def q5_1(block: Block) -> Iterator[float]:
    quants = zip(_nibbles(block[8:24]), _fifth_bits(block[4:8]), strict=True)
    yield from (_half(block, 0) * (low + 16 * high) + _half(block, 2) for low, high in quants)


def _scales_and_minima(packed: Block) -> list[tuple[int, int]]:
    """Eight pairs of 6-bit numbers in 12 bytes."""
    pairs = [(packed[j] & 63, packed[j + 4] & 63) for j in range(4)]
    for j in range(4, 8):
        scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6 << 4)
        pairs.append((scale, (packed[j + 4] >> 4) | (packed[j] >> 6 << 4)))
    return pairs


def q4_k(block: Block) -> Iterator[float]:
    for group, (scale, minimum) in enumerate(_scales_and_minima(block[4:16])):
        data = block[16 + 32 * (group // 2) :][:32]
        quants = [byte >> 4 if group % 2 else byte & 15 for byte in data]
        yield from (_half(block, 0) * scale * quant - _half(block, 2) * minimum for quant in quants)


def q5_k(block: Block) -> Iterator[float]:
    for group, (scale, minimum) in enumerate(_scales_and_minima(block[4:16])):
        data = block[48 + 32 * (group // 2) :][:32]
        for byte, high in zip(data, block[16:48], strict=True):
            quant = (byte >> 4 if group % 2 else byte & 15) + 16 * (high >> group & 1)
            yield _half(block, 0) * scale * quant - _half(block, 2) * minimum


def q6_k(block: Block) -> Iterator[float]:
    for index in range(256):
        half, quarter, place = index // 128, index % 128 // 32, index % 32
        low = block[64 * half + 32 * (quarter % 2) + place]
        low = low >> 4 if quarter > 1 else low & 15
        high = block[128 + 32 * half + place] >> 2 * quarter & 3
        scale = _signed(block[192 + 8 * half + 2 * quarter + place // 16])
        yield _half(block, 208) * scale * (low + 16 * high - 32)


BLOCKS: dict[str, tuple[int, Callable[[Block], Iterator[float]]]] = {
    "Q8_0": (34, q8_0),
    "Q4_0": (18, q4_0),
    "Q4_1": (20, q4_1),
    "Q5_0": (22, q5_0),
    "Q5_1": (24, q5_1),
    "Q4_K": (144, q4_k),
    "Q5_K": (176, q5_k),
    "Q6_K": (210, q6_k),
}
"""By type: the bytes of a block, and its numbers."""


def numbers(data: bytes, kind: str) -> list[float]:
    """Those of all blocks."""
    size, read = BLOCKS[kind]
    return [value for start in range(0, len(data), size) for value in read(data[start : start + size])]
