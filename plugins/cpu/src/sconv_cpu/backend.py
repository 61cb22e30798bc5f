"""The CPU backend: :class:`sconv.plugin.TorchBackend` on host memory."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from sconv import ConvStatePool, ForwardBatch, ShortConvMetadata, StateSpec, hookimpl
from sconv.plugin import ConvParams, StateRows, TorchBackend, sum_taps

from . import onednn
from .decode_memory import ManyRows, SingleRow

__all__ = ["CpuBackend", "create"]

#: Elements from which one oneDNN call is faster than K small torch calls.
_MIN_ELEMENTS: Final = 1 << 16


class CpuBackend(TorchBackend):
    """All modes, verify windows in every layout (dense unless the spec names one), trees.

    Decode is fast in two ways more. One row, the whole batch of somebody who runs a model at home,
    is done on views with a third of the calls. Large 16-bit convolutions without bias or activation
    go to oneDNN. Neither changes a value of the result (docs/explanation/arithmetic.md names the
    signs of zeros, the NaN payloads and the denormals that may differ), so that a row's output
    depends neither on the size of its batch nor on which way it took.
    """

    def __init__(
        self, *, spec: StateSpec, device: torch.device, pool: ConvStatePool | None
    ) -> None:
        """Build the state, unless an adopted pool brings it."""
        super().__init__(spec=spec, device=device, pool=pool)
        self._single_rows: dict[int, SingleRow] = {}
        self._many_rows: dict[tuple[int, bool], ManyRows] = {}
        self._scratch = torch.empty(0, dtype=spec.dtype, device="cpu")

    @hookimpl
    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """See :meth:`sconv.hookspecs.StepSpec.init_forward_metadata`."""
        super().init_forward_metadata(forward_batch)
        meta = self.forward_metadata
        assert meta is not None
        if meta.batch_size == 1 and not meta.padded and not meta.may_start_afresh:
            meta.plan.single_slot = int(meta.safe_idx)

    def _is_padded(self, meta: ShortConvMetadata) -> bool:
        # Host memory: looking costs no sync, and most steps have no row without a slot.
        if meta.batch_size == 0:
            return meta.num_tokens > 0
        if bool(meta.cache_indices.amin() < 0):
            return True
        return meta.forward_mode.is_ragged and int(meta.cu[-1]) < meta.num_tokens

    def _takes_onednn(self, x: Tensor, conv: ConvParams) -> bool:
        return (
            x.numel() >= _MIN_ELEMENTS
            and conv.bias is None
            and conv.activation is None
            and onednn.supports(x.shape[-1], x.dtype, conv.weight.dtype)
            and onednn.matches_plain_torch(x.dtype, self.spec.kernel_size)
            and onednn.matches_plain_torch(x.dtype, self.spec.kernel_size + 1)
        )

    def _decode(
        self, x: Tensor, conv: ConvParams, state: StateRows, meta: ShortConvMetadata
    ) -> Tensor:
        slot = meta.plan.single_slot
        if slot is not None and not meta.tracks:
            return self._decode_single(x, conv, state.window(slot))
        if self.spec.dtype is not x.dtype or not self._takes_onednn(x, conv):
            return super()._decode(x, conv, state, meta)
        kept = self._many_rows_for(x, meta, residual=conv.residual)
        old = state.read(meta.safe_idx, out=kept.before)
        if meta.may_start_afresh:
            old.copy_(torch.where(meta.cache_mask, old, 0))
        kept.token.copy_(x[:, None])
        kept.taps.copy_(conv.weight)
        y = onednn.convolve_image(kept.image, kept.kernel).view(x.shape)
        if meta.tracks or meta.padded:
            # Rows that write nothing are in the dummy, which may hold anything on a host.
            state.append(x, old, old, meta)
        else:
            state.write(meta.safe_idx, kept.after)
        return y

    def _many_rows_for(self, x: Tensor, meta: ShortConvMetadata, *, residual: bool) -> ManyRows:
        rows, dim = x.shape
        kept = self._many_rows.get((dim, residual))
        if kept is None or meta.padded or kept.before.shape[0] != rows:
            kept = ManyRows(rows, dim, self.spec.kernel_size, self.spec.dtype, residual=residual)
            # The recordable half of a step, always padded, may be run on fake tensors, and nothing
            # that it makes is to stay.
            if not meta.padded:
                self._many_rows[dim, residual] = kept
        return kept

    def _read_once(self, state: StateRows, meta: ShortConvMetadata) -> Tensor:
        if meta.padded or self.spec.window_axis == "channel":
            return super()._read_once(state, meta)
        shape = (meta.batch_size, self.spec.window_size, state.dim)
        size = math.prod(shape)
        if self._scratch.numel() < size:
            # A tensor made under inference mode could not be written outside of it later.
            with torch.inference_mode(False):
                self._scratch = torch.empty(size, dtype=self.spec.dtype, device="cpu")
        return state.read(meta.safe_idx, out=self._scratch[:size].view(shape))

    def _decode_single(self, x: Tensor, conv: ConvParams, window: Tensor) -> Tensor:
        """Decode one row: ``[1, D]`` and its window ``[K-1, D]``, a view of the state."""
        kept = self._single_rows.get(x.shape[1])
        if kept is None:
            kept = SingleRow(x.shape[1], self.spec.kernel_size)
            self._single_rows[x.shape[1]] = kept
        torch.cat([window, x, conv.weight.t()], out=kept.rows)
        window.copy_(kept.after)
        y = sum_taps(kept.inputs, kept.columns, conv)
        return y.to(x.dtype)

    def _convolve_packed(self, x: Tensor, conv: ConvParams) -> Tensor:
        if conv.residual or not self._takes_onednn(x, conv):
            return super()._convolve_packed(x, conv)
        # Padding at both ends gives K-1 rows more than tokens: the room that the caller needs.
        return onednn.conv_rows(x[None], conv.weight, padding=self.spec.window_size)[0]


def create(*, spec: StateSpec, device: torch.device, pool: ConvStatePool | None) -> CpuBackend:
    """Build the backend; the entry point's factory."""
    return CpuBackend(spec=spec, device=device, pool=pool)
