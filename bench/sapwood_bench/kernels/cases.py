"""What attention is measured on: batches of real models' shapes. No tensors here."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Heads:
    """The heads of a model's attention."""

    model: str
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads to a key-value head."""
        return self.num_heads // self.num_kv_heads


LLAMA_8B = Heads("Llama-3.1-8B", 32, 8, 128)
QWEN_30B = Heads("Qwen3-30B-A3B", 32, 4, 128)
MHA = Heads("MHA", 32, 32, 128)
HEADS_OF_64 = Heads("head dim 64", 32, 8, 64)
HEADS_OF_256 = Heads("head dim 256", 16, 4, 256)


@dataclass(frozen=True)
class SharedRows:
    """Decode rows whose first tokens lie in the same pages."""

    first_row: int
    num_rows: int
    num_keys: int
    """A multiple of the page size."""


@dataclass(frozen=True)
class Chunk:
    """Some of a prompt's tokens, the last `num_queries` of `num_keys`."""

    num_queries: int
    num_keys: int

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        return self.num_queries * (self.num_keys - self.num_queries) + self.num_queries * (self.num_queries + 1) // 2


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """One batch: decode rows, prefill chunks, or both. Dtypes are torch's names."""

    name: str
    heads: Heads = LLAMA_8B
    page_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    """None: `dtype`."""
    decode: tuple[int, ...] = ()
    """Keys of each decode row, its own token included."""
    prefill: tuple[Chunk, ...] = ()
    shared: tuple[SharedRows, ...] = ()
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    flex: bool = False
    """Compare with compiled flex_attention too, which takes some ten seconds to compile for each shape."""

    @property
    def is_plain(self) -> bool:
        """Whether torch has the same attention: no window, cap or sinks, and no 8 bits."""
        return self.window is None and self.softcap is None and not self.sinks and self.kv_dtype in (None, self.dtype)


@dataclass(frozen=True, kw_only=True)
class PointwiseCase:
    """One call of an op that is bound by memory."""

    op: str
    num_rows: int


THOUSAND = 1024
"""Lengths are in units of it: 8k is 8,192."""
VOCABULARY = 151_936
"""Of Qwen3, padded."""
RAGGED = (64, 200, 1000, 2049, 4096, 517, 8192, 33, 3000, 128, 16384, 77, 1500, 6000, 255, 12000)
"""Sixteen rows of very different lengths, 55,495 keys in all."""


def _k(thousands: int) -> int:
    return thousands * THOUSAND


def _rows(count: int, thousands: int) -> tuple[int, ...]:
    return (_k(thousands),) * count


def decode_cases() -> tuple[AttentionCase, ...]:
    """One query a row. Those that a target rests on come first."""
    batches = ((64, 4), (1, 128), (32, 4), (128, 2), (256, 1), (8, 4), (1, 8))
    cases = [AttentionCase(name=f"decode {b} x {k}k", decode=_rows(b, k), flex=(b, k) == (32, 4)) for b, k in batches]
    big = AttentionCase(name="decode 32 x 4k", decode=_rows(32, 4))
    for heads in (QWEN_30B, MHA, HEADS_OF_64, HEADS_OF_256):
        cases.append(replace(big, name=f"decode 32 x 4k, {heads.model}", heads=heads))
    cases += [
        replace(big, name="decode 32 x 4k, pages of 64", page_size=64),
        replace(big, name="decode 32 x 4k, e4m3", kv_dtype="float8_e4m3fn"),
        AttentionCase(name="decode 16 ragged", decode=RAGGED),
    ]
    return tuple(cases)


def prefill_cases() -> tuple[AttentionCase, ...]:
    """Many queries a sequence: whole prompts, new tokens after a cached context, a chunk of a long prompt."""

    def case(count: int, queries: int, context: int = 0, heads: Heads = LLAMA_8B) -> AttentionCase:
        size = f"{queries // THOUSAND}k" if queries >= THOUSAND else str(queries)
        name = f"prefill {count} x {size}" if not context else f"extend {size} on {context // THOUSAND}k"
        if heads is not LLAMA_8B:
            name += f", {heads.model}"
        flex = (count, queries, context) == (1, _k(8), 0) and heads is LLAMA_8B
        return AttentionCase(name=name, heads=heads, prefill=(Chunk(queries, context + queries),) * count, flex=flex)

    return (
        case(1, _k(8)),
        case(1, _k(2)),
        case(4, _k(4)),
        case(16, _k(1)),
        case(1, 512, _k(4)),
        case(1, 512, _k(32)),
        case(1, _k(2), _k(16)),
        *(case(1, _k(8), heads=heads) for heads in (QWEN_30B, MHA, HEADS_OF_64, HEADS_OF_256)),
        AttentionCase(name="mixed: 60 decode at 4k, chunk of 2k", decode=_rows(60, 4), prefill=(Chunk(_k(2), _k(2)),)),
    )


