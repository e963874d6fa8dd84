"""What the compute side of a server would do on this machine, as `sapwood doctor` shows it."""

from __future__ import annotations

import msgspec


class ComputeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions that a start with this configuration would make, without loading a weight. Sizes are bytes."""

    torch: str
    device: str
    device_detail: str
    """The CPU's vector capability and threads, or the GPU's name."""
    device_reason: str
    dtype: str
    dtype_reason: str
    packed: str
    """Whether decode takes a checkpoint's own 4-bit weights, in words."""
    architecture: str | None = None
    """None, like all below, if no model was found."""
    max_model_len: int | None = None
    weight_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    kv_bytes: int | None = None
    kv_tokens: int | None = None
    """Tokens that the KV pages hold together."""
    problem: str | None = None
    """Why a start would fail: the one line that it would print."""
