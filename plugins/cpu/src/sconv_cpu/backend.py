"""The CPU backend: :class:`sconv.dense.DenseBackend` on host memory."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from sconv.dense import DenseBackend, Taps
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

    Large 16-bit convolutions without bias and activation go to oneDNN. That changes the time and
    not a bit of the result, so a row's output depends neither on the size of its batch nor on which
    of the two ran.
    """

    def _is_padded(self, meta: ShortConvMetadata) -> bool:
        # Host memory: looking costs no sync, and most steps have no row without a slot.
        if meta.batch_size == 0:
            return meta.num_tokens > 0
        return bool(meta.cache_indices.amin() < 0) or int(meta.cu[-1]) < meta.num_tokens

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
        if self.spec.dtype is not x.dtype or not self._takes_onednn(x, taps):
            return super()._decode(x, taps, state, meta)
        rows, dim, size = x.shape[0], x.shape[1], self.spec.window_size
        weight = taps.weight
        inputs = torch.empty((rows, size + 1 + taps.residual, dim), dtype=x.dtype)
        old = state.read(meta.safe_idx, out=inputs[:, :size])
        inputs[:, size:] = x[:, None]
        if taps.residual:
            # A residual is one tap more, of weight 1, on the current token: still one rounding.
            weight = torch.cat([weight, weight.new_ones(dim, 1)], dim=1)
        y = onednn.conv_rows(inputs, weight).view(rows, dim)
        self._append(x, state, old, meta)
        return y

    def _convolve_packed(self, x: Tensor, taps: Taps) -> Tensor:
        if taps.residual or not self._takes_onednn(x, taps):
            return super()._convolve_packed(x, taps)
        # Padding at both ends gives K-1 rows more than tokens: the room that the caller needs.
        return onednn.conv_rows(x[None], taps.weight, padding=self.spec.window_size)[0]


def create(*, spec: StateSpec, device: torch.device, pool: ConvStatePool | None) -> CpuBackend:
    """Build the backend; the entry point's factory."""
    return CpuBackend(spec=spec, device=device, pool=pool)
