"""One token per row: convolve, shift the window, snapshot it where asked."""

from __future__ import annotations

import triton.language as tl

from .arithmetic import convolved, rounded
from .launch import kernel
from .mode import Mode
from .overlap import prefetch, release, wait
from .streams import owned, pick, windows_of
from .taps import load_offset, load_taps
from .tiles import DECODE_TILES

__all__ = ["DECODE", "decode"]


@kernel
def decode(
    xs,  # STREAMS x [B, D]
    x_strides,
    weights,  # STREAMS x [D, K]
    biases,  # STREAMS x [D]; read if has_bias
    ys,  # STREAMS x [B, D] contiguous
    has_bias,
    dims,
    starts,  # first channel of each stream in its layer
    firsts,
    state,  # the layer, [S, K-1, D] or [S, D, K-1]
    slot_stride,
    column_stride,
    channel_stride,
    slots_index,  # [B] int32
    resumes_index,  # [B] bool, the row resumes its window; read if FRESH
    tracks_index,  # [B] int64
    rows,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    TIME: tl.constexpr,
    VEC: tl.constexpr,
    SILU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    STREAMS: tl.constexpr,
    AHEAD: tl.constexpr,
    TRACKS: tl.constexpr,
    FRESH: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program owns DEPTH rows and BLOCK channels of one stream.

    AHEAD ones are so short that waiting is most of what they do (:mod:`.overlap`).
    """
    if AHEAD:
        release(PDL)
    unit, block, dim, channel, inside = owned(firsts, dims, BLOCK, VEC, STREAMS)
    rows_before = unit * DEPTH
    x_step = pick(x_strides, firsts, block, STREAMS).to(tl.int64) * VEC
    start = pick(starts, firsts, block, STREAMS)
    windows, slot_step, column_step = windows_of(
        state, start, channel, slot_stride, column_stride, channel_stride, TIME, VEC
    )
    slots = ()
    if AHEAD:
        for i in tl.static_range(DEPTH):
            there = rows_before + i < rows
            slot = tl.load(slots_index + rows_before + i, mask=there, other=-1)
            slots = slots + (slot.to(tl.int64),)
    taps = load_taps(pick(weights, firsts, block, STREAMS), channel, inside, K, VEC > 1, SILU)
    offset = load_offset(pick(biases, firsts, block, STREAMS), has_bias, channel, inside, SILU)
    if AHEAD and PDL and TIME:
        begin = (block - pick(firsts, firsts, block, STREAMS)) * BLOCK
        prefetch(
            pick(xs, firsts, block, STREAMS) + tl.minimum(rows_before, rows - 1) * x_step,
            x_step,
            1,
            state + start * VEC + tl.maximum(slots[0], 0) * slot_step,
            column_step,
            begin,
            dim,
            K,
            1,
            BLOCK,
        )
    wait(PDL)

    x = pick(xs, firsts, block, STREAMS) + channel

    # Everything is read before anything is written, so that all reads are under way at once.
    targets = ()
    for i in tl.static_range(DEPTH):
        row = rows_before + i
        if not AHEAD:
            slot = tl.load(slots_index + row, mask=row < rows, other=-1)
            slots = slots + (slot.to(tl.int64),)
        if TRACKS:
            target = tl.load(tracks_index + row, mask=row < rows, other=-1)
            targets = targets + (target.to(tl.int64),)
    inputs = ()
    olds = ()
    for i in tl.static_range(DEPTH):
        row = rows_before + i
        inputs = inputs + (
            tl.load(
                x + row * x_step,
                mask=inside & (row < rows),
                other=0,
            ),
        )
        window = windows + slots[i] * slot_step
        known = inside & (slots[i] >= 0)
        if FRESH:
            known = known & tl.load(resumes_index + row, mask=row < rows, other=0).to(tl.int1)
        old = ()
        for j in tl.static_range(K - 1):
            old = old + (
                tl.load(
                    window + j * column_step,
                    mask=known,
                    other=0,
                ),
            )
        olds = olds + (old,)
    out = pick(ys, firsts, block, STREAMS)
    y = out + channel
    for i in tl.static_range(DEPTH):
        row = rows_before + i
        live = inside & (slots[i] >= 0)
        total = convolved(olds[i], inputs[i], taps, offset, 0, K, SILU, RESIDUAL)
        total = tl.where(slots[i] >= 0, total, 0.0)
        at = row.to(tl.int64) * dim
        tl.store(
            y + at,
            rounded(total, out.dtype.element_ty),
            mask=inside & (row < rows),
        )

        window = windows + slots[i] * slot_step
        entering = rounded(inputs[i], state.dtype.element_ty)
        for j in tl.static_range(K - 2):
            tl.store(
                window + j * column_step,
                olds[i][j + 1],
                mask=live,
            )
        tl.store(
            window + (K - 2) * column_step,
            entering,
            mask=live,
        )
        if TRACKS:
            if targets[i] >= 0:
                snapshot = windows + targets[i] * slot_step
                for j in tl.static_range(K - 2):
                    tl.store(snapshot + j * column_step, olds[i][j + 1], mask=live)
                tl.store(snapshot + (K - 2) * column_step, entering, mask=live)


DECODE = Mode(
    kernel=decode,
    tiles=DECODE_TILES,
    work=lambda meta: meta.batch_size,
    units=lambda meta, tile: -(-meta.batch_size // tile.depth),
    step=lambda meta: {
        "slots_index": meta.cache_indices,
        "resumes_index": meta.has_initial_state,
        "tracks_index": meta.track_cache_indices,
        "rows": meta.batch_size,
    },
    constants=lambda meta, windows, time: {"FRESH": meta.may_start_afresh},
    flags=lambda meta, tile, settled: {
        "AHEAD": tile.ahead and settled,
        "TRACKS": meta.tracks,
    },
)
