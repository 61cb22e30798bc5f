"""Only the tokens of a verify step: a window is rebuilt when it is known which one is needed."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..indexing import node_places, select_nodes
from ..spec import StateSpec, WindowLayout
from .dense import VerifyWindows

__all__ = ["InputWindows"]


class InputWindows(VerifyWindows):
    """Only the inputs of a verify step, 1/(K-1) of the dense bytes; trees by the path of each node.

    The window after node ``t`` is rebuilt at the commit: the row's persistent window, which verify
    left alone, followed by its inputs, ``V``, read at ``paths[row, t]``. So, unlike with dense
    windows, nothing may move a row's slot on between its verify and its commit.

    Attributes:
        layers: ``[rows, dtn, D]`` per layer, in the state's dtype, whatever the window axis.
        paths: ``[rows, dtn, K-1]`` int32, where the columns of each node's window lie in ``V``,
            oldest first; written by tree steps alone. None without speculation.
        resumes: ``[rows]`` bool, whether ``V`` begins with the row's window; else with zeros.
            Written by every verify step. None without speculation.
    """

    layout: ClassVar[WindowLayout] = "inputs"

    paths: Tensor | None = None
    resumes: Tensor | None = None

    @classmethod
    def row_shape(cls, spec: StateSpec, layer_id: int) -> tuple[int, ...]:
        """Return ``(dtn, D)``."""
        return (spec.max_draft_tokens, spec.layer_dim(layer_id))

    @classmethod
    def row_nbytes(cls, spec: StateSpec) -> int:
        """Return the physical bytes of one row, its path and flag included."""
        if spec.max_draft_tokens == 1:
            return 0
        paths = spec.max_draft_tokens * spec.window_size * torch.int32.itemsize
        return super().row_nbytes(spec) + paths + torch.bool.itemsize

    @property
    def nbytes(self) -> int:
        """Physical bytes, paths and flags included."""
        notes = [note for note in (self.paths, self.resumes) if note is not None]
        return super().nbytes + sum(note.numel() * note.element_size() for note in notes)

    def _allocate(self, rows: int) -> None:
        super()._allocate(rows)
        spec = self._spec
        self.paths = torch.zeros(
            (rows, spec.max_draft_tokens, spec.window_size), dtype=torch.int32, device=self._device
        )
        self.resumes = torch.ones(rows, dtype=torch.bool, device=self._device)

    def stream(self, layer_id: int, stream: str) -> Tensor:
        """Return one stream's inputs: a view ``[rows, dtn, D]``."""
        return self._channels(self.layers[layer_id], layer_id, stream)

    def store_paths(self, taps: Tensor) -> None:
        """See :meth:`VerifyWindows.store_paths`."""
        assert self.paths is not None
        self.paths[: taps.shape[0], : taps.shape[1]].copy_(taps[:, :, 1:])

    def store_resumes(self, resumes: Tensor) -> None:
        """See :meth:`VerifyWindows.store_resumes`."""
        # A spec without speculation still verifies single tokens, and keeps nothing of them.
        if self.resumes is not None:
            self.resumes[: resumes.shape[0]].copy_(resumes)

    def store(self, layer_id: int, stream: str, inputs: Tensor, taps: Tensor | None) -> None:
        """See :meth:`VerifyWindows.store`."""
        tokens = inputs[:, self._spec.window_size :]
        self.stream(layer_id, stream)[: tokens.shape[0], : tokens.shape[1]].copy_(tokens)

    def window_after(self, layer_id: int, steps: Tensor, state: Tensor, *, tree: bool) -> Tensor:
        """See :meth:`VerifyWindows.window_after`."""
        rows, time = steps.shape[0], self._spec.window_axis == "time"
        if tree:
            assert self.paths is not None
            place = node_places(steps, self.paths.shape[1])
            path = self.paths.flatten(0, 1).index_select(0, place).to(torch.int64)  # [B, K-1]
        else:
            column = torch.arange(1, self._spec.kernel_size, device=steps.device, dtype=torch.int64)
            path = steps[:, None] + column
        old = state if time else state.transpose(1, 2)
        if self.resumes is not None:
            old = torch.where(self.resumes[:rows, None, None], old, 0)
        window = select_nodes(torch.cat([old, self.layers[layer_id][:rows]], dim=1), path)
        return window if time else window.transpose(1, 2)
