"""The metadata of one step, and the buffers it lies in.

It is resolved once per step and shared by every layer and stream. An eager step gets fresh tensors;
a step that is captured gets slices of static buffers, which start at 0, so that one batch size
always has one set of addresses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import ForwardBatch, ForwardMode
from .errors import GraphBufferError
from .spec import StateSpec

__all__ = ["MetadataBuffers", "ShortConvMetadata"]


@dataclass(frozen=True, slots=True, eq=False)
class ShortConvMetadata:
    """What every convolution of a step needs to know. Read-only for callers.

    Attributes:
        forward_mode: The step's mode.
        batch_size: Rows B, padding included.
        num_tokens: Packed tokens T.
        tokens_per_row: Tokens of every row, or None where rows have lengths of their own.
        cache_indices: ``[B]`` int32, slot of each row; -1 = none.
        query_start_loc: ``[B+1]`` int32, exclusive prefix sum of the rows' lengths.
        has_initial_state: ``[B]`` bool, the row resumes a window.
        cache_mask: ``[B, 1, 1]`` bool, has_initial_state and slot != -1.
        safe_idx: ``[B]`` int64, ``max(slot, 0)``.
        cu: ``[B+1]`` int64, the values of query_start_loc.
        si: ``[T]`` int32, row of each token; the tail past ``cu[B]`` is B-1.
        track_conv_indices: ``[B, K-1]`` int64, where the window to snapshot comes from, oldest
            first: a packed token, or -1 to -(K-1) for the newest to the oldest column of the row's
            old window. Rows without a snapshot are zero.
        track_cache_indices: ``[B]`` int64, physical slot of the snapshot, -1 = none.
        writes: ``[B]`` bool, the row has a slot and moves its window on.
        num_accept_tokens: ``[B]`` int32, tokens that move the window on (draft-extend), else None.
        tree_taps: ``[B, dtn, K]`` int64, where each tap of a tree node lies in the row's window
            followed by its tokens; None for a chain.
        tracks: Host flag: the step may write snapshots.
        padded: Host flag: rows without a slot, or tokens past ``cu[B]``, may occur.
        batch: The batch that it was made for; None where a backend does not say.
    """

    forward_mode: ForwardMode
    batch_size: int
    num_tokens: int
    tokens_per_row: int | None
    cache_indices: Tensor
    query_start_loc: Tensor
    has_initial_state: Tensor
    cache_mask: Tensor
    safe_idx: Tensor
    cu: Tensor
    si: Tensor
    track_conv_indices: Tensor
    track_cache_indices: Tensor
    writes: Tensor
    num_accept_tokens: Tensor | None
    tree_taps: Tensor | None
    tracks: bool
    padded: bool
    batch: ForwardBatch | None = None


class MetadataBuffers:
    """Room for the metadata of a step of up to ``max_bs`` rows and ``max_num_tokens`` tokens.

    Attributes:
        max_bs: Rows.
        max_num_tokens: Packed tokens.
        host_slots: ``[max_bs]`` int64, rows of the pool that the host translated before a replay.
        host_tracks: ``[max_bs]`` int64, the same for snapshot slots.
        starts: ``[max_num_tokens + 1]`` int32 scratch: how many rows start at each token.
    """

    def __init__(
        self, spec: StateSpec, max_bs: int, max_num_tokens: int, device: torch.device
    ) -> None:
        """Allocate every buffer; their content is undefined until a step fills them."""
        self.max_bs = max_bs
        self.max_num_tokens = max_num_tokens
        window = spec.window_size

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.host_slots = empty(max_bs, dtype=torch.int64)
        self.host_tracks = empty(max_bs, dtype=torch.int64)
        self.starts = empty(max_num_tokens + 1, dtype=torch.int32)
        self._cache_indices = empty(max_bs, dtype=torch.int32)
        self._query_start_loc = empty(max_bs + 1, dtype=torch.int32)
        self._has_initial_state = empty(max_bs, dtype=torch.bool)
        self._cache_mask = empty(max_bs, 1, 1, dtype=torch.bool)
        self._safe_idx = empty(max_bs, dtype=torch.int64)
        self._cu = empty(max_bs + 1, dtype=torch.int64)
        self._si = empty(max_num_tokens, dtype=torch.int32)
        self._track_conv_indices = empty(max_bs, window, dtype=torch.int64)
        self._track_cache_indices = empty(max_bs, dtype=torch.int64)
        self._writes = empty(max_bs, dtype=torch.bool)
        self._num_accept_tokens = empty(max_bs, dtype=torch.int32)
        self._tree_taps = (
            empty(max_bs, spec.max_draft_tokens * spec.kernel_size, dtype=torch.int64)
            if spec.max_draft_tokens > 1
            else None
        )
        self._kernel_size = spec.kernel_size

    def check(self, batch_size: int, num_tokens: int) -> None:
        """Raise :class:`GraphBufferError` if a step does not fit."""
        if batch_size > self.max_bs or num_tokens > self.max_num_tokens:
            raise GraphBufferError(
                "the step does not fit the buffers of init_graph_state",
                have={"max_bs": self.max_bs, "max_num_tokens": self.max_num_tokens},
                need={"max_bs": batch_size, "max_num_tokens": num_tokens},
            )

    def step(self, batch: ForwardBatch, num_tokens: int, *, padded: bool) -> ShortConvMetadata:
        """Return the metadata of one step as slices of these buffers, not yet filled.

        Raises:
            GraphBufferError: The step does not fit.
        """
        rows = batch.batch_size
        self.check(rows, num_tokens)
        accepts = batch.forward_mode is ForwardMode.DRAFT_EXTEND
        taps = None
        if batch.is_tree and self._tree_taps is not None and batch.tokens_per_row is not None:
            width = batch.tokens_per_row * self._kernel_size
            taps = self._tree_taps.view(-1)[: rows * width]
            taps = taps.view(rows, batch.tokens_per_row, self._kernel_size)
        return ShortConvMetadata(
            forward_mode=batch.forward_mode,
            batch_size=rows,
            num_tokens=num_tokens,
            tokens_per_row=batch.tokens_per_row,
            cache_indices=self._cache_indices[:rows],
            query_start_loc=self._query_start_loc[: rows + 1],
            has_initial_state=self._has_initial_state[:rows],
            cache_mask=self._cache_mask[:rows],
            safe_idx=self._safe_idx[:rows],
            cu=self._cu[: rows + 1],
            si=self._si[:num_tokens],
            track_conv_indices=self._track_conv_indices[:rows],
            track_cache_indices=self._track_cache_indices[:rows],
            writes=self._writes[:rows],
            num_accept_tokens=self._num_accept_tokens[:rows] if accepts else None,
            tree_taps=taps,
            tracks=batch.tracks,
            padded=padded,
            batch=batch,
        )