def shared_cases() -> tuple[AttentionCase, ...]:
    """Decode rows of 256 tokens of their own after a shared prefix; the last has two groups and rows of no group."""
    cases = []
    for prefix in (_k(4), 512, _k(32)):
        for num_rows in (64, 8, 128):
            cases.append(
                AttentionCase(
                    name=f"shared {prefix // THOUSAND}k x {num_rows}"
                    if prefix >= THOUSAND
                    else f"shared 512 x {num_rows}",
                    decode=(prefix + 256,) * num_rows,
                    shared=(SharedRows(0, num_rows, prefix),),
                )
            )
    two = AttentionCase(
        name="shared, two groups: 2k x 24, 6k x 24, 16 alone at 2k",
        decode=(_k(2) + 256,) * 24 + (_k(6) + 256,) * 24 + _rows(16, 2),
        shared=(SharedRows(0, 24, _k(2)), SharedRows(24, 24, _k(6))),
    )
    none = AttentionCase(name="shared by nobody: 64 x 2k", decode=_rows(64, 2))
    return (*cases, two, none)


def feature_cases() -> tuple[AttentionCase, ...]:
    """For correctness alone: what models ask of attention besides, over every head dim and some groups and dtypes."""
    decode = (1, 15, 16, 17, 257, 1000, 0, 3000)
    prefill = (Chunk(1, 1), Chunk(7, 300), Chunk(130, 130), Chunk(33, 2000))
    base = AttentionCase(name="features", decode=decode, prefill=prefill)
    cases = []
    for head_dim, group in ((64, 3), (80, 1), (96, 5), (112, 7), (128, 8), (192, 16), (256, 4), (128, 32)):
        heads = Heads(f"head dim {head_dim}, group {group}", 2 * group, 2, head_dim)
        cases.append(replace(base, name=f"correct: {heads.model}", heads=heads))
    cases += [
        replace(base, name="correct: window 100", window=100),
        replace(base, name="correct: softcap 30", softcap=30.0),
        replace(base, name="correct: sinks", sinks=True),
        replace(base, name="correct: window 128 and sinks, pages of 32", window=128, sinks=True, page_size=32),
        replace(base, name="correct: float16", dtype="float16"),
        replace(base, name="correct: float32", dtype="float32"),
        replace(base, name="correct: e4m3", kv_dtype="float8_e4m3fn"),
        replace(
            base, name="correct: e4m3, float16, pages of 64", dtype="float16", kv_dtype="float8_e4m3fn", page_size=64
        ),
    ]
    return tuple(cases)


def quick(cases: tuple[AttentionCase, ...]) -> tuple[AttentionCase, ...]:
    """The first, which a target rests on, and the last, which is the least like it."""
    return cases[0], cases[-1]


def tiny(case: AttentionCase) -> AttentionCase:
    """The same case small enough for Triton's interpreter: fp16, head dim 64, two key-value heads, a few pages.

    Groups up to 2, up to three decode rows and two chunks; prefixes stay shared by the rows that are left.
    """
    heads = Heads(case.heads.model, 2 * min(case.heads.group, 2), 2, 64)
    prefix = 2 * max(case.page_size, 32)
    decode = tuple(min(keys, prefix + 5) for keys in case.decode[:3])
    shared = tuple(
        SharedRows(each.first_row, min(each.num_rows, len(decode) - each.first_row), prefix)
        for each in case.shared
        if each.first_row < len(decode)
    )
    prefill = tuple(_tiny_chunk(chunk) for chunk in case.prefill[:2])
    return replace(case, heads=heads, dtype="float16", decode=decode, prefill=prefill, shared=shared, flex=False)


def _tiny_chunk(chunk: Chunk) -> Chunk:
    num_queries = min(chunk.num_queries, 20)
    return Chunk(num_queries, num_queries + min(chunk.num_keys - chunk.num_queries, 30))
