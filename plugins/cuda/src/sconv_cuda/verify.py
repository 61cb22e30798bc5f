"""Draft tokens of a verify step: convolve, and keep what the commit needs. Pools are only read."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sconv.metadata import ShortConvMetadata
from sconv.windows import InputWindows, VerifyWindows

from .arithmetic import finish, scaled
from .launch import kernel
from .mode import Mode
from .overlap import release, wait
from .streams import owned, pick, windows_of
from .taps import load_taps
from .tiles import VERIFY_TILES

__all__ = ["VERIFY", "verify"]


@kernel
def verify(
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
    kept,  # the layer's verify windows: [B, dtn, D], or DENSE [B, dtn, K-1, D] in any order
    kept_row_stride,
    kept_token_stride,
    kept_column_stride,
    kept_channel_stride,
    slots_index,  # [B] int32
    taps_index,  # [B, dtn, K] int64, where the taps of a TREE's node lie in window ++ inputs
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
    AHEAD: tl.constexpr,
    TREE: tl.constexpr,
    DENSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program owns all tokens of one row and BLOCK channels of one stream, DEPTH at a time."""
    if AHEAD:
        release(PDL)
    row, block, dim, channel, inside = owned(firsts, dims, BLOCK, VEC, STREAMS)
    inside = inside & (row < rows)
    taps = load_taps(pick(weights, firsts, block, STREAMS), channel, inside, K, VEC > 1, SILU)
    bias = pick(biases, firsts, block, STREAMS) + channel
    offset = tl.load(bias, mask=inside & (has_bias != 0), other=0).to(tl.float32)
    offset = scaled(offset, SILU)
    slot_at = slots_index + tl.minimum(row, rows - 1)
    if AHEAD:
        slot = tl.load(slot_at).to(tl.int64)
    wait(PDL)

    if not AHEAD:
        slot = tl.load(slot_at).to(tl.int64)
    live = inside & (slot >= 0)
    start = pick(starts, firsts, block, STREAMS)
    windows, slot_step, column_step = windows_of(
        state, start, channel, slot_stride, column_stride, channel_stride, TIME, VEC
    )
    window = windows + slot * slot_step
    x_step = pick(x_strides, firsts, block, STREAMS).to(tl.int64) * VEC
    token = row.to(tl.int64) * drafts
    x = pick(xs, firsts, block, STREAMS) + token * x_step + channel
    y = pick(ys, firsts, block, STREAMS) + token * dim + channel
    if DENSE:
        at = start * VEC + channel
        mine = kept + row * kept_row_stride.to(tl.int64) + at * kept_channel_stride.to(tl.int64)
        token_step = kept_token_stride
    else:
        mine = kept + row * (kept_row_stride.to(tl.int64) * VEC) + start * VEC + channel
        token_step = kept_token_stride * VEC

    history = ()
    for j in tl.static_range(K - 1):
        old = tl.load(
            window + j * column_step,
            mask=live,
            other=0,
        )
        history = history + (old.to(tl.float32),)
    for begin in range(0, drafts, DEPTH):
        inputs = ()
        for i in tl.static_range(DEPTH):
            there = inside & (begin + i < drafts)
            inputs = inputs + (
                tl.load(
                    x + (begin + i) * x_step,
                    mask=there,
                    other=0,
                ),
            )
        for i in tl.static_range(DEPTH):
            t = begin + i
            there = inside & (t < drafts)
            current = inputs[i].to(tl.float32)
            total = offset + current * taps[K - 1]
            columns = ()
            for j in tl.static_range(K - 1):
                if TREE:
                    where = taps_index + (token + t) * K + (K - 2 - j)
                    place = tl.load(where, mask=t < drafts, other=0).to(tl.int32)
                    tap = _element(x, x_step, window, column_step, place, live, K)
                else:
                    tap = history[K - 2 - j]
                total += tap * taps[K - 2 - j]
                columns = columns + (tap,)
            total = tl.where(slot >= 0, finish(total, current, SILU, RESIDUAL), 0.0)
            tl.store(
                y + t * dim,
                total.to(y.dtype.element_ty),
                mask=there,
            )
            entering = inputs[i].to(kept.dtype.element_ty)
            here = mine + t * token_step
            if DENSE:
                # From the newest tap to the oldest but one, which has just left the window.
                for j in tl.static_range(K - 2):
                    column = columns[j].to(kept.dtype.element_ty)
                    tl.store(here + (K - 3 - j) * kept_column_stride, column, mask=there & live)
                tl.store(here + (K - 2) * kept_column_stride, entering, mask=there & live)
            else:
                tl.store(
                    here,
                    entering,
                    mask=there & live,
                )
            if not TREE:
                shifted = ()
                for j in tl.static_range(1, K - 1):
                    shifted = shifted + (history[j],)
                history = shifted + (current,)


@triton.jit
def _element(x, x_step, window, column_step, place, live, K: tl.constexpr):
    """Element ``place`` of window ++ inputs, in float32."""
    past = place < K - 1
    old = tl.load(window + tl.minimum(place, K - 2) * column_step, mask=live & past, other=0)
    token = tl.maximum(place - (K - 1), 0)
    new = tl.load(x + token * x_step, mask=live & (place >= K - 1), other=0)
    return tl.where(past, old.to(tl.float32), new.to(tl.float32))


def _windows(windows: VerifyWindows, kept: Tensor, vec: int, time: bool) -> tuple[Any, ...]:
    if isinstance(windows, InputWindows):
        return kept, kept.stride(0) // vec, kept.stride(1) // vec, 0, 1
    row, token, column, channel = kept.stride()
    return kept, row, token, *((column, channel) if time else (channel, column))


def _constants(meta: ShortConvMetadata, windows: VerifyWindows) -> tuple[Any, ...]:
    return meta.tree_taps is not None, not isinstance(windows, InputWindows)


VERIFY = Mode(
    kernel=verify,
    tiles=VERIFY_TILES,
    work=lambda meta: meta.num_tokens,
    units=lambda meta, tile: meta.batch_size,
    step=lambda meta: (
        meta.cache_indices,
        meta.cu if meta.tree_taps is None else meta.tree_taps,
        meta.tokens_per_row,
        meta.batch_size,
    ),
    layer=_windows,
    constants=_constants,
    flags=lambda meta, tile, settled: (tile.ahead and settled,),
    keeps=True,
)
