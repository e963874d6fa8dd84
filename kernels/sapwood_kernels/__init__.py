"""Attention and pointwise operators: the reference formulas, the CPU path and the Triton kernels."""
