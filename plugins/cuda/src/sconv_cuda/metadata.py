"""The metadata of a step in one launch, the slot lookup in it, for every mode and any B and T."""

from __future__ import annotations

from typing import Any, Final

import triton
from torch import Tensor

from sconv import ConvStatePool, ForwardBatch, ForwardMode, ShortConvMetadata, StateSpec
from sconv.plugin import InputWindows, MetadataBuffers

from .launch import ALIGNMENT, Compiled, Launcher
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
        self._compiled: dict[tuple[Any, ...], Compiled] = {}

    def forget(self) -> None:
        """Forget what was looked up for earlier steps."""
        self._compiled.clear()

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
        arguments = {
            "rows_index": ids,
            "rows_step": ids_step,
            **translation,
            "before_index": before,
            "before_step": before_step,
            "accepts_index": accepts,
            "accepts_step": accepts_step,
            "mask_index": meta.writes if batch.mamba_track_mask is None else batch.mamba_track_mask,
            "targets_index": targets,
            "targets_step": targets_step,
            "tree_index": tree_words,
            "tree_step": tree_step,
            "siblings_index": siblings,
            "siblings_step": siblings_step,
            **_outputs(meta),
            "accepts_out_index": unused
            if meta.num_accept_tokens is None
            else meta.num_accept_tokens,
            "taps_out_index": meta.cu if meta.tree_taps is None else meta.tree_taps,
            "paths_out_index": unused if paths is None else paths,
            "verify_resumes_out_index": unused if resumes is None else resumes,
            "path_rows": 0 if paths is None else paths.shape[1],
            "stores_resumes": int(resumes is not None),
            "has_lengths": int(batch.seq_lens is not None),
            "has_mask": int(batch.mamba_track_mask is not None),
            "tracks": int(meta.tracks),
            "grid": self.spec.track_grid or 0,
            "drafts": drafts,
            "rows": rows,
        }
        key = (meta.forward_mode, looks_up, padded, links, resumes is None)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self.launcher.look_up(
                uniform_metadata,
                arguments,
                {
                    "K": self.spec.kernel_size,
                    "ROWS": block,
                    "MODE": _MODES[meta.forward_mode].value,
                    "LOOKUP": looks_up,
                    **self.source.constants,
                    "PADDED_DRAFTS": padded,
                    "LINKS": links,
                    "PDL": self.launcher.pdl,
                },
                warps=4,
                aligned=True,
            )
        frozen = self.launcher.freeze(tuple(arguments.values()))
        self.launcher.launch(compiled, (-(-(rows + 1) // block), 1, 1), frozen)

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
        aligned = lengths.data_ptr() % ALIGNMENT == 0
        arguments = {
            "rows_index": ids,
            "rows_step": ids_step,
            **translation,
            "lengths": lengths,
            "lengths_step": lengths_step,
            "prefixes_index": prefixes,
            "prefixes_step": prefixes_step,
            "mask_index": meta.writes if batch.mamba_track_mask is None else batch.mamba_track_mask,
            "targets_index": targets,
            "targets_step": targets_step,
            "until_index": until,
            "until_step": until_step,
            **_outputs(meta),
            "has_mask": int(batch.mamba_track_mask is not None),
            "has_until": int(batch.mamba_track_seqlens is not None),
            "tracks": int(meta.tracks),
            "shares": tile.shares,
            "rows": rows,
            "tokens": meta.num_tokens,
        }
        key = (tile, looks_up, aligned)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self.launcher.look_up(
                ragged_metadata,
                arguments,
                {
                    "K": self.spec.kernel_size,
                    "ROWS": tile.rows,
                    "SCAN": tile.scan,
                    "CHUNK": tile.chunk,
                    "PIECE": 8 * tile.chunk,
                    "LOOKUP": looks_up,
                    **self.source.constants,
                    "PDL": self.launcher.pdl,
                },
                warps=tile.warps,
                aligned=aligned,
            )
        frozen = self.launcher.freeze(tuple(arguments.values()))
        self.launcher.launch(compiled, (groups * tile.shares, 1, 1), frozen)


def _words(values: Tensor | None, unused: Tensor) -> tuple[Tensor, int]:
    return (unused, 1) if values is None else words(values)


def _outputs(meta: ShortConvMetadata) -> dict[str, Tensor]:
    return {
        "slots_out_index": meta.cache_indices,
        "bounds_out_index": meta.query_start_loc,
        "resumes_out_index": meta.has_initial_state,
        "cache_mask_out_index": meta.cache_mask,
        "safe_out_index": meta.safe_idx,
        "cu_out_index": meta.cu,
        "token_rows_out_index": meta.si,
        "sources_out_index": meta.track_conv_indices,
        "targets_out_index": meta.track_cache_indices,
        "writes_out_index": meta.writes,
    }
