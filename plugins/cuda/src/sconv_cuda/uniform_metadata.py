"""Metadata of a step whose rows have as many tokens each: decode, verify, draft-extend, idle."""

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .launch import kernel
from .metadata_fields import (
    resolve_slots,
    resolve_targets,
    store_rows,
    store_sources,
    store_tree,
)

__all__ = ["DECODE", "DRAFT", "IDLE", "VERIFY", "uniform_metadata"]

DECODE = tl.constexpr(0)
VERIFY = tl.constexpr(1)
DRAFT = tl.constexpr(2)
IDLE = tl.constexpr(3)


@kernel
def uniform_metadata(
    rows_index,  # [B] request rows (LOOKUP) or slots
    rows_step,
    map_index,  # [requests] int32, slot of each request row
    map_size,
    physical_index,  # slot id to pool row (TRANSLATE)
    physical_step,
    physical_size,
    before_index,  # [B] tokens in the state; read if has_lengths
    before_step,
    accepts_index,  # [B] accepted tokens; read in DRAFT
    accepts_step,
    mask_index,  # [B] bool; read if has_mask
    targets_index,  # [B] slots of the snapshots; read if tracks
    targets_step,
    tree_index,  # [B, drafts] parents, or first children (LINKS); read with PADDED_DRAFTS
    tree_step,
    siblings_index,  # [B, drafts] next siblings (LINKS)
    siblings_step,
    slots_out_index,
    bounds_out_index,
    resumes_out_index,
    cache_mask_out_index,
    safe_out_index,
    cu_out_index,
    token_rows_out_index,
    sources_out_index,
    targets_out_index,
    writes_out_index,
    accepts_out_index,
    taps_out_index,  # [B, drafts, K] int64
    paths_out_index,  # [B, path_rows, K-1] int32; written if path_rows > 0
    verify_resumes_out_index,  # [B] bool, for the commit; written if stores_resumes
    path_rows,
    stores_resumes,
    has_lengths,
    has_mask,
    tracks,
    grid,
    drafts,
    rows,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    MODE: tl.constexpr,
    LOOKUP: tl.constexpr,
    NULL_ZERO: tl.constexpr,
    TRANSLATE: tl.constexpr,
    PADDED_DRAFTS: tl.constexpr,
    LINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program owns ROWS rows. PADDED_DRAFTS is 0, or for trees a power of two >= drafts."""
    if PDL:
        gdc_wait()
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    there = row < rows
    slot = tl.full([ROWS], -1, tl.int32)
    if MODE != IDLE:
        ids = tl.load(rows_index + row.to(tl.int64) * rows_step, mask=there, other=-1)
        slot = resolve_slots(
            ids, map_index, map_size, physical_index, physical_step, physical_size, there,
            LOOKUP, NULL_ZERO, TRANSLATE,
        )  # fmt: skip
    tl.store(bounds_out_index + row, row * drafts, mask=row <= rows)
    tl.store(cu_out_index + row, (row * drafts).to(tl.int64), mask=row <= rows)

    resumes = there & (MODE != IDLE)
    writes = there & (slot > 0) & (MODE == DECODE or MODE == DRAFT)
    target = resolve_targets(
        targets_index, targets_step, mask_index, physical_index, physical_step, physical_size,
        row, there & (slot > 0), has_mask, tracks, NULL_ZERO, TRANSLATE,
    )  # fmt: skip
    if MODE == VERIFY or MODE == IDLE:
        target = tl.full([ROWS], -1, tl.int32)
    until = tl.zeros([ROWS], tl.int32)
    # A batch that does not say how long its rows' states are resumes all of them.
    counted = there & (has_lengths != 0)
    before = tl.load(before_index + row.to(tl.int64) * before_step, mask=counted, other=1)
    resumes = resumes & (before > 0)
    if MODE == DRAFT:
        accepts = tl.load(accepts_index + row.to(tl.int64) * accepts_step, mask=there, other=-1)
        tl.store(accepts_out_index + row, accepts, mask=there)
        writes = writes & (accepts >= 0) & (accepts <= drafts)
        # The newest multiple of the grid that the row reaches, if it lies in this step.
        after = before + tl.maximum(accepts, 0)
        until = (after // tl.maximum(grid, 1)) * grid - before
        crossed = (grid > 0) & (until > 0) & (until <= drafts) & writes
        target = tl.where(crossed, target, -1)
    store_rows(
        slots_out_index, resumes_out_index, cache_mask_out_index, safe_out_index,
        targets_out_index, writes_out_index, row, there, slot, resumes, writes, target,
    )  # fmt: skip
    tl.store(verify_resumes_out_index + row, resumes, mask=there & (stores_resumes != 0))
    store_sources(
        sources_out_index, row, there, row * drafts, until, (target >= 0) & (MODE == DRAFT), K
    )

    begin = first * drafts
    end = tl.minimum(first + ROWS, rows) * drafts
    for token in range(begin, end, ROWS):
        t = token + tl.arange(0, ROWS)
        tl.store(token_rows_out_index + t, t // drafts, mask=t < end)

    if PADDED_DRAFTS > 0:
        for i in range(ROWS):
            if first + i < rows:
                store_tree(
                    tree_index, tree_step, siblings_index, siblings_step, taps_out_index,
                    paths_out_index, path_rows, (first + i).to(tl.int64), drafts,
                    K, PADDED_DRAFTS, LINKS,
                )  # fmt: skip
