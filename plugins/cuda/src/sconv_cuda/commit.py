"""The kernel of a commit: keep what a verify step accepted, windows and snapshots in one launch.

All streams of a layer lie side by side, so a row's window is one range of channels per layer, and
nothing here depends on streams. What differs between layers is in a table on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .launch import kernel
from .slots import lookup, translate

__all__ = ["TABLE_COLUMNS", "commit"]

#: Columns of the layer table: the state's offset from layer 0, its slot, column and channel stride,
#: the width, and the verify windows' offset from layer 0, row, token, column and channel stride.
TABLE_COLUMNS = tl.constexpr(10)


@kernel
def commit(
    state,  # layer 0, [S, K-1, D] or [S, D, K-1]
    kept,  # layer 0's verify windows, [B, dtn, D], or WINDOWS [B, dtn, K-1, D] in any order
    table_index,  # [L, TABLE_COLUMNS] int64, in VEC elements
    rows_index,  # [B] request rows (LOOKUP) or slots
    rows_step,
    map_index,  # [requests] int32, slot of each request row
    map_size,
    physical_index,  # slot id to pool row (TRANSLATE)
    physical_step,
    physical_size,
    steps_index,  # [B] node whose window is kept
    steps_step,
    targets_index,  # [B] slots of the snapshots; read if tracks
    targets_step,
    track_steps_index,  # [B] node whose window is the snapshot; read if tracks
    track_steps_step,
    paths_index,  # [B, path_rows, K-1] int32, where the columns of a TREE node's window lie
    resumes_index,  # [B] bool, whether the verify step resumed the row's window; if some_fresh
    some_fresh,
    tracks,
    drafts,
    path_rows,
    pool_rows,
    rows,
    layers,
    blocks,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    TIME: tl.constexpr,
    VEC: tl.constexpr,
    LOOKUP: tl.constexpr,
    NULL_ZERO: tl.constexpr,
    TRANSLATE: tl.constexpr,
    TREE: tl.constexpr,
    WINDOWS: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program owns BLOCK channels of one row in DEPTH layers. It reads before it writes.

    So the window of a slot, which is also a source, can be overwritten in place.
    """
    pid = tl.program_id(0)
    block = pid % blocks
    row = (pid // blocks) % rows
    layer_begin = (pid // blocks // rows) * DEPTH
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    ids = tl.load(rows_index + row.to(tl.int64) * rows_step)
    if LOOKUP:
        ids = lookup(ids, map_index, map_size, True)
    step = tl.load(steps_index + row.to(tl.int64) * steps_step)
    there = tracks != 0
    target = tl.load(targets_index + row.to(tl.int64) * targets_step, mask=there, other=-1)
    track_step = tl.load(
        track_steps_index + row.to(tl.int64) * track_steps_step, mask=there, other=-1
    )
    slot = translate(ids, physical_index, physical_step, physical_size, NULL_ZERO, TRANSLATE)
    target = translate(target, physical_index, physical_step, physical_size, NULL_ZERO, TRANSLATE)
    # Slot 0 is the dummy. A row whose index is not one of the step's changes nothing at all.
    live = (slot > 0) & (slot < pool_rows) & (step >= 0) & (step < drafts)
    snapped = live & (target > 0) & (target < pool_rows)
    snapped = snapped & (track_step >= 0) & (track_step < drafts)

    resumes = tl.load(resumes_index + row, mask=some_fresh != 0, other=1).to(tl.int1)
    if live:
        for depth in tl.static_range(DEPTH):
            layer = layer_begin + depth
            if layer < layers:
                _move(
                    state,
                    kept,
                    table_index + layer * TABLE_COLUMNS,
                    paths_index + row.to(tl.int64) * path_rows * (K - 1),
                    row,
                    slot.to(tl.int64),
                    step,
                    snapped,
                    target.to(tl.int64),
                    track_step,
                    resumes,
                    block * BLOCK + tl.arange(0, BLOCK),
                    K,
                    TIME,
                    VEC,
                    TREE,
                    WINDOWS,
                    UNIT,
                )


@triton.jit
def _move(
    state,
    kept,
    entry_index,
    path_index,
    row,
    slot,
    step,
    snapped,
    target,
    track_step,
    resumes,
    channel,
    K: tl.constexpr,
    TIME: tl.constexpr,
    VEC: tl.constexpr,
    TREE: tl.constexpr,
    WINDOWS: tl.constexpr,
    UNIT: tl.constexpr,
):
    state_offset = tl.load(entry_index)
    slot_step = tl.load(entry_index + 1)
    column_step = tl.load(entry_index + 2)
    inside = channel < tl.load(entry_index + 4) * VEC
    if TIME:
        windows = state + state_offset * VEC + channel
        slot_step = slot_step * VEC
        column_step = column_step * VEC
    else:
        windows = state + state_offset + channel * tl.load(entry_index + 3)
    token_step = tl.load(entry_index + 7)
    kept_column_step = tl.load(entry_index + 8)
    if UNIT:
        source = kept + (tl.load(entry_index + 5) + row * tl.load(entry_index + 6)) * VEC + channel
        token_step = token_step * VEC
        kept_column_step = kept_column_step * VEC
    else:
        source = kept + tl.load(entry_index + 5) + row * tl.load(entry_index + 6)
        source = source + channel * tl.load(entry_index + 9)

    window = windows + slot * slot_step
    moved = _window(
        window, column_step, source, token_step, kept_column_step, path_index, step, resumes,
        inside, K, TREE, WINDOWS,
    )  # fmt: skip
    if snapped:
        copied = _window(
            window, column_step, source, token_step, kept_column_step, path_index, track_step,
            resumes, inside, K, TREE, WINDOWS,
        )  # fmt: skip
        snapshot = windows + target * slot_step
        for j in tl.static_range(K - 1):
            tl.store(snapshot + j * column_step, copied[j], mask=inside)
    for j in tl.static_range(K - 1):
        tl.store(window + j * column_step, moved[j], mask=inside)


@triton.jit
def _window(
    window,
    column_step,
    source,
    token_step,
    kept_column_step,
    path_index,
    step,
    resumes,
    inside,
    K: tl.constexpr,
    TREE: tl.constexpr,
    WINDOWS: tl.constexpr,
):
    """Read the window after node ``step``."""
    columns = ()
    for j in tl.static_range(K - 1):
        if WINDOWS:
            value = tl.load(source + step * token_step + j * kept_column_step, mask=inside)
        else:
            place = step + 1 + j
            if TREE:
                place = tl.load(path_index + step * (K - 1) + j)
            if place < K - 1:
                value = tl.load(window + place * column_step, mask=inside & resumes, other=0)
            else:
                value = tl.load(source + (place - (K - 1)) * token_step, mask=inside)
        columns = columns + (value,)
    return columns
