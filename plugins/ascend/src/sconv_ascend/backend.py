"""The Ascend backend: :class:`sconv.dense.DenseBackend` in operators that torch_npu has.

What it changes has two reasons. Some forms are fast on a host and slow on an NPU. And
``index_copy_`` is unordered on CANN where an index occurs twice: here rows that share a target
write equal values or have a target of their own, so that no order shows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sconv.batch import ForwardBatch
from sconv.dense import DenseBackend, Gathers, Taps
from sconv.hookspecs import hookimpl
from sconv.metadata import MetadataBuffers, ShortConvMetadata
from sconv.pool import ConvStatePool
from sconv.spec import StateSpec
from sconv.state_rows import StateRows

from .convolution import convolve, convolve_step

__all__ = ["AscendBackend"]


class AscendBackend(DenseBackend):
    """All modes, token trees, verify windows in every layout (dense unless the spec names one).

    Step hooks use :data:`sconv_ascend.operators.OPERATORS` and nothing else, read nothing on the
    host in graph, and keep static buffers where they are, so that ``torch.npu.NPUGraph`` can record
    them.
    """

    def __init__(
        self, *, spec: StateSpec, device: torch.device, pool: ConvStatePool | None
    ) -> None:
        """Build the state, unless an adopted pool brings it."""
        super().__init__(spec=spec, device=device, pool=pool)
        self._numbers = self._count()

    @hookimpl
    def init_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """See :meth:`sconv.hookspecs.StepSpec.init_graph_state`."""
        super().init_graph_state(max_bs, max_num_tokens)
        if self._numbers.shape[0] < self.max_rows * self.spec.window_size:
            self._numbers = self._count()

    def _count(self) -> Tensor:
        """``[max_rows * (K-1)]`` int64, 0, 1, 2 and so on."""
        # A tensor made under inference mode could not be used by a graph outside of it later.
        with torch.inference_mode(False):
            return torch.arange(self.max_rows * self.spec.window_size, device=self.device)

    def _fill(self, meta: ShortConvMetadata, batch: ForwardBatch, buffers: MetadataBuffers) -> None:
        super()._fill(meta, batch, buffers)
        # Rows on the dummy slot would all write to it, each its own window.
        meta.writes.logical_and_(meta.cache_indices > 0)

    def _plan_gathers(self, meta: ShortConvMetadata) -> Gathers:
        gathers = super()._plan_gathers(meta)
        target = gathers.head_target
        if target is None:
            return gathers
        # Outputs that a short row has no place for: a row of the storage for each.
        spare = self._numbers[: target.shape[0]] + meta.num_tokens
        return replace(gathers, head_target=torch.where(target < meta.num_tokens, target, spare))

    def _decode(self, x: Tensor, taps: Taps, state: StateRows, meta: ShortConvMetadata) -> Tensor:
        old = state.read(meta.safe_idx)
        y = convolve_step(old, x, taps)
        self._append(x, state, old, meta)
        return y

    def _convolve(self, inputs: Tensor, taps: Taps, out: Tensor) -> None:
        convolve(inputs, taps, out)

    def _spare_rows(self) -> int:
        meta = self.forward_metadata
        return 0 if meta is None else meta.batch_size * self.spec.window_size
