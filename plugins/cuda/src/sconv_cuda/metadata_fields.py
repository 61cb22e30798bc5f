"""The fields of a step's metadata that rows of every kind have: slots, snapshots, trees."""

from __future__ import annotations

import triton
import triton.language as tl

from .slots import lookup, translate

__all__ = ["resolve_slots", "resolve_targets", "store_rows", "store_sources", "store_tree"]


@triton.jit
def resolve_slots(
    ids,
    map_index,
    map_size,
    physical_index,
    physical_step,
    physical_size,
    there,
    LOOKUP: tl.constexpr,
    NULL_ZERO: tl.constexpr,
    TRANSLATE: tl.constexpr,
):
    """Return the pool row of request rows (LOOKUP) or slots, -1 = none."""
    if LOOKUP:
        ids = lookup(ids, map_index, map_size, there)
    return translate(ids, physical_index, physical_step, physical_size, NULL_ZERO, TRANSLATE)


@triton.jit
def resolve_targets(
    targets_index,
    targets_step,
    mask_index,
    physical_index,
    physical_step,
    physical_size,
    row,
    wanted,
    has_mask,
    tracks,
    NULL_ZERO: tl.constexpr,
    TRANSLATE: tl.constexpr,
):
    """Return the pool row that gets each row's snapshot, -1 = none."""
    wanted = wanted & (tracks != 0)
    wanted = wanted & tl.load(mask_index + row, mask=wanted & (has_mask != 0), other=1).to(tl.int1)
    ids = tl.load(targets_index + row.to(tl.int64) * targets_step, mask=wanted, other=-1)
    ids = translate(ids, physical_index, physical_step, physical_size, NULL_ZERO, TRANSLATE)
    return tl.where(wanted, ids, -1)


@triton.jit
def store_rows(
    slots_out_index,
    resumes_out_index,
    cache_mask_out_index,
    safe_out_index,
    targets_out_index,
    writes_out_index,
    row,
    there,
    slot,
    resumes,
    writes,
    target,
):
    """Write what each row is and does, except where its tokens lie."""
    tl.store(slots_out_index + row, slot, mask=there)
    tl.store(safe_out_index + row, tl.maximum(slot, 0).to(tl.int64), mask=there)
    tl.store(resumes_out_index + row, resumes, mask=there)
    tl.store(cache_mask_out_index + row, resumes & (slot >= 0), mask=there)
    tl.store(writes_out_index + row, writes, mask=there)
    tl.store(targets_out_index + row, target.to(tl.int64), mask=there)


@triton.jit
def store_sources(sources_out_index, row, there, start, until, wanted, K: tl.constexpr):
    """Say where the window after ``until`` tokens lies: in packed tokens, or the old window."""
    for j in tl.static_range(K - 1):
        place = until - (K - 1) + j
        source = tl.where(place >= 0, place + start, place)
        source = tl.where(wanted, source, 0).to(tl.int64)
        tl.store(sources_out_index + row.to(tl.int64) * (K - 1) + j, source, mask=there)


@triton.jit
def store_tree(
    tree_index,
    tree_step,
    siblings_index,
    siblings_step,
    taps_out_index,
    paths_out_index,
    path_rows,
    row,
    drafts,
    K: tl.constexpr,
    PADDED_DRAFTS: tl.constexpr,
    LINKS: tl.constexpr,
):
    """Index the inputs that each node of a row's tree reads: itself, its ancestors, the window."""
    node = tl.arange(0, PADDED_DRAFTS)
    there = node < drafts
    tree = tree_index + row * drafts * tree_step
    if LINKS:
        siblings = siblings_index + row * drafts * siblings_step
        # Turn both links around. Links outside of the row count as absent.
        named_by = tl.full([PADDED_DRAFTS], -1, tl.int32)
        head = node
        for other in range(drafts):
            named_by = tl.where(node == tl.load(tree + other * tree_step), other, named_by)
            head = tl.where(node == tl.load(siblings + other * siblings_step), other, head)
        # Only the first child is named by its parent: walk to the head of the siblings, in strides
        # that double.
        strides: tl.constexpr = PADDED_DRAFTS.bit_length() - 1
        for _ in tl.static_range(strides):
            head = tl.gather(head, head, 0)
        parent = tl.gather(named_by, head, 0)
    else:
        parent = tl.load(tree + node * tree_step, mask=there, other=-1)
    before = tl.where((parent >= 0) & (parent < drafts), parent + (K - 1), K - 2)

    tap = node + (K - 1)
    taps = taps_out_index + (row * drafts + node) * K
    paths = paths_out_index + (row * path_rows + node) * (K - 1)
    tl.store(taps + (K - 1), tap.to(tl.int64), mask=there)
    tl.store(paths + (K - 2), tap, mask=there & (path_rows > 0))
    for j in tl.static_range(K - 1):
        # Within the old window the tap before is the next older column.
        inside = tl.gather(before, tl.maximum(tap - (K - 1), 0), 0)
        tap = tl.where(tap >= K - 1, inside, tap - 1)
        tl.store(taps + (K - 2 - j), tap.to(tl.int64), mask=there)
        if j < K - 2:
            tl.store(paths + (K - 3 - j), tap, mask=there & (path_rows > 0))
