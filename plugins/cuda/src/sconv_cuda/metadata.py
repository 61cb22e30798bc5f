"""The metadata of a step in one launch, the slot lookup in it, for every mode and any B and T."""

from __future__ import annotations

from typing import Final

import triton
from torch import Tensor

from sconv import ConvStatePool, ForwardBatch, ForwardMode, ShortConvMetadata, StateSpec
from sconv.plugin import InputWindows, MetadataBuffers

from .launch import ALIGNMENT, Launcher
from .ragged_metadata import ragged_metadata
from .slots import SlotSource, words
from .tiles import RAGGED_TILES, TREE_ROWS, UNIFORM_ROWS, RaggedTile
from .uniform_metadata import DECODE, DRAFT, IDLE, VERIFY, uniform_metadata

__all__ = ["Metadata"]

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
        resumes = None
        if isinstance(windows, InputWindows) and meta.forward_mode is ForwardMode.TARGET_VERIFY:
            resumes = windows.resumes
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
                unused if resumes is None else resumes,
                0 if paths is None else paths.shape[1],
                int(resumes is not None),
                int(batch.seq_lens is not None),
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
            aligned=lengths.data_ptr() % ALIGNMENT == 0,
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
