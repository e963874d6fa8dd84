"""K1 in Triton's interpreter: against the formula, and bit by bit against itself in other places and batches."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sapwood_kernels import reference
from sapwood_kernels import rope_kv_store as rope_kv_store_module
from sapwood_kernels.values import UNIT_SCALES, HeadNorms, KVScales
from support.isolated import run_isolated
from support.mutants import Mutant, survivors
from support.ops import assert_close, random_tensor
from support.scale import scaled

FP8 = torch.float8_e4m3fn
FP16 = torch.float16
DTYPES = ((FP16, FP16), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (FP16, FP8))
"""(of qkv, of kv)."""
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
HEADS = ((1, 1), (3, 1), (9, 3), (16, 2), (5, 5), (24, 1))
"""(num_heads, num_kv_heads)."""
SCALES = KVScales(0.37, 2.9)


def make_norms(head_dim: int) -> HeadNorms:
    return HeadNorms(random_tensor(head_dim, seed=2), random_tensor(head_dim, seed=3), 1e-2)


def poisoned(num_pages: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Pages of NaN, but for page 0, which is zero."""
    kv = torch.full((num_pages, 2, num_kv_heads, page_size, head_dim), float("nan")).to(dtype)
    kv[0] = 0
    return kv


def gathered(kv: Tensor, slots: Tensor) -> Tensor:
    """[num_tokens, 2, num_kv_heads, head_dim] in fp32."""
    page_size = kv.shape[3]
    return kv.float()[slots // page_size, :, :, slots % page_size]


def check_formula(
    module: ModuleType, dtypes: tuple[torch.dtype, torch.dtype], heads: tuple[int, int], head_dim: int, normed: bool
) -> None:
    """Queries and pages, in pages of NaN, with a token that has no slot; every other slot stays as it was."""
    dtype, kv_dtype = dtypes
    num_heads, num_kv_heads = heads
    qkv = random_tensor(5, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    cos_sin = random_tensor(5, head_dim, seed=1)
    slots = torch.tensor([31, -1, 50, 95, 64])
    norms = make_norms(head_dim) if normed else None
    scales = SCALES if kv_dtype == FP8 else UNIT_SCALES
    mine, theirs = (poisoned(6, num_kv_heads, 16, head_dim, kv_dtype) for _ in range(2))
    q = module.rope_kv_store(qkv, cos_sin, slots, mine, norms, scales)
    assert_close(q, reference.rope_kv_store(qkv, cos_sin, slots, theirs, norms, scales), factor=2)
    written = slots[slots != -1]
    if kv_dtype == FP8:
        # A sum in another order may round to the neighbour, which in e4m3 is up to an eighth away.
        differs = gathered(mine, written) != gathered(theirs, written)
        assert differs.float().mean() < 0.01
        assert torch.allclose(gathered(mine, written), gathered(theirs, written), rtol=0.126, atol=2**-9)
    else:
        assert_close(gathered(mine, written).to(kv_dtype), gathered(theirs, written).to(kv_dtype), factor=2)
    where = torch.ones(6 * 16, dtype=torch.bool)
    where[written] = False
    untouched = gathered(mine, where.nonzero()[:, 0])
    assert torch.equal(untouched[:16], torch.zeros(16, 2, num_kv_heads, head_dim)), "page 0"
    assert untouched[16:].isnan().all()


def check_scales(module: ModuleType, scales: KVScales) -> None:
    """fp16 pages, where a dropped scale shows as surely as in e4m3."""
    qkv, cos_sin, slots = random_tensor(3, 4 * 64, dtype=FP16), random_tensor(3, 64, seed=1), torch.tensor([16, 40, 33])
    mine, theirs = (poisoned(3, 1, 16, 64, FP16) for _ in range(2))
    module.rope_kv_store(qkv, cos_sin, slots, mine, None, scales)
    reference.rope_kv_store(qkv, cos_sin, slots, theirs, None, scales)
    assert_close(gathered(mine, slots).to(FP16), gathered(theirs, slots).to(FP16), factor=2)


def check_rows(module: ModuleType) -> None:
    """17 tokens, and each alone elsewhere: the same bits. Rows and pages lie apart, with NaN between them."""
    qkv = torch.full((17, 700), float("nan"), dtype=FP16)
    qkv[:, :640] = random_tensor(17, 640, dtype=FP16)
    cos_sin, norms = random_tensor(17, 128, seed=1)[:, :64], make_norms(64)
    # Dimensions [page_size, num_kv_heads, num_pages, 2, head_dim] in memory, and more room behind each head.
    kv = torch.full((16, 2, 4, 2, 96), float("nan"), dtype=FP16).permute(2, 3, 1, 0, 4)[..., :64]
    slots = 16 + torch.randperm(48, generator=torch.Generator().manual_seed(3))[:17]
    q = module.rope_kv_store(qkv[:, :640], cos_sin, slots, kv, norms)
    for token in range(17):
        other, row = poisoned(2, 2, 64, 64, FP16), slice(token, token + 1)
        alone = module.rope_kv_store(qkv[row, :640], cos_sin[row], torch.tensor([64 + token]), other, norms)
        assert torch.equal(alone, q[row])
        assert torch.equal(gathered(other, torch.tensor([64 + token])), gathered(kv, slots[row]))


@pytest.mark.parametrize("number", range(scaled(84, 7)))
def test_matrix(number: int) -> None:
    """7 head dims, 6 head counts and 4 dtypes; each is met with and without norms over the heads."""
    normed = number // 2 % 2 == 0
    check_formula(
        rope_kv_store_module, DTYPES[number % 4 if number % 2 else number // 3 % 4], HEADS[number % 6],
        HEAD_DIMS[number % 7], normed,
    )  # fmt: skip


@pytest.mark.parametrize("scales", [KVScales(0.37, 2.9), KVScales(2.9, 0.37), KVScales(key=2.9), KVScales(value=0.37)])
def test_scales_divide_what_is_stored(scales: KVScales) -> None:
    check_scales(rope_kv_store_module, scales)


def test_a_token_does_not_depend_on_the_others_nor_on_its_slot() -> None:
    check_rows(rope_kv_store_module)


@settings(max_examples=scaled(20, 3))
@given(
    page_size=st.sampled_from((16, 32, 64)),
    order=st.permutations(range(20)),
    head_dim=st.sampled_from((64, 80, 112)),
    seed=st.integers(0, 99),
)
def test_what_is_stored_is_found_where_the_table_says(
    page_size: int, order: list[int], head_dim: int, seed: int
) -> None:
    """Token p of a sequence is in slot p % page_size of page pages[p // page_size], for any pages in any order."""
    pages = torch.tensor([1 + page for page in order if page < 3])
    num_tokens = page_size + order[0] + 1
    position = torch.arange(num_tokens)
    slots = pages[position // page_size] * page_size + position % page_size
    kv = poisoned(4, 1, page_size, head_dim, FP16)
    qkv = random_tensor(num_tokens, 3 * head_dim, dtype=FP16, seed=seed)
    cos_sin = torch.cat((torch.ones(num_tokens, head_dim // 2), torch.zeros(num_tokens, head_dim // 2)), dim=1)
    rope_kv_store_module.rope_kv_store(qkv, cos_sin, slots, kv, None)
    tokens = kv[pages].permute(1, 2, 0, 3, 4).reshape(2, -1, head_dim)[:, :num_tokens]
    assert torch.equal(tokens, qkv.view(num_tokens, 3, head_dim)[:, 1:].transpose(0, 1))


def check_e4m3(module: ModuleType, step: int) -> None:
    """Each `step`th fp16 number, ties between neighbours among them, saturating as the formula does; NaN stays NaN.

    Not infinity, nor signalling NaN: numpy warns where the interpreter multiplies them, as it rotates values in vain.
    """
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(FP16)
    x = x.where(~x.isinf(), 65504).where(~x.isnan(), float("nan"))[::step]
    num_tokens = len(x) // 1024
    qkv = torch.cat((torch.zeros(num_tokens, 2048, dtype=FP16), x[: num_tokens * 1024].view(-1, 1024)), dim=1)
    slots = torch.arange(64, 64 + num_tokens)
    mine, theirs = (torch.zeros(2, 2, 16, 64, 64).to(FP8) for _ in range(2))
    module.rope_kv_store(qkv, torch.zeros(num_tokens, 64), slots, mine, None)
    reference.rope_kv_store(qkv, torch.zeros(num_tokens, 64), slots, theirs, None)
    assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_e4m3_is_rounded_to_even_and_saturates() -> None:
    check_e4m3(rope_kv_store_module, 1)


def test_nothing_is_stored_in_page_0_nor_outside_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where slots are not looked at before the launch."""
    monkeypatch.setattr(rope_kv_store_module, "check_indices", lambda *arguments: None)
    memory = torch.full((8, 2, 1, 16, 64), float("nan"), dtype=FP16)
    qkv, cos_sin = random_tensor(7, 192, dtype=FP16), random_tensor(7, 64)
    slots = torch.tensor([0, 15, -1, -16, 64, 100, 17])
    q = rope_kv_store_module.rope_kv_store(qkv, cos_sin, slots, memory[2:6], None)
    assert not q.isnan().any()
    assert not memory[3, :, :, 1].isnan().any()
    memory[3, :, :, 1] = float("nan")
    assert memory.isnan().all()


def test_no_tokens() -> None:
    q = rope_kv_store_module.rope_kv_store(
        torch.empty(0, 192), torch.empty(0, 64), torch.empty(0, dtype=torch.int64), torch.zeros(2, 2, 1, 16, 64), None
    )
    assert q.shape == (0, 1, 64)


def check_far_pages() -> None:
    """The last page of a pool of more than 2 ** 31 elements, in keys and in values."""
    kv = torch.empty(2**31 // 2048 + 3, 2, 1, 16, 64, dtype=FP16)
    few = torch.zeros(3, 2, 1, 16, 64, dtype=FP16)
    qkv, cos_sin, norms = random_tensor(2, 192, dtype=FP16), random_tensor(2, 64), make_norms(64)
    slots = torch.tensor([47, 33])
    rope_kv_store_module.rope_kv_store(qkv, cos_sin, slots, few, norms)
    rope_kv_store_module.rope_kv_store(qkv, cos_sin, slots + (kv.shape[0] - 3) * 16, kv, norms)
    assert torch.equal(kv[-1, :, :, [1, 15]], few[-1, :, :, [1, 15]])


def check_far_values() -> None:
    """Keys and values that lie 2 ** 31 elements apart."""
    kv = torch.empty(2**31 + 2**20, dtype=FP16).as_strided((4, 2, 1, 16, 64), (1024, 2**31, 1024, 64, 1))
    qkv, cos_sin = random_tensor(1, 192, dtype=FP16), random_tensor(1, 64)
    rope_kv_store_module.rope_kv_store(qkv, cos_sin, torch.tensor([63]), kv, None)
    assert torch.equal(kv[3, 1, 0, 15], qkv[0, 128:])


def check_far_rows() -> None:
    """Rows of qkv more than 2 ** 31 elements apart."""
    qkv = torch.empty(2**31 + 384, dtype=FP16).as_strided((2, 192), (2**31 + 192, 1))
    qkv[:] = random_tensor(2, 192, dtype=FP16)
    mine, theirs = (poisoned(2, 1, 16, 64, FP16) for _ in range(2))
    slots = torch.tensor([16, 17])
    q = rope_kv_store_module.rope_kv_store(qkv, torch.ones(2, 64), slots, mine, None)
    assert torch.equal(q, rope_kv_store_module.rope_kv_store(qkv.clone(), torch.ones(2, 64), slots, theirs, None))
    assert torch.equal(gathered(mine, slots), gathered(theirs, slots))


def check_far() -> None:
    check_far_pages()
    check_far_values()
    check_far_rows()


def test_offsets_past_2_31_elements() -> None:
    run_isolated(check_far)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv": torch.zeros(4, 2, 2, 16, 64)}, r"0 query heads over 2 key-value heads"),
        ({"kv": torch.zeros(4, 1, 1, 16, 64)}, "kv has shape"),
        ({"kv": torch.zeros(4, 2, 1, 16, 64, dtype=torch.int8)}, "kv is torch.int8; accepted"),
        ({"kv": torch.zeros(4, 2, 1, 16, 33)}, "kv has head_dim 33; accepted: an even number from 2 to 256"),
        ({"kv": torch.zeros(4, 2, 1, 16, 512)}, "kv has head_dim 512"),
        ({"kv": torch.zeros(4, 2, 1, 64, 16).mT}, "kv has strides"),
        ({"qkv": torch.zeros(2, 255)}, "qkv has 255 columns; accepted: a multiple of head_dim, 64"),
        ({"qkv": torch.zeros(2, 256, dtype=torch.float64)}, "qkv is torch.float64"),
        ({"qkv": torch.zeros(256, 2).T}, "qkv has strides"),
        ({"cos_sin": torch.zeros(2, 32)}, "cos_sin has shape"),
        ({"cos_sin": torch.zeros(2, 64, dtype=FP16)}, "cos_sin is torch.float16"),
        ({"slots": torch.tensor([16])}, "slots has shape"),
        ({"slots": torch.tensor([16, 17], dtype=torch.int32)}, "slots is torch.int32"),
        ({"slots": torch.tensor([16, 15])}, "slots holds 15 to 16; accepted: 16 to 63"),
        ({"slots": torch.tensor([-2, 16])}, "slots holds -2 to 16"),
        ({"slots": torch.tensor([64, 16])}, "slots holds 16 to 64"),
        ({"slots": torch.zeros(2, dtype=torch.int64, device="meta")}, "slots is on meta"),
        ({"head_norms": HeadNorms(torch.ones(32), torch.ones(64), 1e-6)}, "query norm has shape"),
        ({"head_norms": HeadNorms(torch.ones(64), torch.ones(64, dtype=FP16), 1e-6)}, "key norm is torch.float16"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    arguments = {
        "qkv": torch.zeros(2, 256),
        "cos_sin": torch.zeros(2, 64),
        "slots": torch.tensor([16, 17]),
        "kv": torch.zeros(4, 2, 1, 16, 64),
        "head_norms": None,
    }
    with pytest.raises(ValueError, match=message):
        rope_kv_store_module.rope_kv_store(**arguments | change)


MUTANTS = [
    Mutant("sapwood_kernels.rope_kv_store", old=old, new=new)
    for old, new in (
        ("(slot >= PAGE_SIZE) &", "(slot >= -PAGE_SIZE) &"),
        ("slot // PAGE_SIZE * page_stride", "(slot // PAGE_SIZE - 1) * page_stride"),
        ("slot % PAGE_SIZE * slot_stride", "slot % PAGE_SIZE * HALF * 2"),
        ("is_value.to(tl.int64) * kind_stride", "is_value.to(tl.int64) * kv_head_stride"),
        ("in_half = dims < HALF", "in_half = dims < PADDED_HALF"),
        ("tl.where(is_value, first, rotated_first)", "rotated_first"),
        ("tl.where(is_value, value_scale, key_scale)", "tl.where(is_value, key_scale, value_scale)"),
        ("tl.where(is_query, query, key)", "query"),
        ("turned_second * cos + turned_first * sin", "turned_second * cos - turned_first * sin"),
        ("squares / (2 * HALF)", "squares / (2 * PADDED_HALF)"),
        ("0x7FFFF + ((bits >> 20) & 1)", "0x7FFFF"),
        ("tl.where(x != x, 127, number)", "number"),
        ("qkv + token * qkv_stride", "qkv + token * (NUM_HEADS + 2 * NUM_KV_HEADS) * 2 * HALF"),
    )
]


def checks(module: ModuleType) -> None:
    check_formula(module, (FP16, FP16), (3, 1), 80, normed=True)
    check_scales(module, SCALES)
    check_rows(module)
    check_e4m3(module, 7)


def test_the_checks_notice_a_broken_kernel() -> None:
    assert survivors(MUTANTS[: scaled(len(MUTANTS), 2)], checks) == []
