"""The blocks of GGUF's 4-bit types of 32 columns taken apart, without loss, into integers and scales.

Layouts after ggml's `block_q4_0` and `block_q4_1`: a half-precision scale, for Q4_1 a half-precision minimum, then the
integers; byte j holds column j in its low half and column j + 16 in its high half.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from sapwood_server.model.matrix import GROUP_SIZE, PackedQ4

_HALF_BYTES = 2
_Q4_0_ZERO = 8
"""The integer of Q4_0 that stands for zero."""


def unpack_q4(rows: npt.NDArray[np.uint8], has_minimum: bool) -> PackedQ4:
    """Rows of Q4_1 (`has_minimum`) or Q4_0 blocks, uint8 [N, bytes of a row]."""
    header = 2 * _HALF_BYTES if has_minimum else _HALF_BYTES
    blocks = rows.reshape(rows.shape[0], -1, header + GROUP_SIZE // 2)
    nibbles = blocks[:, :, header:]
    quants = np.concatenate([nibbles & 0x0F, nibbles >> 4], axis=-1).reshape(rows.shape[0], -1)
    scale = _halves(blocks, 0)
    minimum = _halves(blocks, _HALF_BYTES) if has_minimum else scale * np.float32(-_Q4_0_ZERO)
    return PackedQ4(torch.from_numpy(quants), torch.from_numpy(scale), torch.from_numpy(minimum))


def _halves(blocks: npt.NDArray[np.uint8], start: int) -> npt.NDArray[np.float32]:
    """The half-precision numbers at byte `start` of each block, as fp32 [N, blocks of a row]."""
    stored = np.ascontiguousarray(blocks[:, :, start : start + _HALF_BYTES]).view("<f2")
    return stored[:, :, 0].astype(np.float32)
