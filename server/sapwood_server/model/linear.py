"""Linear layers over a weight matrix in the form that is fastest for the number of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sapwood_server.model.matrix import GROUP_SIZE, Matrix, PackedQ4

MAX_INT4_ROWS = 5
"""Up to this many rows 4-bit weights win, above it bf16 ones: measured at 1 to 16 rows on AVX512-BF16 and AMX."""

_PROBE_ROWS = (1, MAX_INT4_ROWS, 33)

FIXED_ROWS = 16
"""Rows of every product under `--deterministic`."""

_ROW_MULTIPLE = 16
"""`_weight_int4pack_mm_for_cpu` takes matrices of a multiple of this many rows."""


@dataclass(frozen=True)
class LinearForms:
    """What linears are made of: forms of weights besides plain ones (both multiply bf16), and the rows of a product."""

    blocked: bool
    int4: bool
    fixed_rows: bool = False
    """Whether a product has FIXED_ROWS rows, however many are asked for."""


PLAIN_FORMS = LinearForms(blocked=False, int4=False)


class Linear:
    """`y = x @ weight.T + bias`, weights as they are."""

    def __init__(self, dense: Tensor, bias: Tensor | None = None) -> None:
        self._dense = dense
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, K] -> [num_tokens, N]."""
        return functional.linear(x, self._dense, self._bias)


class BlockedLinear(Linear):
    """Weights in oneDNN's own order, made once: `functional.linear` makes it in every call, which at 1 to 16 rows is a
    third of its time, and at 256 a fifth."""

    def __init__(self, dense: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(dense, None), bias)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._dense, self._bias, "none", [], "")
        return y


class Int4Linear(Linear):
    """The checkpoint's own four bits a weight for few rows (groups' scales rounded to bf16), dense weights for more."""

    def __init__(self, many_rows: Linear, packed: PackedQ4, bias: Tensor | None = None) -> None:
        quants, self._scales = pack_int4(packed)
        super().__init__(quants, bias)
        self._many_rows = many_rows

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > MAX_INT4_ROWS:
            return self._many_rows(x)
        y = torch._weight_int4pack_mm_for_cpu(x, self._dense, GROUP_SIZE, self._scales)
        return y if self._bias is None else y.add_(self._bias)


class FixedRowsLinear(Linear):
    """Products of FIXED_ROWS rows, whatever the number of rows: what is missing in the last block is zeros.

    torch sums a row's products in another order when their number is another: of 1, 2, 4, 7, 64 and 100 rows some gave
    other bits than 16 in float32, bfloat16 and float16. Within 16 rows, a row's place and the other rows change none.
    """

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        blocks = torch.split(functional.pad(x, (0, 0, 0, -num_rows % FIXED_ROWS)), FIXED_ROWS)
        if len(blocks) == 1:
            return self._linear(blocks[0])[:num_rows]
        return torch.cat([self._linear(block) for block in blocks])[:num_rows]


def make_linear(matrix: Matrix, bias: Tensor | None, forms: LinearForms) -> Linear:
    """The fastest linear layer of a matrix that the forms allow."""
    linear = (BlockedLinear if forms.blocked else Linear)(matrix.dense, bias)
    if forms.fixed_rows:
        return FixedRowsLinear(linear)
    if forms.int4 and matrix.packed is not None and matrix.dense.shape[0] % _ROW_MULTIPLE == 0:
        return Int4Linear(linear, matrix.packed, bias)
    return linear


def pack_int4(packed: PackedQ4) -> tuple[Tensor, Tensor]:
    """What `_weight_int4pack_mm_for_cpu` takes: its own order of the quants, and bf16 [K / 32, N, 2] scales and zeros.

    It computes `(q - 8) * scale + zero`, so zero is the minimum plus 8 scales.
    """
    quants = torch._convert_weight_to_int4pack_for_cpu(packed.quants.to(torch.int32), 1)
    scales = torch.stack((packed.scale, packed.minimum + 8 * packed.scale), dim=-1)
    return quants, scales.transpose(0, 1).to(torch.bfloat16).contiguous()


def find_linear_forms() -> tuple[LinearForms, tuple[str, ...]]:
    """Tries each form on a tiny matrix: those that give the right numbers, and for each other one, why not."""
    generator = torch.Generator().manual_seed(0)
    quants = torch.randint(0, 16, (32, 64), generator=generator, dtype=torch.uint8)
    scales = torch.full((32, 2), 0.5)
    dense = (quants * 0.5 - 4.0).to(torch.bfloat16)
    packed = PackedQ4(quants, scales, -8 * scales)
    problems = {
        "blocked": find_problem(lambda: BlockedLinear(dense), dense),
        "int4": find_problem(lambda: Int4Linear(Linear(dense), packed), dense),
    }
    forms = LinearForms(blocked=problems["blocked"] is None, int4=problems["int4"] is None)
    return forms, tuple(f"{name}: {problem}" for name, problem in problems.items() if problem is not None)


def find_problem(make: Callable[[], Linear], dense: Tensor) -> str | None:
    """Why a form of the bf16 weights `dense` [N, K] can't be used: what torch says, or that numbers are wrong. None if
    it can. Few rows and many are tried, for torch takes other kernels for them."""
    x = torch.randn(_PROBE_ROWS[-1], dense.shape[1], generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    wanted = x.float() @ dense.float().T
    try:
        linear = make()
        right = [torch.allclose(linear(x[:rows]).float(), wanted[:rows], rtol=0.02, atol=0.5) for rows in _PROBE_ROWS]
    except (RuntimeError, AttributeError, TypeError) as error:  # TypeError: another torch, other arguments
        return " ".join(str(error).split())
    return None if all(right) else "wrong numbers"
