"""The metadata of a step in one launch, the slot lookup in it, for every mode and any B and T.

Rows of equal length (decode, verify, draft-extend) need no sum over other rows. Rows of their own
length do: a program owns a few consecutive rows, adds up all lengths before them (the whole batch
reads them, so they come from the cache), and writes the row of each token of its own. Where rows
are few, several programs share the tokens of the same ones, so that a long row is no bottleneck.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from sconv.batch import ForwardBatch, ForwardMode
from sconv.metadata import MetadataBuffers, ShortConvMetadata
from sconv.pool import ConvStatePool
from sconv.spec import StateSpec
from sconv.windows import InputWindows

from .launch import Launcher, kernel
from .metadata_fields import (
    resolve_slots,
    resolve_targets,
    store_rows,
    store_sources,
    store_tree,
)
from .slots import SlotSource, words
from .tiles import RAGGED_TILES, TREE_ROWS, UNIFORM_ROWS, RaggedTile

__all__ = ["Metadata", "ragged_metadata", "uniform_metadata"]

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
    before_index,  # [B] tokens in the state; read in DRAFT
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
    path_rows,
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
    slot = resolve_slots(
        rows_index, rows_step, map_index, map_size, physical_index, physical_step, physical_size,
        row, there, MODE == IDLE, LOOKUP, NULL_ZERO, TRANSLATE,
    )  # fmt: skip
    tl.store(bounds_out_index + row, row * drafts, mask=row <= rows)
    tl.store(cu_out_index + row, (row * drafts).to(tl.int64), mask=row <= rows)

    resumes = there & (MODE != IDLE)
    writes = there & (slot >= 0) & (MODE == DECODE or MODE == DRAFT)
    target = resolve_targets(
        targets_index, targets_step, mask_index, physical_index, physical_step, physical_size,
        row, there & (slot >= 0), has_mask, tracks, NULL_ZERO, TRANSLATE,
    )  # fmt: skip
    if MODE == VERIFY or MODE == IDLE:
        target = tl.full([ROWS], -1, tl.int32)
    until = tl.zeros([ROWS], tl.int32)
    if MODE == DRAFT:
        before = tl.load(before_index + row.to(tl.int64) * before_step, mask=there, other=0)
        accepts = tl.load(accepts_index + row.to(tl.int64) * accepts_step, mask=there, other=-1)
        tl.store(accepts_out_index + row, accepts, mask=there)
        resumes = there & (before > 0)
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


@kernel
def ragged_metadata(
    rows_index,  # [B] request rows (LOOKUP) or slots
    rows_step,
    map_index,  # [requests] int32, slot of each request row
    map_size,
    physical_index,  # slot id to pool row (TRANSLATE)
    physical_step,
    physical_size,
    lengths_index,  # [B] new tokens
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
    length = tl.load(lengths_index + row.to(tl.int64) * lengths_step, mask=there, other=0)
    prefix = tl.load(prefixes_index + row.to(tl.int64) * prefixes_step, mask=there, other=0)
    slot = resolve_slots(
        rows_index, rows_step, map_index, map_size, physical_index, physical_step, physical_size,
        row, there, False, LOOKUP, NULL_ZERO, TRANSLATE,
    )  # fmt: skip
    writes = there & (slot >= 0) & (length > 0)
    target = resolve_targets(
        targets_index, targets_step, mask_index, physical_index, physical_step, physical_size,
        row, writes, has_mask, tracks, NULL_ZERO, TRANSLATE,
    )  # fmt: skip
    asked = there & (has_until != 0)
    wanted = tl.load(until_index + row.to(tl.int64) * until_step, mask=asked, other=-1)
    partial = tl.zeros([SCAN], tl.int32)
    for base in range(0, first, SCAN):
        other = base + tl.arange(0, SCAN)
        at = lengths_index + other.to(tl.int64) * lengths_step
        partial += tl.load(at, mask=other < first, other=0)
    begin = tl.sum(partial, 0)
    stop = begin + tl.cumsum(length, 0)
    end = begin + tl.sum(length, 0)

    if share == 0:
        start = stop - length
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


_MODES: Final = {
    ForwardMode.DECODE: DECODE,
    ForwardMode.TARGET_VERIFY: VERIFY,
    ForwardMode.DRAFT_EXTEND: DRAFT,
    ForwardMode.IDLE: IDLE,
}


class Metadata:
    """Fills the metadata of one backend's steps."""

    def __init__(self, spec: StateSpec, pool: ConvStatePool, launcher: Launcher) -> None:
        self.spec = spec
        self.pool = pool
        self.launcher = launcher
        self.source = SlotSource(pool)

    def fill(self, meta: ShortConvMetadata, batch: ForwardBatch, buffers: MetadataBuffers) -> None:
        """Fill the metadata of a step, in one launch. In graph."""
        if meta.forward_mode.is_ragged:
            self.fill_ragged(meta, batch, buffers)
        else:
            self._fill_uniform(meta, batch, buffers)

    def _fill_uniform(
        self, meta: ShortConvMetadata, batch: ForwardBatch, buffers: MetadataBuffers
    ) -> None:
        rows, drafts = meta.batch_size, meta.tokens_per_row or 0
        ids, ids_step, translation, looks_up = self.source.rows(batch, buffers, meta.cache_indices)
        unused = meta.cache_indices
        before, before_step = _words(batch.seq_lens, unused)
        accepts, accepts_step = _words(batch.num_accept_tokens, unused)
        targets, targets_step = self.source.targets(batch, buffers, unused)
        tree = batch.parents if batch.parents is not None else batch.next_token
        tree = None if meta.tree_taps is None else tree
        links = tree is not None and batch.next_sibling is not None
        tree_words, tree_step = _words(tree, unused)
        siblings, siblings_step = _words(batch.next_sibling if links else None, unused)
        windows = self.pool.windows
        paths = windows.paths if isinstance(windows, InputWindows) and tree is not None else None
        padded = 0 if tree is None else triton.next_power_of_2(drafts)
        block = UNIFORM_ROWS if tree is None else TREE_ROWS
        self.launcher(
            uniform_metadata,
            -(-(rows + 1) // block),
            (
                ids,
                ids_step,
                *translation,
                before,
                before_step,
                accepts,
                accepts_step,
                meta.writes if batch.mamba_track_mask is None else batch.mamba_track_mask,
                targets,
                targets_step,
                tree_words,
                tree_step,
                siblings,
                siblings_step,
                *_outputs(meta),
                unused if meta.num_accept_tokens is None else meta.num_accept_tokens,
                meta.cu if meta.tree_taps is None else meta.tree_taps,
                unused if paths is None else paths,
                0 if paths is None else paths.shape[1],
                int(batch.mamba_track_mask is not None),
                int(meta.tracks),
                self.spec.track_grid or 0,
                drafts,
                rows,
            ),
            (
                self.spec.kernel_size,
                block,
                _MODES[meta.forward_mode].value,
                looks_up,
                *self.source.constants,
                padded,
                links,
                self.launcher.pdl,
            ),
            warps=4,
            aligned=True,
        )

    def fill_ragged(
        self,
        meta: ShortConvMetadata,
        batch: ForwardBatch,
        buffers: MetadataBuffers,
        tile: RaggedTile | None = None,
    ) -> None:
        """Fill the metadata of ragged rows; in the table's tile, unless one is given."""
        rows = meta.batch_size
        ids, ids_step, translation, looks_up = self.source.rows(batch, buffers, meta.cache_indices)
        unused = meta.cache_indices
        lengths, lengths_step = _words(batch.extend_seq_lens, unused)
        prefixes, prefixes_step = _words(batch.extend_prefix_lens, unused)
        targets, targets_step = self.source.targets(batch, buffers, unused)
        until, until_step = _words(batch.mamba_track_seqlens, unused)
        if tile is None:
            tile = next(tile for most, tile in RAGGED_TILES if rows <= most)
        groups = max(-(-rows // tile.rows), 1)
        self.launcher(
            ragged_metadata,
            groups * tile.shares,
            (
                ids,
                ids_step,
                *translation,
                lengths,
                lengths_step,
                prefixes,
                prefixes_step,
                meta.writes if batch.mamba_track_mask is None else batch.mamba_track_mask,
                targets,
                targets_step,
                until,
                until_step,
                *_outputs(meta),
                int(batch.mamba_track_mask is not None),
                int(batch.mamba_track_seqlens is not None),
                int(meta.tracks),
                tile.shares,
                rows,
                meta.num_tokens,
            ),
            (
                self.spec.kernel_size,
                tile.rows,
                tile.scan,
                tile.chunk,
                8 * tile.chunk,
                looks_up,
                *self.source.constants,
                self.launcher.pdl,
            ),
            warps=tile.warps,
            aligned=True,
        )


def _words(values: Tensor | None, unused: Tensor) -> tuple[Tensor, int]:
    return (unused, 1) if values is None else words(values)


def _outputs(meta: ShortConvMetadata) -> tuple[Tensor, ...]:
    return (
        meta.cache_indices,
        meta.query_start_loc,
        meta.has_initial_state,
        meta.cache_mask,
        meta.safe_idx,
        meta.cu,
        meta.si,
        meta.track_conv_indices,
        meta.track_cache_indices,
        meta.writes,
    )
