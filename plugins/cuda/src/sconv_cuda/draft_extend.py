"""Draft tokens whose acceptance is known: convolve all, move the window on by the accepted ones."""

from __future__ import annotations

import triton.language as tl

from .arithmetic import convolved, rounded
from .launch import kernel
from .mode import Mode
from .overlap import wait
from .streams import element, owned, pick, windows_of
from .taps import load_offset, load_taps
from .tiles import DRAFT_EXTEND_TILES

__all__ = ["DRAFT_EXTEND", "draft_extend"]


@kernel
def draft_extend(
    xs,  # STREAMS x [B * dtn, D]
    x_strides,
    weights,  # STREAMS x [D, K]
    biases,  # STREAMS x [D]; read if has_bias
    ys,  # STREAMS x [B * dtn, D] contiguous
    has_bias,
    dims,
    starts,  # first channel of each stream in its layer
    firsts,
    state,  # the layer, [S, K-1, D] or [S, D, K-1]
    slot_stride,
    column_stride,
    channel_stride,
    slots_index,  # [B] int32
    accepts_index,  # [B] int32
    writes_index,  # [B] bool
    resumes_index,  # [B] bool, the row resumes its window
    sources_index,  # [B, K-1] int64, columns of the snapshot; read if tracks
    tracks_index,  # [B] int64; read if tracks
    tracks,
    drafts,
    rows,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    TIME: tl.constexpr,
    VEC: tl.constexpr,
    SILU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    STREAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program owns all tokens of one row and BLOCK channels of one stream, DEPTH at a time."""
    row, block, dim, channel, inside = owned(firsts, dims, BLOCK, VEC, STREAMS)
    inside = inside & (row < rows)
    row = tl.minimum(row, rows - 1)
    taps = load_taps(pick(weights, firsts, block, STREAMS), channel, inside, K, VEC > 1, SILU)
    offset = load_offset(pick(biases, firsts, block, STREAMS), has_bias, channel, inside, SILU)
    wait(PDL)

    slot = tl.load(slots_index + row).to(tl.int64)
    accepts = tl.load(accepts_index + row)
    writes = tl.load(writes_index + row).to(tl.int1)
    resumes = tl.load(resumes_index + row).to(tl.int1)
    target = tl.load(tracks_index + row, mask=tracks != 0, other=-1).to(tl.int64)
    start = pick(starts, firsts, block, STREAMS)
    windows, slot_step, column_step = windows_of(
        state, start, channel, slot_stride, column_stride, channel_stride, TIME, VEC
    )
    window = windows + slot * slot_step
    x_step = pick(x_strides, firsts, block, STREAMS).to(tl.int64) * VEC
    token = row.to(tl.int64) * drafts
    x = pick(xs, firsts, block, STREAMS) + token * x_step + channel
    y = pick(ys, firsts, block, STREAMS) + token * dim + channel
    kind: tl.constexpr = state.dtype.element_ty
    old = inside & (slot >= 0) & resumes

    history = ()
    for j in tl.static_range(K - 1):
        history = history + (tl.load(window + j * column_step, mask=old, other=0).to(tl.float32),)
    moved = ()
    for j in tl.static_range(K - 1):
        column = element(x, x_step, window, column_step, accepts + j, inside & writes, old, K, kind)
        moved = moved + (column,)
    if target >= 0:
        snapshot = windows + target * slot_step
        kept = ()
        for j in tl.static_range(K - 1):
            source = tl.load(sources_index + row * (K - 1) + j)
            # Snapshots name packed tokens; columns of the old window count from the newest, -1.
            place = tl.where(source >= 0, source - token, source).to(tl.int32) + (K - 1)
            column = element(x, x_step, window, column_step, place, inside, old, K, kind)
            kept = kept + (column,)
        for j in tl.static_range(K - 1):
            tl.store(snapshot + j * column_step, kept[j], mask=inside)

    for begin in range(0, drafts, DEPTH):
        inputs = ()
        for i in tl.static_range(DEPTH):
            there = inside & (begin + i < drafts)
            inputs = inputs + (tl.load(x + (begin + i) * x_step, mask=there, other=0),)
        for i in tl.static_range(DEPTH):
            t = begin + i
            current = inputs[i].to(tl.float32)
            total = convolved(history, inputs[i], taps, offset, 0, K, SILU, RESIDUAL)
            total = tl.where(slot >= 0, total, 0.0)
            tl.store(y + t * dim, rounded(total, y.dtype.element_ty), mask=inside & (t < drafts))
            shifted = ()
            for j in tl.static_range(1, K - 1):
                shifted = shifted + (history[j],)
            history = shifted + (current,)
    for j in tl.static_range(K - 1):
        tl.store(window + j * column_step, moved[j], mask=inside & writes)


DRAFT_EXTEND = Mode(
    kernel=draft_extend,
    tiles=DRAFT_EXTEND_TILES,
    work=lambda meta: meta.num_tokens,
    units=lambda meta, tile: meta.batch_size,
    step=lambda meta: {
        "slots_index": meta.cache_indices,
        "accepts_index": meta.num_accept_tokens,
        "writes_index": meta.writes,
        "resumes_index": meta.has_initial_state,
        "sources_index": meta.track_conv_indices,
        "tracks_index": meta.track_cache_indices,
        "tracks": int(meta.tracks),
        "drafts": meta.tokens_per_row,
        "rows": meta.batch_size,
    },
)
