"""Every hook in plain, vectorised, device-agnostic torch: what CPU and Ascend build on.

All modes are one pattern: put each row's window before its tokens, convolve, keep a selection of
the same inputs. The methods are recordable. None of them indexes with a negative slot: a row
without one reads row 0, whose values are selected away, and writes back what it read.

An accelerator need not order what one operator writes to one place twice (CANN's ``index_copy_``
does not). There, rows that share a target write equal values, or get a target of their own, so that
no order shows. On a host they are left to it: what is written there means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..hookspecs import hookimpl
from ..state.indexing import select_nodes
from ..state.pool import ConvStatePool
from ..state.spec import StateSpec
from ..step.batch import ForwardBatch, ForwardMode
from ..step.batch_checks import check_commit
from ..step.metadata import MetadataBuffers, ShortConvMetadata
from . import gated_delta as delta
from .base import PluginBackend
from .convolution import ConvParams, convolve, convolve_step
from .fill_metadata import fill_metadata
from .state_rows import StateRows

__all__ = ["Gathers", "StepPlan", "TorchBackend"]


@dataclass(frozen=True, slots=True)
class Gathers:
    """Indexes that all convolutions of a step share.

    Attributes:
        window: ``[B, K-1]`` int64, where the window after the step comes from, in the encoding of
            ``ShortConvMetadata.track_conv_indices``.
        head: ``[B, K-1]`` int64, the first tokens of each row: the only ones that read its window.
            In range also where the row is shorter. None where all rows are equally long.
        head_target: ``[B * (K-1)]`` int64, their output rows. Where the row is shorter, a spare
            one behind the tokens: row T for all of them on a host, one for each elsewhere.
    """

    window: Tensor
    head: Tensor | None
    head_target: Tensor | None


@dataclass(slots=True)
class StepPlan:
    """What a step's metadata carries for the convolutions of this backend.

    Attributes:
        gathers: Made by the first convolution that needs it, or with the metadata of a captured
            step.
        longest: Tokens that no row of a ragged step has more of.
        single_slot: The slot of an eager step of one row, where a plugin has a way for that alone.
    """

    gathers: Gathers | None = None
    longest: int | None = None
    single_slot: int | None = None


class TorchBackend(PluginBackend):
    """The whole contract in torch operators. A plugin subclasses it and names its device.

    A subclass may know a faster way for the device's arithmetic: :meth:`_convolve` for rows of
    equal length, :meth:`_convolve_packed` for a packed stream, :meth:`_decode` for a whole decode
    step of one stream.
    """

    window_layouts: ClassVar[tuple[str, ...]] = ("dense", "inputs", "dedup")
    copies_shape: ClassVar[bool] = True

    def __init__(
        self, *, spec: StateSpec, device: torch.device, pool: ConvStatePool | None
    ) -> None:
        """Build the state, unless an adopted pool brings it."""
        super().__init__(spec=spec, device=device, pool=pool)
        self._ordered = self.device.type == "cpu"
        self._static: Gathers | None = None
        self._rows: dict[tuple[int, str], StateRows] = self.pool.new_cache()

    def _prepare_static(self, buffers: MetadataBuffers) -> None:
        rows, size = buffers.max_bs, self.spec.window_size
        self._static = Gathers(
            *(
                buffers.allocate(*shape, dtype=torch.int64)
                for shape in ((rows, size), (rows, size), (rows * size,))
            )
        )

    def _new_plan(self) -> StepPlan:
        return StepPlan()

    def _begin(self, batch: ForwardBatch) -> None:
        super()._begin(batch)
        if not self._rows:
            # Here rather than at the first convolution, which may run under a capture.
            for layer_id in range(self.spec.num_layers):
                for stream in self.spec.layer_streams(layer_id):
                    self._state(layer_id, stream.name)

    def _fill(self, meta: ShortConvMetadata, batch: ForwardBatch, buffers: MetadataBuffers) -> None:
        fill_metadata(meta, batch, self.pool, buffers)
        if meta.tree_taps is not None:
            self.pool.windows.store_paths(meta.tree_taps)
        if meta.forward_mode is ForwardMode.TARGET_VERIFY:
            self.pool.windows.store_resumes(meta.has_initial_state)
            if self.pool.recurrent is not None and self.pool.recurrent.records is not None:
                self.pool.recurrent.records.store_step(meta.has_initial_state, meta.tree_taps)
        if buffers is self._buffers:
            meta.plan.longest = meta.num_tokens
            self._fill_static_gathers(meta)

    def _fill_static_gathers(self, meta: ShortConvMetadata) -> None:
        """Refresh the step's indexes where recorded layers read them, at fixed addresses."""
        ragged = meta.forward_mode.is_ragged
        if self._static is None or not (ragged or meta.num_accept_tokens is not None):
            return
        rows, size = meta.batch_size, self.spec.window_size
        static, fresh = self._static, self._make_gathers(meta)
        static.window[:rows].copy_(fresh.window)
        head = head_target = None
        if fresh.head is not None and fresh.head_target is not None:
            assert static.head is not None
            assert static.head_target is not None
            head = static.head[:rows].copy_(fresh.head)
            head_target = static.head_target[: rows * size].copy_(fresh.head_target)
        meta.plan.gathers = Gathers(static.window[:rows], head, head_target)

    def _state(self, layer_id: int, stream: str) -> StateRows:
        """Return one stream's state; an adopted pool may be bound late, and anew."""
        rows = self._rows.get((layer_id, stream))
        if rows is None:
            state = self.pool.conv(layer_id, stream)
            rows = StateRows(state, time_major=self.spec.window_axis == "time")
            self._rows[layer_id, stream] = rows
        return rows

    def _gathers_for(self, meta: ShortConvMetadata) -> Gathers:
        """Return the step's shared indexes; the first convolution of an eager step makes them."""
        plan: StepPlan = meta.plan
        if plan.gathers is None:
            plan.gathers = self._make_gathers(meta)
        return plan.gathers

    def _make_gathers(self, meta: ShortConvMetadata) -> Gathers:
        size = self.spec.window_size
        start = meta.cu[:-1, None]  # [B, 1]
        length = meta.cu[1:] - meta.cu[:-1]  # [B]
        kept = length
        if meta.num_accept_tokens is not None:
            kept = torch.minimum(meta.num_accept_tokens.clamp(min=0).to(torch.int64), length)
        column = torch.arange(size, device=start.device, dtype=torch.int64)  # [K-1]
        place = (kept - size)[:, None] + column  # [B, K-1], negative = old window
        window = torch.where(place >= 0, place + start, place)
        if not meta.forward_mode.is_ragged:
            return Gathers(window, None, None)
        head = start + column
        spare: Tensor | int = meta.num_tokens
        if not self._ordered:
            count = torch.arange(
                self._spare_rows(meta.batch_size), device=start.device, dtype=torch.int64
            )
            spare = count.view(-1, size) + spare
        target = torch.where(column < length[:, None], head, spare).view(-1)
        return Gathers(window, head.clamp(max=meta.num_tokens - 1), target)

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
        # Without rows all tokens are padding, and a gather would have no row to read.
        if meta.num_tokens == 0 or meta.batch_size == 0:
            return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        if weight.dim() == 3:
            weight = weight.squeeze(1)
        conv = ConvParams(weight, bias, activation, residual)
        state = self._state(layer_id, stream)
        if meta.forward_mode is ForwardMode.DECODE:
            y = self._decode(x, conv, state, meta)
        elif meta.forward_mode.is_ragged:
            y = self._extend(x, conv, state, meta)
        else:
            y = self._draft(x, conv, state, layer_id, stream, meta)
        return _zero_padding(y, meta) if meta.padded else y

    def _decode(
        self, x: Tensor, conv: ConvParams, state: StateRows, meta: ShortConvMetadata
    ) -> Tensor:
        old = self._read_once(state, meta)  # [B, K-1, D]
        fresh = torch.where(meta.cache_mask, old, 0) if meta.may_start_afresh else old
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        convolve_step(fresh, x, conv, out=y)
        state.append(x, old, fresh, meta)
        return y

    def _read_once(self, state: StateRows, meta: ShortConvMetadata) -> Tensor:
        """Return the rows' windows, of no use after the call; a plugin may keep memory for them."""
        return state.read(meta.safe_idx)

    def _extend(
        self, x: Tensor, conv: ConvParams, state: StateRows, meta: ShortConvMetadata
    ) -> Tensor:
        """Rows of any length: convolve all tokens as one row, then redo each row's first K-1."""
        gathers = self._gathers_for(meta)
        assert gathers.head is not None
        assert gathers.head_target is not None
        tokens, size, dim = meta.num_tokens, self.spec.window_size, x.shape[1]
        storage = self._convolve_packed(x, conv)
        old = state.read(meta.safe_idx)
        # The mask selects: what a stale slot holds, NaN included, must not reach an output.
        fresh = torch.where(meta.cache_mask, old, 0)
        first = x.index_select(0, gathers.head.view(-1)).view(-1, size, dim)
        head = torch.empty_like(first)
        self._convolve(torch.cat([fresh, first], dim=1), conv, head)
        storage.index_copy_(0, gathers.head_target, head.view(-1, dim))
        state.advance(x, self._gathers_for(meta).window, old, fresh, meta)
        return storage[:tokens]

    def _draft(
        self,
        x: Tensor,
        conv: ConvParams,
        state: StateRows,
        layer_id: int,
        stream: str,
        meta: ShortConvMetadata,
    ) -> Tensor:
        """Verify and draft-extend: dtn tokens per row, of which some will be kept."""
        assert meta.tokens_per_row is not None
        rows, per_row, dim = meta.batch_size, meta.tokens_per_row, x.shape[1]
        old = state.read(meta.safe_idx)
        fresh = torch.where(meta.cache_mask, old, 0)
        inputs = torch.cat([fresh, x.view(rows, per_row, dim)], dim=1)  # [B, K-1+dtn, D]
        y = torch.empty((rows, per_row, dim), dtype=x.dtype, device=x.device)
        if meta.tree_taps is None:
            self._convolve(inputs, conv, y)
        else:
            nodes = select_nodes(inputs, meta.tree_taps)  # [B, dtn, K, D]
            self._convolve(nodes.flatten(0, 1), conv, y.view(-1, 1, dim))
        if meta.forward_mode is ForwardMode.TARGET_VERIFY:
            self.pool.windows.store(layer_id, stream, inputs, meta.tree_taps)
        else:
            state.advance(x, self._gathers_for(meta).window, old, fresh, meta)
        return y.view(-1, dim)

    def _convolve_packed(self, x: Tensor, conv: ConvParams) -> Tensor:
        """Convolve ``[T, D]`` as one row into the first T rows of ``[T + spare or more, D]``.

        The first K-1 rows mean nothing; the caller overwrites them. Spare rows take the outputs
        that a row shorter than K-1 has no place for: one on a host, B * (K-1) elsewhere.
        """
        tokens, size = x.shape[0], self.spec.window_size
        meta = self.forward_metadata
        rows = tokens + self._spare_rows(0 if meta is None else meta.batch_size)
        storage = torch.empty((rows, x.shape[1]), dtype=x.dtype, device=x.device)
        if tokens > size:
            self._convolve(x[None], conv, storage[None, size:tokens])
        return storage

    def _spare_rows(self, batch_size: int) -> int:
        """Rows that a packed step's outputs have room for behind its tokens."""
        return 1 if self._ordered else batch_size * self.spec.window_size

    def _convolve(self, inputs: Tensor, conv: ConvParams, out: Tensor) -> None:
        """Convolve ``[N, n + K-1, D]`` into ``[N, n, D]``; a plugin may know a faster way."""
        convolve(inputs, conv, out=out)

    @hookimpl
    def gated_delta(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor,
        beta: Tensor,
        A_log: Tensor,
        dt_bias: Tensor | None,
        layer_id: int,
        forward_batch: ForwardBatch,
        scale: float,
        lower_bound: float | None,
        normalize_qk: bool,
    ) -> Tensor:
        """See :meth:`sconv.hookspecs.StepSpec.gated_delta`."""
        meta = self.conv_state_metadata(layer_id, forward_batch)
        if meta.num_tokens == 0 or meta.batch_size == 0:
            return torch.zeros(v.shape, dtype=v.dtype, device=v.device)
        recurrent = self.pool.recurrent
        assert recurrent is not None
        tokens = delta.activate(
            q,
            k,
            v,
            gate,
            beta,
            A_log,
            dt_bias,
            scale=scale,
            lower_bound=lower_bound,
            normalize_qk=normalize_qk,
        )
        if meta.forward_mode is ForwardMode.DECODE:
            out = delta.decode(recurrent, layer_id, tokens, meta)
        elif meta.forward_mode.is_ragged:
            out = delta.extend(
                recurrent,
                layer_id,
                tokens,
                meta,
                longest=self._longest(meta),
                on_host=self._ordered,
            )
        else:
            verify = meta.forward_mode is ForwardMode.TARGET_VERIFY
            out = delta.draft(recurrent, layer_id, tokens, meta, verify=verify)
        out = out.to(v.dtype)
        return _zero_padding(out, meta) if meta.padded else out

    def _longest(self, meta: ShortConvMetadata) -> int:
        """Return the longest row: read once per eager step, of a captured one all tokens."""
        plan: StepPlan = meta.plan
        if plan.longest is None:
            plan.longest = int((meta.cu[1:] - meta.cu[:-1]).max())
        return plan.longest

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
            self.verify_rows,
            last_correct_step_indices=last_correct_step_indices,
            mamba_track_indices=mamba_track_indices,
            mamba_steps_to_track=mamba_steps_to_track,
            req_pool_indices=req_pool_indices,
        )
        slots = torch.empty(rows, dtype=torch.int64, device=self.device)
        if self.verify_by_slots:
            self.pool.lookup_slots(None, req_pool_indices, out=slots)
        else:
            self.pool.lookup_slots(req_pool_indices, None, out=slots)
        self.pool.translate_(slots)
        kept = last_correct_step_indices
        live = (slots > 0) & (slots < self.pool.num_rows) & self._is_node(kept)
        snapshot = None
        if mamba_track_indices is not None and mamba_steps_to_track is not None:
            targets = self.pool.translate_(mamba_track_indices.to(torch.int64, copy=True))
            # A row that keeps nothing has passed no boundary either.
            due = live & (targets > 0) & (targets < self.pool.num_rows)
            due &= self._is_node(mamba_steps_to_track)
            snapshot = (self._node(mamba_steps_to_track), torch.where(due, targets, 0), due)
        slots = torch.where(live, slots, 0)
        self._commit(self._node(kept), slots, live, snapshot)
        if self.pool.recurrent is not None:
            delta.commit(
                self.pool.recurrent,
                self._node(kept),
                slots,
                live,
                snapshot,
                tree=self.verify_tree,
                on_host=self._ordered,
            )

    def _is_node(self, steps: Tensor) -> Tensor:
        return (steps >= 0) & (steps < self.verify_tokens)

    def _node(self, steps: Tensor) -> Tensor:
        """Return steps as int64 that can be looked up, also where a row has none."""
        return steps.to(torch.int64).clamp(0, self.verify_tokens - 1)

    def _commit(
        self,
        nodes: Tensor,
        slots: Tensor,
        live: Tensor,
        snapshot: tuple[Tensor, Tensor, Tensor] | None,
    ) -> None:
        """Move windows to a node of the last verify step, and take snapshots, in all layers.

        Args:
            nodes: ``[B]`` int64 node of each row.
            slots: ``[B]`` int64 rows of the pool, 0 where a row is not live.
            live: ``[B]`` bool, rows that change.
            snapshot: The same three for the snapshots, or None.
        """
        windows, tree = self.pool.windows, self.verify_tree
        for layer_id, layer in enumerate(self.pool.layers):
            old = layer.index_select(0, slots)
            kept = windows.window_after(layer_id, nodes, old, tree=tree)
            # Both are read before the first is written: a window may be made from the old one.
            taken = None
            if snapshot is not None:
                taken = windows.window_after(layer_id, snapshot[0], old, tree=tree)
            layer.index_copy_(0, slots, torch.where(live[:, None, None], kept, old))
            if snapshot is not None and taken is not None:
                _, targets, due = snapshot
                there = layer.index_select(0, targets)
                layer.index_copy_(0, targets, torch.where(due[:, None, None], taken, there))


def _zero_padding(y: Tensor, meta: ShortConvMetadata) -> Tensor:
    """Zero the outputs of rows without a slot and of tokens past the last row."""
    live = meta.cache_indices >= 0
    if meta.tokens_per_row is None:
        live = live.index_select(0, meta.si)
        live &= torch.arange(meta.num_tokens, device=y.device, dtype=torch.int64) < meta.cu[-1]
    else:
        live = live[:, None].expand(-1, meta.tokens_per_row).reshape(-1)
    return torch.where(live.view(-1, *[1] * (y.dim() - 1)), y, 0)
