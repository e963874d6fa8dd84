"""Reading PTX: by hand here, so that each rule of the reader is seen alone; the compile gate reads the real thing."""

from __future__ import annotations

import pytest

from sapwood_kernels.ptx import count_instructions, exponential_loops, global_load_widths

# Two loops as a compiler might write them: the second masks, negates a constant's product, and was contracted.
KERNEL = """
.visible .entry kernel(.param .u64 kernel_param_0)
{
	.reg .pred 	%p<3>;
	mov.b32 	%r90, 0fFF800000;
	ld.global.b32 	%r91, [%rd1];  // ld.global.b32 in a comment
$L__BB0_1:                              // =>This Inner Loop Header: Depth=1
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1, %r2, %r3, %r4 }, { %r5 }, { %r6 }, { %r1, %r2, %r3, %r4 };
	mul.rn.f32 	%r10, %r1, 0f3E000000;
	max.f32 	%r11, %r10, %r91;
	sub.rn.f32 	%r12, %r10, %r11;
	ex2.approx.ftz.f32 	%r13, %r12;
	add.s32 	%r14, %r14, 1;
	@%p1 bra 	$L__BB0_1;
$L__BB0_2:
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r21, %r22, %r23, %r24 }, { %r5 }, { %r6 }, { %r21, %r22, %r23, %r24 };
	neg.f32 	%r29, %r31;
	fma.rn.f32 	%r32, %r21, 0f3E000000, %r29;
	selp.f32 	%r33, %r32, %r90, %p2;
	selp.f32 	%r34, 0fFF800000, %r33, %p2;
	mov.b32 	%r35, %r34;
	ex2.approx.ftz.f32 	%r36, %r35;
	@%p1 bra 	$L__BB0_2;
	ret;
}
"""  # noqa: E501


def test_loops_show_the_formulas_that_feed_their_exponentials() -> None:
    plain, contracted = exponential_loops(KERNEL)
    assert plain.exponents == ("sub.rn.f32(mul.rn.f32(x, 0f3E000000), x)",)
    assert contracted.exponents == ("fma.rn.f32(x, 0f3E000000, neg.f32(x))",)


def test_a_loop_counts_its_floating_arithmetic_only() -> None:
    plain, contracted = exponential_loops(KERNEL)
    assert plain.arithmetic == (("ex2.approx.ftz.f32", 1), ("mul.rn.f32", 1), ("sub.rn.f32", 1))
    assert contracted.arithmetic == (("ex2.approx.ftz.f32", 1), ("fma.rn.f32", 1), ("neg.f32", 1))


def test_a_mask_changes_no_formula() -> None:
    masked = KERNEL.replace(
        "fma.rn.f32 	%r32, %r21, 0f3E000000, %r29", "mul.rn.f32 	%r32, %r21, 0f3E000000"
    ).replace("mov.b32 	%r35, %r34", "sub.rn.f32 	%r35, %r34, %r31")
    plain, contracted = exponential_loops(masked)
    assert plain.exponents == contracted.exponents


def test_another_constant_is_another_formula() -> None:
    changed = KERNEL.replace("%r21, 0f3E000000", "%r21, 0f3E000001")
    assert exponential_loops(changed)[1].exponents == ("fma.rn.f32(x, 0f3E000001, neg.f32(x))",)


def test_exponentials_outside_loops_and_loops_without_them_do_not_count() -> None:
    assert exponential_loops(KERNEL.replace("bra 	$L__BB0_2", "bra 	$L__BB0_9"))[1:] == ()
    assert len(exponential_loops(KERNEL.replace("ex2.approx.ftz.f32 	%r13, %r12;", ""))) == 1


def test_an_inner_loop_keeps_its_exponentials_from_the_outer_one() -> None:
    nested = KERNEL.replace("	ret;", "	@%p2 bra 	$L__BB0_1;\n	ret;")
    assert exponential_loops(nested)[1].exponents == ("fma.rn.f32(x, 0f3E000000, neg.f32(x))",)


def test_instructions_are_counted_outside_comments() -> None:
    assert count_instructions(KERNEL, "mma.sync") == 2
    assert count_instructions(KERNEL, "ld.global") == 1
    assert count_instructions(KERNEL, "mma.sync", "ex2") == 4
    assert count_instructions(KERNEL, "cp.async") == 0


def test_loads_are_told_apart_by_their_width() -> None:
    loads = """
	ld.global.v4.b32 	{ %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	@%p1 ld.global.L1::evict_last.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];
	ld.global.nc.b16 	%rs1, [%rd2];
	ld.global.u64 	%rd3, [%rd2];
	ld.shared.b32 	%r9, [%r8];
	cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
"""
    assert global_load_widths(loads) == {16: 1, 8: 2, 2: 1}
    with pytest.raises(ValueError, match=r"ld\.global\.b on line 1 has no width"):
        global_load_widths("ld.global.b %r1, [%rd1];")
