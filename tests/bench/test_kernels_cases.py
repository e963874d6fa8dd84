"""Which shapes are measured."""

from __future__ import annotations

from sapwood_bench.kernels.accounting import attention_cost
from sapwood_bench.kernels.cases import (
    AttentionCase,
    Chunk,
    decode_cases,
    feature_cases,
    prefill_cases,
    quick,
    shared_cases,
    tiny,
)
from sapwood_bench.kernels.targets import DECODE_FROM_BYTES, PREFILL_CASE, SHARED_CASE
from sapwood_kernels.config_table import HEAD_DIMS

EVERY = (*decode_cases(), *prefill_cases(), *shared_cases(), *feature_cases())


def test_names_are_distinct() -> None:
    names = [case.name for case in EVERY]
    assert len(set(names)) == len(names)


def test_decode_batches() -> None:
    batches = {(len(case.decode), case.decode[0]) for case in decode_cases() if len(set(case.decode)) == 1}
    assert batches >= {(1, 8192), (1, 131072), (8, 4096), (32, 4096), (64, 4096), (128, 2048), (256, 1024)}
    assert {case.page_size for case in decode_cases()} == {16, 64}
    assert any(case.kv_dtype == "float8_e4m3fn" for case in decode_cases())
    assert {case.heads.head_dim for case in decode_cases()} == {64, 128, 256}
    assert {case.heads.group for case in decode_cases()} == {1, 4, 8}


def test_the_first_decode_case_is_one_that_the_target_holds_for() -> None:
    assert attention_cost(decode_cases()[0]).kv_bytes >= DECODE_FROM_BYTES


def test_prefill_batches() -> None:
    batches = {case.prefill for case in prefill_cases()}
    for count, queries, keys in (
        (1, 2048, 2048),
        (1, 8192, 8192),
        (4, 4096, 4096),
        (16, 1024, 1024),
        (1, 512, 4608),
        (1, 512, 33280),
        (1, 2048, 18432),
    ):
        assert (Chunk(queries, keys),) * count in batches
    mixed = prefill_cases()[-1]
    assert (mixed.decode, mixed.prefill) == ((4096,) * 60, (Chunk(2048, 2048),))
    assert prefill_cases()[0].name == PREFILL_CASE


def test_shared_prefixes() -> None:
    lone = {(case.shared[0].num_keys, len(case.decode)) for case in shared_cases() if len(case.shared) == 1}
    assert lone == {(prefix, rows) for prefix in (512, 4096, 32768) for rows in (8, 64, 128)}
    assert [len(case.shared) for case in shared_cases()][-2:] == [2, 0]
    assert shared_cases()[0].name == SHARED_CASE


def test_features_cover_every_head_dim_and_rule() -> None:
    cases = feature_cases()
    assert {case.heads.head_dim for case in cases} == set(HEAD_DIMS)
    assert {case.dtype for case in cases} == {"bfloat16", "float16", "float32"}
    for has in (lambda c: c.window, lambda c: c.softcap, lambda c: c.sinks, lambda c: c.kv_dtype):
        assert any(map(has, cases))


def test_a_tiny_case_keeps_what_makes_a_case_what_it_is() -> None:
    def kind(case: AttentionCase) -> tuple[object, ...]:
        return (bool(case.decode), bool(case.prefill), case.page_size, case.kv_dtype, case.window, case.sinks)

    for case in EVERY:
        small = tiny(case)
        assert kind(small) == kind(case)
        assert max([*small.decode, *(chunk.num_keys for chunk in small.prefill)]) <= 150
        assert all(each.num_keys % small.page_size == 0 for each in small.shared)
    assert tiny(shared_cases()[0]).shared[0].num_rows == 3


def test_quick_is_the_first_and_the_last() -> None:
    assert quick(prefill_cases()) == (prefill_cases()[0], prefill_cases()[-1])
