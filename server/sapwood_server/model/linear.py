"""Linear layers over a weight matrix in the form that is fastest for the number of rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sapwood_server.model.matrix import GROUP_SIZE, Matrix, PackedQ4

MAX_PACKED_ROWS = 6
"""Up to this many rows packed weights win, above it dense ones: measured at 1 to 16 rows with bf16 on AMX."""

_ROW_MULTIPLE = 16
"""`_weight_int4pack_mm_for_cpu` takes matrices of a multiple of this many rows."""


class Linear:
    """`y = x @ weight.T + bias` with dense weights."""

    def __init__(self, dense: Tensor, bias: Tensor | None = None) -> None:
        self.dense = dense
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, K] -> [num_tokens, N]."""
        return functional.linear(x, self.dense, self.bias)


class Int4Linear(Linear):
    """Four bits a weight for few rows (the groups' own scales, rounded to bf16), dense for many."""

    def __init__(self, dense: Tensor, packed: PackedQ4, bias: Tensor | None = None) -> None:
        super().__init__(dense, bias)
        self._quants, self._scales = pack_int4(packed)

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > MAX_PACKED_ROWS:
            return functional.linear(x, self.dense, self.bias)
        y = torch._weight_int4pack_mm_for_cpu(x, self._quants, GROUP_SIZE, self._scales)
        return y if self.bias is None else y.add_(self.bias)


class Int8Linear(Linear):
    """Eight bits a weight and one scale a row for few rows, dense for many."""

    def __init__(self, dense: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(dense, bias)
        self._quants, self._scales = pack_int8(dense)

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > MAX_PACKED_ROWS:
            return functional.linear(x, self.dense, self.bias)
        y = torch._weight_int8pack_mm(x, self._quants, self._scales)
        return y if self.bias is None else y.add_(self.bias)


def make_linear(matrix: Matrix, bias: Tensor | None, packed: bool) -> Linear:
    """The linear layer of a matrix. With `packed` (bf16 only), 4- and 8-bit checkpoints stay so for few rows."""
    if packed and matrix.packed is not None and matrix.dense.shape[0] % _ROW_MULTIPLE == 0:
        return Int4Linear(matrix.dense, matrix.packed, bias)
    if packed and matrix.int8 is not None:
        return Int8Linear(matrix.dense, bias)
    return Linear(matrix.dense, bias)


def pack_int4(packed: PackedQ4) -> tuple[Tensor, Tensor]:
    """What `_weight_int4pack_mm_for_cpu` takes: its own order of the quants, and bf16 [K / 32, N, 2] scales and zeros.

    It computes `(q - 8) * scale + zero`, so zero is the minimum plus 8 scales.
    """
    quants = torch._convert_weight_to_int4pack_for_cpu(packed.quants.to(torch.int32), 1)
    scales = torch.stack((packed.scale, packed.minimum + 8 * packed.scale), dim=-1)
    return quants, scales.transpose(0, 1).to(torch.bfloat16).contiguous()


def pack_int8(dense: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [N, K] quants and bf16 [N] scales of `dense`: each row's largest element becomes 127."""
    scales = (dense.abs().amax(dim=1).float() / 127).clamp_min(torch.finfo(torch.float32).tiny).to(torch.bfloat16)
    quants = (dense.float() / scales.float().unsqueeze(1)).round_().clamp_(-127, 127)
    return quants.to(torch.int8), scales


def packed_ops_problem() -> str | None:
    """Calls both packed ops once on a tiny matrix. None if they give the right numbers, else what went wrong."""
    generator = torch.Generator().manual_seed(0)
    quants = torch.randint(0, 16, (32, 64), generator=generator, dtype=torch.uint8)
    group = torch.full((32, 2), 0.5)
    dense = (quants * 0.5 - 4.0).to(torch.bfloat16)
    x = torch.randn(1, 64, generator=generator).to(torch.bfloat16)
    try:
        packed = Int4Linear(dense, PackedQ4(quants, group, -8 * group))(x)
        rows = Int8Linear(dense)(x)
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return " ".join(str(error).split())
    wanted = x.float() @ dense.float().T
    for name, found in (("int4", packed), ("int8", rows)):
        if not torch.allclose(found.float(), wanted, rtol=0.02, atol=0.5):
            return f"{name} products are wrong"
    return None
