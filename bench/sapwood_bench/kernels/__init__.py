"""The Triton kernels on a GPU: right, the same bits every time, and how far from what the machine can do.

Everything here runs without installing anything, so that it can run on a machine that has torch and Triton only:
`bench/gpu_check.sh` calls it step by step.
"""
