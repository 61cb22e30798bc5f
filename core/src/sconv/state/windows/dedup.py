"""Overlapping windows: neighbours of a chain share all columns but one."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..indexing import select_nodes
from ..spec import StateSpec, WindowLayout
from .dense import VerifyWindows

__all__ = ["DedupWindows"]


class DedupWindows(VerifyWindows):
    """The inputs that the windows of a chain slide over, once each: ``dtn + K-2`` columns.

    Column j holds the row's input j - (K-2), counted from the first token of the step, so the first
    K-2 columns are the newest of the old window; its oldest column is in no window and not stored.
    The window after token t is columns t to t+K-2. K = 4, old window [1, 2, 3], tokens 10 to 13::

        2 3 10 11 12 13
        |----|              after token 0
          |-----|           after token 1

    A tree cannot be kept this way: the windows of two children of one node need different values in
    one column.

    Attributes:
        layers: ``[rows, dtn + K-2, D]`` or ``[rows, D, dtn + K-2]`` per layer.
    """

    layout: ClassVar[WindowLayout] = "dedup"
    takes_trees: ClassVar[bool] = False

    @classmethod
    def row_shape(cls, spec: StateSpec, layer_id: int) -> tuple[int, ...]:
        """Return ``(dtn + K-2, D)`` or ``(D, dtn + K-2)``."""
        columns, dim = spec.max_draft_tokens + spec.kernel_size - 2, spec.layer_dim(layer_id)
        return (columns, dim) if spec.window_axis == "time" else (dim, columns)

    def geometry(self, layer_id: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return shape and strides of the overlapping windows; see :meth:`VerifyWindows.geometry`.

        The step stride is the window stride. A kernel may store every window, since overlapping
        columns get equal values; on the time axis each window is one contiguous block.
        """
        spec = self._spec
        row, *inner = self.layers[layer_id].stride()
        column = inner[0] if spec.window_axis == "time" else inner[1]
        shape = (self.rows, spec.max_draft_tokens, *spec.window_shape(layer_id))
        return shape, (row, column, *inner)

    def stream(self, layer_id: int, stream: str) -> Tensor:
        """Return one stream's columns: a view ``[rows, dtn + K-2, D]``."""
        layer = self.layers[layer_id]
        if self._spec.window_axis == "channel":
            layer = layer.transpose(1, 2)
        return self._channels(layer, layer_id, stream)

    def store(self, layer_id: int, stream: str, inputs: Tensor, taps: Tensor | None) -> None:
        """See :meth:`VerifyWindows.store`."""
        assert taps is None, "a tree in dedup windows"
        columns = inputs[:, 1:]
        self.stream(layer_id, stream)[: columns.shape[0], : columns.shape[1]].copy_(columns)

    def window_after(self, layer_id: int, steps: Tensor, state: Tensor, *, tree: bool) -> Tensor:
        """See :meth:`VerifyWindows.window_after`."""
        layer = self.layers[layer_id][: steps.shape[0]]
        column = torch.arange(self._spec.window_size, device=steps.device, dtype=torch.int64)
        source = steps[:, None] + column  # [B, K-1]
        if self._spec.window_axis == "time":
            return select_nodes(layer, source)
        return select_nodes(layer.transpose(1, 2), source).transpose(1, 2)
