"""Draft tokens of a verify step: convolve, and keep what the commit needs. Pools are only read."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from torch import Tensor

from sconv import ShortConvMetadata
from sconv.plugin import DedupWindows, InputWindows, VerifyWindows

from .arithmetic import convolved, rounded
from .launch import kernel
from .mode import Mode
from .overlap import prefetch, release, wait
from .streams import element, owned, pick, windows_of
from .taps import load_offset, load_taps
from .tiles import VERIFY_TILES

__all__ = ["VERIFY", "has_unit_channels", "verify"]


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
    kept,  # the layer's verify windows: [B, dtn, D], or WINDOWS [B, dtn, K-1, D] in any order
    kept_row_stride,
    kept_token_stride,
    kept_column_stride,
    kept_channel_stride,
    slots_index,  # [B] int32
    resumes_index,  # [B] bool, the row resumes its window; read if some_fresh
    some_fresh,
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
    WINDOWS: tl.constexpr,
    OVERLAP: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program owns all tokens of one row and BLOCK channels of one stream, DEPTH at a time.

    WINDOWS are kept where not the inputs alone; where they OVERLAP, only the newest column of each
    but the first is not there yet. UNIT ones have their channels side by side.
    """
    if AHEAD:
        release(PDL)
    row, block, dim, channel, inside = owned(firsts, dims, BLOCK, VEC, STREAMS)
    inside = inside & (row < rows)
    taps = load_taps(pick(weights, firsts, block, STREAMS), channel, inside, K, VEC > 1, SILU)
    offset = load_offset(pick(biases, firsts, block, STREAMS), has_bias, channel, inside, SILU)
    start = pick(starts, firsts, block, STREAMS)
    windows, slot_step, column_step = windows_of(
        state, start, channel, slot_stride, column_stride, channel_stride, TIME, VEC
    )
    x_step = pick(x_strides, firsts, block, STREAMS).to(tl.int64) * VEC
    token = tl.minimum(row, rows - 1).to(tl.int64) * drafts
    slot_at = slots_index + tl.minimum(row, rows - 1)
    resumes_at = resumes_index + tl.minimum(row, rows - 1)
    if AHEAD:
        slot = tl.load(slot_at).to(tl.int64)
        resumes = tl.load(resumes_at, mask=some_fresh != 0, other=1).to(tl.int1)
        if PDL and TIME:
            prefetch(
                pick(xs, firsts, block, STREAMS) + token * x_step,
                x_step,
                drafts,
                state + start * VEC + tl.maximum(slot, 0) * slot_step,
                column_step,
                (block - pick(firsts, firsts, block, STREAMS)) * BLOCK,
                dim,
                K,
                DEPTH,
                BLOCK,
            )
    wait(PDL)

    if not AHEAD:
        slot = tl.load(slot_at).to(tl.int64)
        resumes = tl.load(resumes_at, mask=some_fresh != 0, other=1).to(tl.int1)
    live = inside & (slot >= 0)
    window = windows + slot * slot_step
    x = pick(xs, firsts, block, STREAMS) + token * x_step + channel
    y = pick(ys, firsts, block, STREAMS) + token * dim + channel
    if UNIT:
        mine = kept + row * (kept_row_stride.to(tl.int64) * VEC) + start * VEC + channel
        token_step = kept_token_stride * VEC
        kept_column_step = kept_column_stride * VEC
    else:
        at = start * VEC + channel
        mine = kept + row * kept_row_stride.to(tl.int64) + at * kept_channel_stride.to(tl.int64)
        token_step = kept_token_stride
        kept_column_step = kept_column_stride

    history = ()
    for j in tl.static_range(K - 1):
        old = tl.load(
            window + j * column_step,
            mask=live & resumes,
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
            columns = history
            if TREE:
                columns = ()
                for j in tl.static_range(K - 1):
                    where = taps_index + (token + t) * K + j
                    place = tl.load(where, mask=t < drafts, other=0).to(tl.int32)
                    tap = element(
                        x, x_step, window, column_step, place, live, resumes, K, tl.float32
                    )
                    columns = columns + (tap,)
            total = convolved(columns, inputs[i], taps, offset, 0, K, SILU, RESIDUAL)
            total = tl.where(slot >= 0, total, 0.0)
            tl.store(
                y + t * dim,
                rounded(total, y.dtype.element_ty),
                mask=there,
            )
            entering = rounded(inputs[i], kept.dtype.element_ty)
            here = mine + t * token_step
            if WINDOWS:
                missing = there & live
                if OVERLAP:
                    missing = missing & (t == 0)
                # The oldest column has just left the window.
                for j in tl.static_range(1, K - 1):
                    column = rounded(columns[j], kept.dtype.element_ty)
                    tl.store(here + (j - 1) * kept_column_step, column, mask=missing)
                here = here + (K - 2) * kept_column_step
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


def _windows(windows: VerifyWindows, kept: Tensor, vec: int, time: bool) -> dict[str, Any]:
    if isinstance(windows, InputWindows):
        row, token, column, channel = *kept.stride()[:2], 0, 1
    elif time:
        row, token, column, channel = kept.stride()
    else:
        row, token, channel, column = kept.stride()
    if has_unit_channels(windows, time):
        row, token, column, channel = row // vec, token // vec, column // vec, 1
    return {
        "kept": kept,
        "kept_row_stride": row,
        "kept_token_stride": token,
        "kept_column_stride": column,
        "kept_channel_stride": channel,
    }


def _constants(meta: ShortConvMetadata, windows: VerifyWindows, time: bool) -> dict[str, Any]:
    whole = not isinstance(windows, InputWindows)
    overlap = isinstance(windows, DedupWindows)
    return {
        "TREE": meta.tree_taps is not None,
        "WINDOWS": whole,
        "OVERLAP": overlap,
        "UNIT": has_unit_channels(windows, time),
    }


def has_unit_channels(windows: VerifyWindows, time: bool) -> bool:
    """Whether it is known that all kept channels lie side by side, in rows of whole vectors."""
    return isinstance(windows, InputWindows) or (time and not windows.adopted)


VERIFY = Mode(
    kernel=verify,
    tiles=VERIFY_TILES,
    work=lambda meta: meta.num_tokens,
    units=lambda meta, tile: meta.batch_size,
    step=lambda meta: {
        "slots_index": meta.cache_indices,
        "resumes_index": meta.has_initial_state,
        "some_fresh": int(meta.may_start_afresh),
        "taps_index": meta.cu if meta.tree_taps is None else meta.tree_taps,
        "drafts": meta.tokens_per_row,
        "rows": meta.batch_size,
    },
    layer=_windows,
    constants=_constants,
    flags=lambda meta, tile, settled: {"AHEAD": tile.ahead and settled},
    keeps=True,
    # Strides of their own take registers.
    bounds=lambda windows, time: time and has_unit_channels(windows, time),
)
