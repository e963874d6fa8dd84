"""The pages that hold keys and values on a device, in the layout of the Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sapwood_server.model.config import ModelConfig
from sapwood_server.model.kv import PageBounds, untouched_zeros
from sapwood_server.model.staging import stage_new
from sapwood_server.values.plan import PageCopy


class DeviceKV(PageBounds):
    """Keys and values of every layer in one tensor, `[num_layers, num_pages, 2, num_kv_heads, page_size, head_dim]`: a
    head's tokens within a page lie side by side. Page 0 is reserved: zero, never written."""

    def __init__(
        self, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(num_pages, page_size)
        shape = (config.num_layers, num_pages, 2, config.num_kv_heads, page_size, config.head_dim)
        if device.type == "cpu":
            self.pages = untouched_zeros(shape, dtype)
        else:
            self.pages = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = self.pages.unbind()

    def layer(self, index: int) -> Tensor:
        """One layer as the ops take it, `[num_pages, 2, num_kv_heads, page_size, head_dim]`, contiguous."""
        return self._layers[index]

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copies the first slots of pages to other pages, in every layer. Sources are read before any is written."""
        self.check_copies(copies)
        if not copies:
            return
        counts = [copy.num_slots for copy in copies]
        slots = np.concatenate([np.arange(count) for count in counts])
        sources = np.repeat([copy.source for copy in copies], counts)
        targets = np.repeat([copy.target for copy in copies], counts)
        source, target, slot = (stage_new(index, self.pages.device) for index in (sources, targets, slots))
        self.pages[:, target, :, :, slot] = self.pages[:, source, :, :, slot]

    def reset_reserved_page(self) -> None:
        """Page 0 is zero again, whatever a graph's capture did."""
        self.pages[:, 0].zero_()
