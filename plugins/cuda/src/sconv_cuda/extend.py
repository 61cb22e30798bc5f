"""Rows of any length: convolve packed tokens, and move every row's window on in the same launch.

Two kinds of program, so that no two touch one window:

* A *body* program owns DEPTH consecutive tokens of a channel block, whatever rows they are in. It
  computes the tokens that have K-1 predecessors in their row, hence from ``x`` alone.
* A *head* program owns the first K-1 tokens of one row. It alone reads the row's old window, so it
  also writes the new one and the snapshot, whose columns are inputs or old columns.

Token t has K-1 predecessors in its row if and only if token t-(K-1) is of the same row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import convolved, rounded
from .launch import kernel
from .mode import Mode
from .overlap import wait
from .streams import element, owned, pick, windows_of
from .taps import load_offset, load_taps
from .tiles import EXTEND_TILES

__all__ = ["EXTEND", "extend"]


@kernel
def extend(
    xs,  # STREAMS x [T, D]
    x_strides,
    weights,  # STREAMS x [D, K]
    biases,  # STREAMS x [D]; read if has_bias
    ys,  # STREAMS x [T, D] contiguous
    has_bias,
    dims,
    starts,  # first channel of each stream in its layer
    firsts,
    state,  # the layer, [S, K-1, D] or [S, D, K-1]
    slot_stride,
    column_stride,
    channel_stride,
    slots_index,  # [B] int32
    rows_index,  # [T] int32, row of each token
    bounds_index,  # [B+1] int32, first token of each row
    resumes_index,  # [B] bool, the row resumes its window
    sources_index,  # [B, K-1] int64, columns of the snapshot; read if tracks
    tracks_index,  # [B] int64; read if tracks
    tracks,
    rows,
    tokens,
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
    """Programs come in the order: all heads, all bodies; the channel blocks of one side by side."""
    unit, block, dim, channel, inside = owned(firsts, dims, BLOCK, VEC, STREAMS)

    taps = load_taps(pick(weights, firsts, block, STREAMS), channel, inside, K, VEC > 1, SILU)
    offset = load_offset(pick(biases, firsts, block, STREAMS), has_bias, channel, inside, SILU)
    x = pick(xs, firsts, block, STREAMS) + channel
    x_step = pick(x_strides, firsts, block, STREAMS).to(tl.int64) * VEC
    y = pick(ys, firsts, block, STREAMS) + channel
    y_step = dim.to(tl.int64)
    wait(PDL)

    if unit < rows:
        start = pick(starts, firsts, block, STREAMS)
        windows, slot_step, column_step = windows_of(
            state, start, channel, slot_stride, column_stride, channel_stride, TIME, VEC
        )
        _head(
            x,
            x_step,
            y,
            y_step,
            inside,
            taps,
            offset,
            windows,
            slot_step,
            column_step,
            tl.load(slots_index + unit).to(tl.int64),
            tl.load(bounds_index + unit),
            tl.load(bounds_index + unit + 1),
            tl.load(resumes_index + unit).to(tl.int1),
            sources_index + unit * (K - 1),
            tl.load(tracks_index + unit, mask=tracks != 0, other=-1).to(tl.int64),
            K,
            SILU,
            RESIDUAL,
        )
    else:
        _body(
            x,
            x_step,
            y,
            y_step,
            inside,
            taps,
            offset,
            slots_index,
            rows_index,
            bounds_index + rows,
            (unit - rows) * DEPTH,
            tokens,
            K,
            DEPTH,
            SILU,
            RESIDUAL,
        )


@triton.jit
def _body(
    x,
    x_step,
    y,
    y_step,
    inside,
    taps,
    offset,
    slots_index,
    rows_index,
    end_index,
    begin,
    tokens,
    K: tl.constexpr,
    DEPTH: tl.constexpr,
    SILU: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    # All inputs are read before the first store, and before it is known which of them count.
    inputs = ()
    for i in tl.static_range(DEPTH + K - 1):
        t = begin + i - (K - 1)
        there = inside & (t >= 0) & (t < tokens)
        inputs = inputs + (tl.load(x + t.to(tl.int64) * x_step, mask=there, other=0),)
    end = tl.load(end_index)
    last = tl.minimum(begin + DEPTH, tokens) - 1
    row = tl.load(rows_index + last)
    before = tl.load(rows_index + begin - (K - 1), mask=begin >= K - 1, other=-1)
    live = tl.load(slots_index + row) >= 0
    # One row with a slot covers the tile and the K-1 tokens before it: no token is looked at alone.
    plain = (row == before) & live & (begin + DEPTH <= end)

    for i in tl.static_range(DEPTH):
        t = begin + i
        total = convolved(inputs, inputs[i + K - 1], taps, offset, i, K, SILU, RESIDUAL)
        if plain:
            tl.store(y + t * y_step, rounded(total, y.dtype.element_ty), mask=inside)
        elif t < tokens:
            own = tl.load(rows_index + t)
            far = tl.load(rows_index + t - (K - 1), mask=t >= K - 1, other=-1)
            padding = t >= end
            total = tl.where((tl.load(slots_index + own) >= 0) & (t < end), total, 0.0)
            written = inside & ((own == far) | padding)
            tl.store(y + t * y_step, rounded(total, y.dtype.element_ty), mask=written)


@triton.jit
def _head(
    x,
    x_step,
    y,
    y_step,
    inside,
    taps,
    offset,
    windows,
    slot_step,
    column_step,
    slot,
    begin,
    end,
    resumes,
    source_index,
    target,
    K: tl.constexpr,
    SILU: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    length = end - begin
    live = inside & (slot >= 0) & (length > 0)
    writes = live & (slot > 0)
    kind: tl.constexpr = windows.dtype.element_ty
    window = windows + slot * slot_step
    own = x + begin.to(tl.int64) * x_step
    history = ()
    for j in tl.static_range(K - 1):
        # Selected, not multiplied: a NaN that a stale slot holds stays there.
        history = history + (tl.load(window + j * column_step, mask=live & resumes, other=0),)
    inputs = ()
    for j in tl.static_range(K - 1):
        inputs = inputs + (
            tl.load(x + (begin + j).to(tl.int64) * x_step, mask=live & (j < length), other=0),
        )
    # Column j of the new window is element length + j of the old window followed by the inputs.
    moved = ()
    for j in tl.static_range(K - 1):
        column = element(own, x_step, window, column_step, length + j, live, resumes, K, kind)
        moved = moved + (column,)
    if (target >= 0) & (slot > 0) & (length > 0):
        snapshot = windows + target * slot_step
        kept = ()
        for j in tl.static_range(K - 1):
            source = tl.load(source_index + j).to(tl.int32)
            # Snapshots name packed tokens; columns of the old window count from the newest, -1.
            place = tl.where(source >= 0, source - begin, source) + (K - 1)
            column = element(own, x_step, window, column_step, place, live, resumes, K, kind)
            kept = kept + (column,)
        for j in tl.static_range(K - 1):
            tl.store(snapshot + j * column_step, kept[j], mask=writes)

    for i in tl.static_range(K - 1):
        total = convolved(history + inputs, inputs[i], taps, offset, i, K, SILU, RESIDUAL)
        total = rounded(tl.where(slot >= 0, total, 0.0), y.dtype.element_ty)
        tl.store(y + (begin + i).to(tl.int64) * y_step, total, mask=inside & (i < length))
    for j in tl.static_range(K - 1):
        tl.store(window + j * column_step, moved[j], mask=writes)


EXTEND = Mode(
    kernel=extend,
    tiles=EXTEND_TILES,
    work=lambda meta: meta.num_tokens,
    units=lambda meta, tile: meta.batch_size + -(-meta.num_tokens // tile.depth),
    step=lambda meta: {
        "slots_index": meta.cache_indices,
        "rows_index": meta.si,
        "bounds_index": meta.query_start_loc,
        "resumes_index": meta.has_initial_state,
        "sources_index": meta.track_conv_indices,
        "tracks_index": meta.track_cache_indices,
        "tracks": int(meta.tracks),
        "rows": meta.batch_size,
        "tokens": meta.num_tokens,
    },
)
