"""Every hook in plain, vectorised, device-agnostic torch: what CPU and Ascend build on.

The step methods follow DESIGN's table of modes one by one. They are recordable, and they never index
with a negative slot: a row without one reads row 0, whose values are selected away, and writes
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import BackendBase
from .batch import ForwardBatch, ForwardMode
from .checks import check_commit
from .dense_metadata import fill_metadata, lookup_slots
from .dense_ops import combine_taps, gather_windows, write_rows
from .hookspecs import hookimpl
from .metadata import MetadataBuffers, ShortConvMetadata

__all__ = ["DenseBackend"]


@dataclass(frozen=True, slots=True)
class _Heads:
    """The first K-1 tokens of every row of a ragged step: the only ones that read a window.

    Attributes:
        tokens: ``[B, K-1]`` int64, packed token of each, in range also where the row is shorter.
        targets: ``[B * (K-1)]`` int64, output row of each; T where the row is shorter.
    """

    tokens: Tensor
    targets: Tensor


class DenseBackend(BackendBase):
    """The whole contract in torch operators. A plugin subclasses it and names its device."""

    _source: Tensor | None = None
    _heads: _Heads | None = None
    _gathers_of: ShortConvMetadata | None = None
    _rows_are_slots = False

    def _fill(self, meta: ShortConvMetadata, batch: ForwardBatch, buffers: MetadataBuffers) -> None:
        fill_metadata(meta, batch, self.pool, buffers)
        self._plan_gathers(meta)

    def _plan(self, batch: ForwardBatch) -> int:
        if batch.forward_mode is ForwardMode.TARGET_VERIFY:
            self._rows_are_slots = batch.slots is not None
        return super()._plan(batch)

    def _plan_gathers(self, meta: ShortConvMetadata) -> None:
        """Compute the indexes that all convolutions of a step share. In graph."""
        self._source = self._heads = None
        self._gathers_of = meta
        if meta.num_tokens == 0:
            return
        window = self.spec.window_size
        starts = meta.cu[:-1, None]  # [B, 1]
        lengths = meta.cu[1:] - meta.cu[:-1]  # [B]
        column = torch.arange(window, device=starts.device)  # [K-1]
        kept = lengths
        if meta.num_accept_tokens is not None:
            kept = meta.num_accept_tokens.to(torch.int64).clamp(min=0)
            kept = torch.minimum(kept, lengths)
        if meta.forward_mode.is_ragged or meta.num_accept_tokens is not None:
            place = (kept - window)[:, None] + column  # [B, K-1], negative = old window
            self._source = torch.where(place >= 0, place + starts, place)
        if meta.forward_mode.is_ragged:
            tokens = starts + column
            targets = torch.where(column < lengths[:, None], tokens, meta.num_tokens)
            self._heads = _Heads(tokens.clamp(max=meta.num_tokens - 1), targets.view(-1))

    @hookimpl
    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        layer_id: int,
        stream: str,
        forward_batch: ForwardBatch,
        bias: Tensor | None,
        activation: str | None,
        residual: bool,
    ) -> Tensor:
        """See :meth:`sconv.hookspecs.StepSpec.short_conv`."""
        meta = self.conv_state_metadata(layer_id, forward_batch)
        if meta.num_tokens == 0 or meta.forward_mode is ForwardMode.IDLE:
            return torch.zeros_like(x, memory_format=torch.contiguous_format)
        if meta is not self._gathers_of:
            # An engine put the metadata of an earlier step back.
            self._plan_gathers(meta)
        if weight.dim() == 3:
            weight = weight.squeeze(1)
        state = self.pool.conv(layer_id, stream)
        if self.spec.window_axis == "channel":
            state = state.transpose(1, 2)  # [S, K-1, D]
        if meta.forward_mode is ForwardMode.DECODE:
            y = self._decode(x, weight, state, meta, bias, activation, residual)
        elif meta.forward_mode.is_ragged:
            y = self._extend(x, weight, state, meta, bias, activation, residual)
        else:
            windows = self._draft_inputs(x, state, meta)
            y = _convolve_rows(windows, weight, meta, bias, activation, residual, dtype=x.dtype)
            if meta.forward_mode is ForwardMode.TARGET_VERIFY:
                self._keep_windows(windows, layer_id, stream, meta)
            else:
                self._move_on(x, state, meta)
        if not meta.padded:
            return y
        live = meta.cache_indices >= 0
        if meta.tokens_per_row is None:
            live = live.index_select(0, meta.si)
            live &= torch.arange(meta.num_tokens, device=x.device) < meta.cu[-1]
        elif meta.tokens_per_row > 1:
            live = live.repeat_interleave(meta.tokens_per_row, output_size=meta.num_tokens)
        return torch.where(live[:, None], y, 0)

    def _decode(
        self,
        x: Tensor,
        weight: Tensor,
        state: Tensor,
        meta: ShortConvMetadata,
        bias: Tensor | None,
        activation: str | None,
        residual: bool,
    ) -> Tensor:
        old = state.index_select(0, meta.safe_idx)  # [B, K-1, D]
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        combine_taps([*old.unbind(1), x], weight, bias, activation, residual, out=y)
        new = torch.cat([old[:, 1:], x.to(old.dtype)[:, None]], dim=1)
        write_rows(state, meta.safe_idx, new, meta.writes if meta.padded else None, old)
        if meta.tracks:
            self._snapshot(state, new, meta)
        return y

    def _extend(
        self,
        x: Tensor,
        weight: Tensor,
        state: Tensor,
        meta: ShortConvMetadata,
        bias: Tensor | None,
        activation: str | None,
        residual: bool,
    ) -> Tensor:
        heads = self._heads
        assert heads is not None
        tokens, window = meta.num_tokens, self.spec.window_size
        # One row more than tokens: what rows shorter than K-1 have no place for goes there.
        storage = torch.empty((tokens + 1, x.shape[1]), dtype=x.dtype, device=x.device)
        y = storage[:tokens]
        if tokens > window:
            # All tokens as if they were one row; the first K-1 of each row are put right below.
            taps = [x[j : tokens - window + j] for j in range(window + 1)]
            combine_taps(taps, weight, bias, activation, residual, out=y[window:])
        raw = state.index_select(0, meta.safe_idx)
        old = torch.where(meta.cache_mask, raw, 0)
        first = x.index_select(0, heads.tokens.view(-1)).view(-1, window, x.shape[1])
        inputs = torch.cat([old, first], dim=1)  # [B, 2(K-1), D]
        head = torch.empty_like(first)
        taps = [inputs[:, j : j + window] for j in range(window + 1)]
        combine_taps(taps, weight, bias, activation, residual, out=head)
        storage.index_copy_(0, heads.targets, head.view(-1, x.shape[1]))
        self._advance(x, state, raw, old, meta)
        return y

    def _move_on(self, x: Tensor, state: Tensor, meta: ShortConvMetadata) -> None:
        raw = state.index_select(0, meta.safe_idx)
        self._advance(x, state, raw, torch.where(meta.cache_mask, raw, 0), meta)

    def _advance(
        self, x: Tensor, state: Tensor, raw: Tensor, old: Tensor, meta: ShortConvMetadata
    ) -> None:
        """Write the rows' new windows and, where asked, their snapshots."""
        assert self._source is not None
        new = gather_windows(self._source, old, x)
        if meta.tracks:
            self._snapshot(state, gather_windows(meta.track_conv_indices, old, x), meta)
        write_rows(state, meta.safe_idx, new, meta.writes, raw)

    def _draft_inputs(self, x: Tensor, state: Tensor, meta: ShortConvMetadata) -> Tensor:
        """``[B, K-1+dtn, D]``: each row's window followed by its tokens."""
        old = torch.where(meta.cache_mask, state.index_select(0, meta.safe_idx), 0)
        return torch.cat([old, x.unflatten(0, (meta.batch_size, -1))], dim=1)

    def _keep_windows(
        self, inputs: Tensor, layer_id: int, stream: str, meta: ShortConvMetadata
    ) -> None:
        """Keep the window after every token of a verify step beside the pool."""
        assert meta.tokens_per_row is not None
        kept = self.pool.windows.stream(layer_id, stream)
        kept = kept[: meta.batch_size, : meta.tokens_per_row]  # [B, dtn, K-1, D]
        if meta.tree_taps is None:
            kept.copy_(inputs[:, 1:].unfold(1, self.spec.window_size, 1).transpose(2, 3))
        else:
            kept.copy_(_select_nodes(inputs, meta.tree_taps[:, :, 1:]))

    def _snapshot(self, state: Tensor, windows: Tensor, meta: ShortConvMetadata) -> None:
        target = meta.track_cache_indices.clamp(min=0)
        there = state.index_select(0, target)
        write_rows(state, target, windows, meta.track_cache_indices >= 0, there)

    @hookimpl
    def update_mamba_state_after_mtp_verify(
        self,
        last_correct_step_indices: Tensor,
        mamba_track_indices: Tensor | None,
        mamba_steps_to_track: Tensor | None,
        req_pool_indices: Tensor,
    ) -> None:
        """See :meth:`sconv.hookspecs.StepSpec.update_mamba_state_after_mtp_verify`."""
        rows = req_pool_indices.shape[0]
        check_commit(
            rows,
            self.pool,
            self.verify_tokens,
            self.max_rows,
            last_correct_step_indices=last_correct_step_indices,
            mamba_track_indices=mamba_track_indices,
            mamba_steps_to_track=mamba_steps_to_track,
            req_pool_indices=req_pool_indices,
        )
        slots = torch.empty(rows, dtype=torch.int64, device=self.device)
        if self._rows_are_slots:
            lookup_slots(self.pool, None, req_pool_indices, out=slots)
        else:
            lookup_slots(self.pool, req_pool_indices, None, out=slots)
        self.pool.translate_(slots)
        # The snapshot's source is the verify windows too, so the order of the two does not matter.
        self._commit(last_correct_step_indices, slots, live=slots > 0)
        if mamba_track_indices is not None and mamba_steps_to_track is not None:
            targets = self.pool.translate_(mamba_track_indices.to(torch.int64, copy=True))
            self._commit(mamba_steps_to_track, targets, live=(targets > 0) & (slots > 0))

    def _commit(self, steps: Tensor, targets: Tensor, *, live: Tensor) -> None:
        """Copy the window after node ``steps[i]`` of row i to ``targets[i]`` in all layers."""
        count = steps.shape[0]
        live = live & (steps >= 0) & (steps < self.verify_tokens) & (targets < self.pool.num_rows)
        step = steps.to(torch.int64).clamp(0, self.verify_tokens - 1)
        target = torch.where(live, targets, 0)
        row = torch.arange(count, device=self.device)
        for layer, windows in zip(self.pool.layers, self.pool.windows.layers, strict=True):
            kept = windows[row, step]  # [B, K-1, D] or [B, D, K-1]
            write_rows(layer, target, kept, live, layer.index_select(0, target))


def _convolve_rows(
    inputs: Tensor,
    weight: Tensor,
    meta: ShortConvMetadata,
    bias: Tensor | None,
    activation: str | None,
    residual: bool,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Convolve rows of equal length, ``[B, K-1+dtn, D]`` -> ``[B * dtn, D]``; trees by their taps."""
    rows, dim = inputs.shape[0], inputs.shape[2]
    assert meta.tokens_per_row is not None
    per_row, width = meta.tokens_per_row, weight.shape[1]
    if meta.tree_taps is None:
        taps = [inputs[:, j : j + per_row] for j in range(width)]
    else:
        taps = [_select_nodes(inputs, meta.tree_taps[:, :, j]) for j in range(width)]
    y = torch.empty((rows, per_row, dim), dtype=dtype, device=inputs.device)
    combine_taps(taps, weight, bias, activation, residual, out=y)
    return y.view(-1, dim)


def _select_nodes(inputs: Tensor, index: Tensor) -> Tensor:
    """``[B, n, D]`` by ``[B, ...]`` int64 -> ``[B, ..., D]``."""
    flat = index.reshape(index.shape[0], -1, 1).expand(-1, -1, inputs.shape[2])
    return inputs.gather(1, flat).view(*index.shape, inputs.shape[2])
