"""What the decode attention of one model on one device has in common from step to step."""

from __future__ import annotations

from dataclasses import dataclass

from sapwood_kernels.config_table import AttentionConfig, padded_group

# Of a multiprocessor of compute capability 8.0 to 12.1 (CUDA programming guide, "Technical Specifications"). They are
# given to a warp by 8 for each thread.
_REGISTERS = 65536


@dataclass(frozen=True, kw_only=True)
class DecodeLayout:
    """Raises ValueError for what no kernel was made for."""

    config: AttentionConfig
    arch: int
    """Compute capability, 90 for 9.0, or INTERPRETER_ARCH."""
    group: int
    """Query heads to a key-value head."""
    page_size: int
    num_pages: int
    """Of the pool, the reserved page 0 included."""
    capacity: int
    """Partials that a step may leave: the splits of its rows, added up. As many as the rows times the splits of the
    longest context can't run out."""
    window: int | None = None
    """The widest of all layers that use the same work; None if one of them sees all keys. Splits before it are not
    listed, and pages before it are not looked at: they may have been given away."""

    def __post_init__(self) -> None:
        split_size, block_m = self.config.split_size, self.config.block_m
        if self.page_size < 1 or split_size < 1 or split_size % self.page_size:
            raise ValueError(f"page_size is {self.page_size}; accepted: a divisor of split_size, {split_size}")
        if not 1 <= self.group <= block_m:
            raise ValueError(f"group is {self.group}; accepted: 1 to block_m, {block_m}")
        for name in ("capacity", "num_pages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; accepted: 1 or more")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; accepted: 1 or more, or None")

    @property
    def rows_per_block(self) -> int:
        """Rows whose heads, padded to a power of two, fill BLOCK_M."""
        return self.config.block_m // padded_group(self.group)

    @property
    def pages_per_split(self) -> int:
        """Pages that hold the keys of a split."""
        return self.config.split_size // self.page_size


@dataclass(frozen=True, kw_only=True)
class DecodeGrid:
    """How many programs are started, whatever a step's work is: each takes items until none is left."""

    num_programs: int
    wide_programs: int
    """For wide items."""


def resident_grid(config: AttentionConfig, num_sms: int) -> DecodeGrid:
    """As many programs as registers let a device of `num_sms` multiprocessors hold at once.

    A guess still to be measured: more programs would only start late, fewer leave the memory idle.
    """
    if num_sms < 1:
        raise ValueError(f"num_sms is {num_sms}; accepted: 1 or more")

    def programs(registers: int) -> int:
        allotted = -(-max(registers, 1) // 8) * 8 * 32 * config.num_warps
        return num_sms * max(_REGISTERS // allotted, 1)

    return DecodeGrid(num_programs=programs(config.max_registers), wide_programs=programs(config.max_wide_registers))
