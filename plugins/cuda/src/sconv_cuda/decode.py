"""One token per row: convolve, shift the window, snapshot it where asked."""

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sconv.metadata import ShortConvMetadata
from sconv.spec import StateSpec

from .arithmetic import finish
from .launch import Launcher, Tile, kernel
from .operands import Operands
from .streams import owned, pick, windows_of
from .taps import load_taps
from .tiles import DECODE, tile_for

__all__ = ["decode", "launch_decode"]


@kernel
def decode(
    xs,  # STREAMS x [B, D]
    x_strides,
    weights,  # STREAMS x [D, K]
    biases,  # STREAMS x [D]; read if has_bias
    ys,  # STREAMS x [B, D] contiguous
    dims,
    starts,  # first channel of each stream in its layer
    firsts,
    state,  # the layer, [S, K-1, D] or [S, D, K-1]
    slot_stride,
    column_stride,
    channel_stride,
    slots_index,  # [B] int32
    tracks_index,  # [B] int64; read if tracks
    tracks,
    has_bias,
    rows,
    blocks,
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
    """A program owns DEPTH rows and BLOCK channels of one stream."""
    unit, block, dim, channel, inside = owned(firsts, dims, blocks, BLOCK, VEC, STREAMS)
    rows_before = unit * DEPTH

    # No kernel of a step writes weights, so they are read before the one before has finished.
    taps = load_taps(pick(weights, firsts, block, STREAMS), channel, inside, K, VEC > 1)
    bias = pick(biases, firsts, block, STREAMS) + channel
    offset = tl.load(bias, mask=inside & (has_bias != 0), other=0).to(tl.float32)
    if PDL:
        gdc_wait()

    x = pick(xs, firsts, block, STREAMS) + channel
    x_step = pick(x_strides, firsts, block, STREAMS).to(tl.int64) * VEC
    start = pick(starts, firsts, block, STREAMS)
    windows, slot_step, column_step = windows_of(
        state, start, channel, slot_stride, column_stride, channel_stride, TIME, VEC
    )

    # Everything is read before anything is written, so that all reads are under way at once.
    slots = ()
    targets = ()
    for i in tl.static_range(DEPTH):
        row = rows_before + i
        slots = slots + (tl.load(slots_index + row, mask=row < rows, other=-1).to(tl.int64),)
        tracked = (row < rows) & (tracks != 0)
        targets = targets + (tl.load(tracks_index + row, mask=tracked, other=-1).to(tl.int64),)
    inputs = ()
    olds = ()
    for i in tl.static_range(DEPTH):
        row = rows_before + i
        inputs = inputs + (tl.load(x + row * x_step, mask=inside & (row < rows), other=0),)
        window = windows + slots[i] * slot_step
        old = ()
        for j in tl.static_range(K - 1):
            old = old + (tl.load(window + j * column_step, mask=inside & (slots[i] >= 0), other=0),)
        olds = olds + (old,)
    if PDL:
        gdc_launch_dependents()

    out = pick(ys, firsts, block, STREAMS)
    y = out + channel
    for i in tl.static_range(DEPTH):
        row = rows_before + i
        live = inside & (slots[i] >= 0)
        current = inputs[i].to(tl.float32)
        total = offset + current * taps[K - 1]
        for j in tl.static_range(K - 1):
            total += olds[i][K - 2 - j].to(tl.float32) * taps[K - 2 - j]
        total = finish(total, current, SILU, RESIDUAL)
        total = tl.where(slots[i] >= 0, total, 0.0)
        at = row.to(tl.int64) * dim
        tl.store(y + at, total.to(out.dtype.element_ty), mask=inside & (row < rows))

        window = windows + slots[i] * slot_step
        entering = inputs[i].to(state.dtype.element_ty)
        for j in tl.static_range(K - 2):
            tl.store(window + j * column_step, olds[i][j + 1], mask=live)
        tl.store(window + (K - 2) * column_step, entering, mask=live)
        if targets[i] >= 0:
            snapshot = windows + targets[i] * slot_step
            for j in tl.static_range(K - 2):
                tl.store(snapshot + j * column_step, olds[i][j + 1], mask=live)
            tl.store(snapshot + (K - 2) * column_step, entering, mask=live)


def launch_decode(
    launcher: Launcher,
    spec: StateSpec,
    operands: Operands,
    meta: ShortConvMetadata,
    tile: Tile | None = None,
) -> None:
    """Launch :func:`decode`; in the tile of the shape class, unless one is given."""
    layer, rows = operands.layer, meta.batch_size
    if tile is None:
        tile = tile_for(DECODE, rows * layer.width, layer.widest)
    shared, blocks = operands.arguments(tile)
    launcher(
        decode,
        -(-rows // tile.depth) * blocks,
        (
            *shared,
            meta.cache_indices,
            meta.track_cache_indices,
            int(meta.tracks),
            int(operands.has_bias),
            rows,
            blocks,
        ),
        (*operands.constants(spec, tile), launcher.pdl),
        warps=tile.warps,
        aligned=operands.vec > 1,
    )
