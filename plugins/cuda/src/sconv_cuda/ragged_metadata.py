"""Metadata of a step whose rows have lengths of their own: extend and mixed.

A program owns a few consecutive rows, adds up all lengths before them (the whole batch reads them,
so they come from the cache), and writes the row of each token of its own. Where rows are few,
several programs share the tokens of the same ones, so that a long row is no bottleneck.
"""

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .launch import kernel
from .metadata_fields import resolve_slots, resolve_targets, store_rows, store_sources

__all__ = ["ragged_metadata"]

#: Rows of at most SHORT tokens write the rows of these themselves, COLUMNS at a time.
SHORT = tl.constexpr(32)
COLUMNS = tl.constexpr(8)


@kernel
def ragged_metadata(
    rows_index,  # [B] request rows (LOOKUP) or slots
    rows_step,
    map_index,  # [requests] int32, slot of each request row
    map_size,
    physical_index,  # slot id to pool row (TRANSLATE)
    physical_step,
    physical_size,
    lengths,  # [B] new tokens
    lengths_step,
    prefixes_index,  # [B] tokens that the row resumes from
    prefixes_step,
    mask_index,  # [B] bool; read if has_mask
    targets_index,  # [B] slots of the snapshots; read if tracks
    targets_step,
    until_index,  # [B] length at which a row is snapshot; read if has_until
    until_step,
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
    has_mask,
    has_until,
    tracks,
    shares,
    rows,
    tokens,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    SCAN: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECE: tl.constexpr,
    LOOKUP: tl.constexpr,
    NULL_ZERO: tl.constexpr,
    TRANSLATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """``shares`` programs own the same ROWS rows: the first writes them, all write their tokens."""
    if PDL:
        gdc_wait()
    pid = tl.program_id(0)
    share = pid % shares
    first = (pid // shares) * ROWS

    # All that does not depend on other rows is read first: it arrives while the lengths add up.
    row = first + tl.arange(0, ROWS)
    there = row < rows
    length = tl.load(lengths + row.to(tl.int64) * lengths_step, mask=there, other=0)
    prefix = tl.load(prefixes_index + row.to(tl.int64) * prefixes_step, mask=there, other=0)
    ids = tl.load(rows_index + row.to(tl.int64) * rows_step, mask=there, other=-1)
    asked = there & (has_until != 0)
    wanted = tl.load(until_index + row.to(tl.int64) * until_step, mask=asked, other=-1)
    # Word by word, in whole vectors: the upper word of a 64-bit length is zero and adds nothing.
    before = first * lengths_step
    partial = tl.zeros([SCAN], tl.int32)
    for base in range(0, before, SCAN):
        other = base + tl.arange(0, SCAN)
        partial += tl.load(lengths + other, mask=other < before, other=0)
    # Only now, as a lookup waits for the ids: the lengths above are under way together with them.
    slot = resolve_slots(
        ids, map_index, map_size, physical_index, physical_step, physical_size, there,
        LOOKUP, NULL_ZERO, TRANSLATE,
    )  # fmt: skip
    writes = there & (slot > 0) & (length > 0)
    target = resolve_targets(
        targets_index, targets_step, mask_index, physical_index, physical_step, physical_size,
        row, writes, has_mask, tracks, NULL_ZERO, TRANSLATE,
    )  # fmt: skip
    begin = tl.sum(partial, 0)
    stop = begin + tl.cumsum(length, 0)
    end = begin + tl.sum(length, 0)

    start = stop - length
    if share == 0:
        if first == 0:
            tl.store(bounds_out_index, 0)
            tl.store(cu_out_index, tl.zeros([], tl.int64))
        tl.store(bounds_out_index + row + 1, stop, mask=there)
        tl.store(cu_out_index + row + 1, stop.to(tl.int64), mask=there)
        until = tl.where(wanted >= 0, wanted - prefix, -1)
        until = tl.where(asked, until, length)
        target = tl.where((until >= 0) & (until <= length), target, -1)
        store_rows(
            slots_out_index, resumes_out_index, cache_mask_out_index, safe_out_index,
            targets_out_index, writes_out_index, row, there, slot, there & (prefix > 0), writes,
            target,
        )  # fmt: skip
        store_sources(sources_out_index, row, there, start, until, target >= 0, K)

    if first + ROWS >= rows:
        # Tokens past the last row count as its own.
        end = tokens
    end = tl.minimum(end, tokens)
    owned = tl.minimum(tl.where(row == rows - 1, tokens, stop), tokens) - start
    longest = tl.max(tl.where(there, owned, 0), 0)
    if (longest <= SHORT) & (rows > 0):
        # Each row writes its own tokens: no token has to look for its row.
        for passed_over in range(share * COLUMNS, longest, shares * COLUMNS):
            place = passed_over + tl.arange(0, COLUMNS)
            inside = there[:, None] & (place[None, :] < owned[:, None])
            owners = row[:, None] + tl.zeros([1, COLUMNS], tl.int32)
            tl.store(token_rows_out_index + start[:, None] + place[None, :], owners, mask=inside)
        # The loop below finds nothing left to do.
        begin = end
    for piece in range(begin + share * PIECE, end, shares * PIECE):
        piece_end = tl.minimum(piece + PIECE, end)
        # Most pieces of a long row are in no other one, which the ends of the piece tell.
        lowest = tl.sum((piece >= stop).to(tl.int32), 0)
        highest = tl.sum((piece_end - 1 >= stop).to(tl.int32), 0)
        if lowest == highest:
            t = piece + tl.arange(0, PIECE)
            owner = tl.minimum(first + lowest, tl.maximum(rows - 1, 0))
            tl.store(token_rows_out_index + t, tl.zeros_like(t) + owner, mask=t < piece_end)
        else:
            for token in range(piece, piece_end, CHUNK):
                u = token + tl.arange(0, CHUNK)
                passed = u[None, :] >= stop[:, None]  # [ROWS, CHUNK]
                owners = first + tl.sum(passed.to(tl.int32), 0)
                owners = tl.minimum(owners, tl.maximum(rows - 1, 0))
                tl.store(token_rows_out_index + u, owners, mask=u < piece_end)
