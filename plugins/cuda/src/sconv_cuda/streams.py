"""What a program works on: a unit (row, tile), and a channel block of one of several streams.

A kernel gets a tuple with one entry per stream for whatever differs between streams. The channel
blocks of all streams are numbered through; ``firsts[i]`` is the first block of stream i. Widths and
strides count VEC elements, so that the compiler sees how far addresses are aligned.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import rounded

__all__ = ["UNITS", "element", "owned", "pick", "windows_of"]

#: Units along the second axis of a grid that needs the third.
UNITS = tl.constexpr(32768)


@triton.jit
def pick(values, firsts, block, STREAMS: tl.constexpr):
    """Return the entry of the stream that owns a channel block."""
    chosen = values[0]
    for i in tl.static_range(1, STREAMS):
        chosen = tl.where(block >= firsts[i], values[i], chosen)
    return chosen


@triton.jit
def owned(firsts, dims, BLOCK: tl.constexpr, VEC: tl.constexpr, STREAMS: tl.constexpr):
    """Return unit, block, the stream's width, its channels ``[BLOCK]``, and which of them exist.

    Units run over two axes of the grid, so that there can be more than 65,535; the last ones of a
    launch may be none of its own.
    """
    block = tl.program_id(0)
    dim = pick(dims, firsts, block, STREAMS) * VEC
    channel = (block - pick(firsts, firsts, block, STREAMS)) * BLOCK + tl.arange(0, BLOCK)
    return tl.program_id(1) + tl.program_id(2) * UNITS, block, dim, channel, channel < dim


@triton.jit
def windows_of(
    state,
    start,
    channel,
    slot_stride,
    column_stride,
    channel_stride,
    TIME: tl.constexpr,
    VEC: tl.constexpr,
):
    """Return pointers to slot 0's oldest column, and the steps to the next slot and column."""
    if TIME:
        pointers = state + start * VEC + channel
        return pointers, slot_stride.to(tl.int64) * VEC, column_stride * VEC
    else:
        pointers = state + (start * VEC + channel) * channel_stride.to(tl.int64)
        return pointers, slot_stride.to(tl.int64), column_stride


@triton.jit
def element(x, x_step, window, column_step, place, live, old, K: tl.constexpr, DTYPE: tl.constexpr):
    """Return element ``place`` of a row's window followed by its inputs; zero where not ``live``.

    Columns of the window are zero where not ``old``: selected, not multiplied, so that a NaN that a
    stale slot holds stays there.
    """
    past = place < K - 1
    column = tl.maximum(tl.minimum(place, K - 2), 0)
    before = tl.load(window + column * column_step, mask=live & old & past, other=0)
    token = tl.maximum(place - (K - 1), 0).to(tl.int64)
    new = tl.load(x + token * x_step, mask=live & (place >= K - 1), other=0)
    return tl.where(past, rounded(before, DTYPE), rounded(new, DTYPE))
