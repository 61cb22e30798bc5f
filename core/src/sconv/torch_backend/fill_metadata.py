"""Step metadata in plain torch: what :mod:`sconv.torch_backend.backend` fills the buffers with.

No host sync and no shape that depends on data, so the same code runs eagerly, under fake tensors
and inside a capture. Results go to the buffers through ``out=``, which keeps their addresses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..state.pool import ConvStatePool
from ..step.batch import ForwardBatch, ForwardMode
from ..step.draft_tree import ancestor_taps, parents_from_links
from ..step.metadata import MetadataBuffers, ShortConvMetadata
from ..step.tracking import crossing_steps

__all__ = ["fill_metadata"]


def fill_metadata(
    meta: ShortConvMetadata,
    batch: ForwardBatch,
    pool: ConvStatePool,
    buffers: MetadataBuffers,
) -> None:
    """Fill the metadata of a step. In graph.

    Args:
        meta: Slices of ``buffers``.
        batch: The step.
        pool: Where slots are looked up.
        buffers: Lends its scratch, and the slots that the host translated where that is its job;
            what depends on the shape of the step alone is left as it is where it is filled.
    """
    if pool.translates_on_host:
        meta.cache_indices.copy_(buffers.host_slots[: meta.batch_size])
    else:
        pool.lookup_slots(batch.req_pool_indices, batch.slots, out=meta.cache_indices)
        pool.translate_(meta.cache_indices)
    meta.safe_idx.copy_(meta.cache_indices).clamp_(min=0)
    if buffers.shape_filled:
        if batch.seq_lens is not None:
            _fill_initial_state(meta, batch)
    else:
        _fill_lengths(meta, batch)
        _fill_initial_state(meta, batch)
        _fill_rows_of_tokens(meta, buffers)
    torch.ge(meta.cache_indices, 0, out=meta.cache_mask.view(meta.batch_size))
    meta.cache_mask.view(meta.batch_size).logical_and_(meta.has_initial_state)
    if meta.tree_taps is not None:
        parents = batch.parents
        if parents is None:
            assert batch.next_token is not None
            assert batch.next_sibling is not None
            parents = parents_from_links(batch.next_token, batch.next_sibling)
        ancestor_taps(parents, meta.tree_taps.shape[2], out=meta.tree_taps)
    _fill_writes(meta, batch)
    if not buffers.shape_filled:
        _fill_snapshots(meta, batch, pool, buffers)


def _fill_lengths(meta: ShortConvMetadata, batch: ForwardBatch) -> None:
    rows = meta.batch_size
    if batch.extend_seq_lens is not None:
        # Not an assignment, which would copy a number from the host on some devices.
        meta.cu[:1].zero_()
        torch.cumsum(batch.extend_seq_lens, 0, dtype=torch.int64, out=meta.cu[1:])
    elif meta.tokens_per_row:
        step = meta.tokens_per_row
        torch.arange(
            0, (rows + 1) * step, step, dtype=torch.int64, device=meta.cu.device, out=meta.cu
        )
    else:
        meta.cu.zero_()
    meta.query_start_loc.copy_(meta.cu)


def _fill_initial_state(meta: ShortConvMetadata, batch: ForwardBatch) -> None:
    if batch.extend_prefix_lens is not None:
        torch.gt(batch.extend_prefix_lens, 0, out=meta.has_initial_state)
    elif batch.seq_lens is not None:
        torch.gt(batch.seq_lens, 0, out=meta.has_initial_state)
    else:
        meta.has_initial_state.fill_(batch.forward_mode is not ForwardMode.IDLE)


def _fill_rows_of_tokens(meta: ShortConvMetadata, buffers: MetadataBuffers) -> None:
    if meta.num_tokens == 0:
        return
    if meta.tokens_per_row == 1:
        torch.arange(0, meta.num_tokens, dtype=torch.int32, device=meta.si.device, out=meta.si)
        return
    # A running count of rows that have started is the row of a token; rows of length 0 start where
    # their successor does and are skipped by it. Costs B + T, where a comparison costs B x T.
    starts = buffers.starts[: meta.num_tokens + 1].zero_()
    ends = meta.cu[1:].clamp(max=meta.num_tokens)
    starts.scatter_add_(0, ends, torch.ones_like(ends, dtype=torch.int32))
    torch.cumsum(starts[:-1], 0, dtype=torch.int32, out=meta.si)
    meta.si.clamp_(max=max(meta.batch_size - 1, 0))


def _fill_snapshots(
    meta: ShortConvMetadata, batch: ForwardBatch, pool: ConvStatePool, buffers: MetadataBuffers
) -> None:
    meta.track_conv_indices.zero_()
    if batch.mamba_track_indices is None:
        meta.track_cache_indices.fill_(-1)
        return
    if pool.translates_on_host:
        meta.track_cache_indices.copy_(buffers.host_tracks[: meta.batch_size])
    else:
        meta.track_cache_indices.copy_(batch.mamba_track_indices)
        pool.translate_(meta.track_cache_indices)
    wanted = meta.writes & (meta.track_cache_indices >= 0)
    if batch.mamba_track_mask is not None:
        wanted &= batch.mamba_track_mask
    tokens = _tokens_until_snapshot(meta, batch, pool)  # [B], or None: the row's last token
    if tokens is not None:
        lengths = meta.cu[1:] - meta.cu[:-1]
        wanted &= (tokens >= 0) & (tokens <= lengths)
        window = pool.spec.window_size
        column = torch.arange(window, device=tokens.device, dtype=torch.int64)
        source = (tokens - window)[:, None] + column  # [B, K-1], negative = old window
        source = torch.where(source >= 0, source + meta.cu[:-1, None], source)
        meta.track_conv_indices.copy_(torch.where(wanted[:, None], source, 0))
    meta.track_cache_indices.masked_fill_(~wanted, -1)


def _tokens_until_snapshot(
    meta: ShortConvMetadata, batch: ForwardBatch, pool: ConvStatePool
) -> Tensor | None:
    """``[B]`` int64: tokens of the row that its snapshot has taken in; -1 = no snapshot."""
    if batch.forward_mode is ForwardMode.DRAFT_EXTEND:
        assert batch.seq_lens is not None
        assert batch.num_accept_tokens is not None
        grid = pool.spec.track_grid
        if grid is None:
            return torch.full_like(meta.cu[1:], -1)
        node = crossing_steps(batch.seq_lens, batch.num_accept_tokens, grid)
        return torch.where(node >= 0, node + 1, -1)
    if batch.extend_prefix_lens is None:
        return None
    if batch.mamba_track_seqlens is None:
        return meta.cu[1:] - meta.cu[:-1]
    length = batch.mamba_track_seqlens.to(torch.int64)
    return torch.where(length >= 0, length - batch.extend_prefix_lens, -1)


def _fill_writes(meta: ShortConvMetadata, batch: ForwardBatch) -> None:
    # Rows on the dummy would all write to it, each its own window.
    torch.gt(meta.cache_indices, 0, out=meta.writes)
    if batch.forward_mode is ForwardMode.TARGET_VERIFY:
        meta.writes.zero_()
    elif meta.num_accept_tokens is not None:
        assert batch.num_accept_tokens is not None
        meta.num_accept_tokens.copy_(batch.num_accept_tokens)
        meta.writes.logical_and_(meta.num_accept_tokens >= 0)
        meta.writes.logical_and_(meta.num_accept_tokens <= (meta.tokens_per_row or 0))
    elif batch.extend_seq_lens is not None:
        meta.writes.logical_and_(batch.extend_seq_lens > 0)
    elif batch.forward_mode is ForwardMode.IDLE:
        meta.writes.zero_()
