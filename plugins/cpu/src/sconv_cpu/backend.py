"""The CPU backend: :class:`sconv.dense.DenseBackend` on host memory."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from sconv.batch import ForwardBatch
from sconv.dense import DenseBackend, Taps
from sconv.dense_ops import sum_taps
from sconv.hookspecs import hookimpl
from sconv.metadata import ShortConvMetadata
from sconv.pool import ConvStatePool
from sconv.spec import StateSpec
from sconv.state_rows import StateRows

from . import onednn

__all__ = ["CpuBackend", "create"]

#: Elements from which one oneDNN call is faster than K small torch calls.
_MIN_ELEMENTS: Final = 1 << 16


class CpuBackend(DenseBackend):
    """All modes, verify windows in every layout (dense unless the spec names one), trees.

    Decode is fast in two ways more. One row, the whole batch of somebody who runs a model at home,
    is done on views with a third of the calls. Large convolutions without bias and activation go to
    oneDNN. Neither changes a bit of the result, so that a row's output depends neither on the size
    of its batch nor on which way it took.
    """

    def __init__(
        self, *, spec: StateSpec, device: torch.device, pool: ConvStatePool | None
    ) -> None:
        """Build the state, unless an adopted pool brings it."""
        super().__init__(spec=spec, device=device, pool=pool)
        #: The prepared eager step that has one row, and its slot; known before any layer runs.
        self._single: ShortConvMetadata | None = None
        self._single_slot = 0
        self._scratch = torch.empty(0)

    @hookimpl
    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """See :meth:`sconv.hookspecs.StepSpec.init_forward_metadata`."""
        super().init_forward_metadata(forward_batch)
        meta = self.forward_metadata
        assert meta is not None
        if meta.batch_size == 1 and not meta.padded:
            self._single, self._single_slot = meta, int(meta.safe_idx)

    def _is_padded(self, meta: ShortConvMetadata) -> bool:
        # Host memory: looking costs no sync, and most steps have no row without a slot.
        if meta.batch_size == 0:
            return meta.num_tokens > 0
        if bool(meta.cache_indices.amin() < 0):
            return True
        return meta.forward_mode.is_ragged and int(meta.cu[-1]) < meta.num_tokens

    def _takes_onednn(self, x: Tensor, taps: Taps) -> bool:
        return (
            x.numel() >= _MIN_ELEMENTS
            and taps.bias is None
            and taps.activation is None
            and onednn.supports(x.shape[-1], x.dtype, taps.weight.dtype)
            and onednn.matches_plain_torch(x.dtype, self.spec.kernel_size)
            and onednn.matches_plain_torch(x.dtype, self.spec.kernel_size + 1)
        )

    def _decode(self, x: Tensor, taps: Taps, state: StateRows, meta: ShortConvMetadata) -> Tensor:
        if meta is self._single and not meta.tracks:
            return self._decode_single(x, taps, state.window(self._single_slot))
        if self.spec.dtype is not x.dtype or not self._takes_onednn(x, taps):
            return super()._decode(x, taps, state, meta)
        rows, dim, size = x.shape[0], x.shape[1], self.spec.window_size
        weight = taps.weight
        inputs = self._scratch_of(x.dtype, (rows, size + 1 + taps.residual, dim))
        old = state.read(meta.safe_idx, out=inputs[:, :size])
        inputs[:, size:] = x[:, None]
        if taps.residual:
            # A residual is one tap more, of weight 1, on the current token: still one rounding.
            weight = torch.cat([weight, weight.new_ones(dim, 1)], dim=1)
        y = onednn.conv_rows(inputs, weight).view(rows, dim)
        self._append(x, state, old, meta)
        return y

    def _scratch_of(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return working memory that nothing keeps after the call.

        A fresh tensor of this size is new to the process each time, and faulting its pages in costs
        as much as the convolution.
        """
        size = math.prod(shape)
        if self._scratch.dtype is not dtype or self._scratch.numel() < size:
            # A tensor made under inference mode could not be written outside of it later.
            with torch.inference_mode(False):
                self._scratch = torch.empty(size, dtype=dtype)
        return self._scratch[:size].view(shape)

    def _decode_single(self, x: Tensor, taps: Taps, window: Tensor) -> Tensor:
        """Decode one row: ``[1, D]`` and its window ``[K-1, D]``, a view of the state."""
        width = self.spec.kernel_size
        # Inputs and columns of the weight in one tensor, so that one copy transposes, one converts
        # and one call takes it apart. Mixed dtypes become a wider one, which holds their values.
        rows = torch.cat([window, x, taps.weight.t()])  # [2 * K, D]
        window.copy_(rows[1:width])
        parts = rows.float().unbind(0)
        y = sum_taps(
            parts[:width],
            parts[width:],
            bias=taps.bias,
            activation=taps.activation,
            residual=taps.residual,
        )
        return y.to(x.dtype).view(1, -1)

    def _convolve_packed(self, x: Tensor, taps: Taps) -> Tensor:
        if taps.residual or not self._takes_onednn(x, taps):
            return super()._convolve_packed(x, taps)
        # Padding at both ends gives K-1 rows more than tokens: the room that the caller needs.
        return onednn.conv_rows(x[None], taps.weight, padding=self.spec.window_size)[0]


def create(*, spec: StateSpec, device: torch.device, pool: ConvStatePool | None) -> CpuBackend:
    """Build the backend; the entry point's factory."""
    return CpuBackend(spec=spec, device=device, pool=pool)
