"""The metadata of one step, and the buffers it lies in.

It is resolved once per step and shared by every layer and stream. An eager step gets fresh tensors;
a step that is captured gets slices of static buffers, which start at 0, so that one batch size
always has one set of addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..errors import BatchError, GraphBufferError
from ..state.spec import StateSpec
from .batch import ForwardBatch, ForwardMode

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
        plan: What the backend that made it has worked out for the step; its own, of no meaning to
            others.
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
    plan: Any = None

    @property
    def may_start_afresh(self) -> bool:
        """Whether rows of a decode may have no tokens in their state yet."""
        return self.batch is not None and self.batch.seq_lens is not None

    def has_shape_of(self, batch: ForwardBatch) -> bool:
        """Whether what a step of this batch needs besides its slots is what this one has.

        True only where that follows from mode and sizes: in decode and verify without snapshots.
        """
        return (
            self.forward_mode is batch.forward_mode
            and self.forward_mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)
            and self.batch_size == batch.batch_size
            and self.tokens_per_row == batch.tokens_per_row
            and (self.batch is None or self.batch.seq_lens is None) == (batch.seq_lens is None)
            and not self.tracks
            and not batch.tracks
        )


class MetadataBuffers:
    """Room for the metadata of a step of up to ``max_bs`` rows and ``max_num_tokens`` tokens.

    Attributes:
        max_bs: Rows.
        max_num_tokens: Packed tokens.
        host_slots: ``[max_bs]`` int64, rows of the pool that the host translated before a replay.
        host_tracks: ``[max_bs]`` int64, the same for snapshot slots.
        starts: ``[max_num_tokens + 1]`` int32 scratch: how many rows start at each token.
        shape_filled: Whether what depends on the shape of the step alone is filled already.
    """

    def __init__(
        self,
        spec: StateSpec,
        max_bs: int,
        max_num_tokens: int,
        device: torch.device,
        *,
        only: ForwardBatch | None = None,
        like: ShortConvMetadata | None = None,
    ) -> None:
        """Allocate every buffer; their content is undefined until a step fills them.

        Raises:
            GraphBufferError: There is no memory for the buffers of any step.
            BatchError: There is no memory for those of this step.

        Args:
            spec: What the backend was built for.
            max_bs: Rows.
            max_num_tokens: Packed tokens.
            device: Where the buffers lie.
            only: The one step that they are for, which may not need all of them; None = any step.
            like: Metadata of an earlier step of the same shape, see
                :meth:`ShortConvMetadata.has_shape_of`; what both have in common is copied from it.
        """
        self.max_bs = max_bs
        self.max_num_tokens = max_num_tokens
        self.shape_filled = like is not None
        self._spec = spec
        self._static = only is None
        self._device = device
        empty = self.allocate
        if like is not None:
            self._cache_indices = empty(max_bs, dtype=torch.int32)
            self._cache_mask = empty(max_bs, 1, 1, dtype=torch.bool)
            self._safe_idx = empty(max_bs, dtype=torch.int64)
            self._writes = empty(max_bs, dtype=torch.bool)
            self._query_start_loc = like.query_start_loc.clone()
            self._has_initial_state = like.has_initial_state.clone()
            self._cu = like.cu.clone()
            self._si = like.si.clone()
            self._track_conv_indices = like.track_conv_indices.clone()
            self._track_cache_indices = like.track_cache_indices.clone()
        else:
            # One allocation: on an accelerator it costs more host time than the views of it.
            rows, sources = max_bs, max_bs * spec.window_size
            word_pairs = (2 * rows + 2 + max_num_tokens) // 2
            flag_groups = (3 * rows + 7) // 8
            memory = empty(3 * rows + 1 + sources + word_pairs + flag_groups, dtype=torch.int64)
            (
                self._safe_idx, self._cu, self._track_cache_indices, window_sources, words, flags,
            ) = memory.split_with_sizes(
                [rows, rows + 1, rows, sources, word_pairs, flag_groups]
            )  # fmt: skip
            self._track_conv_indices = window_sources.view(rows, spec.window_size)
            words, flags = words.view(torch.int32), flags.view(torch.bool)
            self._cache_indices, self._query_start_loc, self._si, _ = words.split_with_sizes(
                [rows, rows + 1, max_num_tokens, 2 * word_pairs - 2 * rows - 1 - max_num_tokens]
            )
            self._writes, self._has_initial_state, mask, _ = flags.split_with_sizes(
                [rows, rows, rows, 8 * flag_groups - 3 * rows]
            )
            self._cache_mask = mask.view(rows, 1, 1)
        self._num_accept_tokens: Tensor | None = None
        if only is None or only.forward_mode is ForwardMode.DRAFT_EXTEND:
            self._num_accept_tokens = empty(max_bs, dtype=torch.int32)
        if only is None:
            # Now: what is recorded must not allocate.
            _ = self.host_slots, self.host_tracks, self.starts
            if spec.max_draft_tokens > 1 and spec.draft_topk > 1:
                _ = self._tree_taps

    @classmethod
    def row_nbytes(cls, spec: StateSpec) -> int:
        """Return the bytes of one row and its tokens, of buffers that any step may use.

        With as many tokens per row as the spec has draft tokens, so that ``rows`` rows take
        ``rows * row_nbytes(spec)`` bytes, and at most 27 more for the ends of the prefix sums and
        for rounding.
        """
        # Per row: five of int64, three of int32, three of bool, and the window of a snapshot.
        row = 5 * 8 + 3 * 4 + 3 + 8 * spec.window_size
        if spec.max_draft_tokens > 1 and spec.draft_topk > 1:
            row += 8 * spec.max_draft_tokens * spec.kernel_size
        return row + 2 * 4 * spec.max_draft_tokens

    @cached_property
    def _tree_taps(self) -> Tensor:
        """``[max_bs, dtn * K]`` int64, most of what there is, and only trees read it.

        A spec of chains gets it with the first step that has parents or links all the same.
        """
        # A tensor made under inference mode could not be filled outside of it later.
        with torch.inference_mode(False):
            return self.allocate(
                self.max_bs,
                self._spec.max_draft_tokens * self._spec.kernel_size,
                dtype=torch.int64,
            )

    @cached_property
    def host_slots(self) -> Tensor:
        """See the class."""
        return self.allocate(self.max_bs, dtype=torch.int64)

    @cached_property
    def host_tracks(self) -> Tensor:
        """See the class."""
        return self.allocate(self.max_bs, dtype=torch.int64)

    @cached_property
    def starts(self) -> Tensor:
        """See the class."""
        return self.allocate(self.max_num_tokens + 1, dtype=torch.int32)

    def allocate(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return memory for the steps that the buffers are for.

        Raises:
            GraphBufferError: There is none for captured steps.
            BatchError: There is none for this step.
        """
        try:
            return torch.empty(shape, dtype=dtype, device=self._device)
        except (RuntimeError, TypeError) as exc:
            sizes = {"max_bs": self.max_bs, "max_num_tokens": self.max_num_tokens}
            if self._static:
                tokens = 8 * (self.max_num_tokens - self.max_bs * self._spec.max_draft_tokens)
                nbytes = self.max_bs * self.row_nbytes(self._spec) + tokens + 16
                raise GraphBufferError(
                    f"no memory for the metadata of captured steps, {nbytes} bytes: give "
                    "init_graph_state the largest captured batch, not more",
                    have=dict.fromkeys(sizes, 0),
                    need=sizes,
                ) from exc
            # An engine may wait for the device's own error, to take a smaller batch.
            if isinstance(exc, torch.OutOfMemoryError):
                raise
            raise BatchError(
                f"no memory for the metadata of a step of {self.max_bs} rows and "
                f"{self.max_num_tokens} tokens: give the step fewer tokens"
            ) from exc

    def check(self, batch_size: int, num_tokens: int) -> None:
        """Raise :class:`GraphBufferError` if a step does not fit."""
        if batch_size > self.max_bs or num_tokens > self.max_num_tokens:
            raise GraphBufferError(
                "the step does not fit the buffers of init_graph_state",
                have={"max_bs": self.max_bs, "max_num_tokens": self.max_num_tokens},
                need={"max_bs": batch_size, "max_num_tokens": num_tokens},
            )

    def step(
        self, batch: ForwardBatch, num_tokens: int, *, padded: bool, plan: Any = None
    ) -> ShortConvMetadata:
        """Return the metadata of one step as slices of these buffers, not yet filled.

        Raises:
            GraphBufferError: The step does not fit.
        """
        rows = batch.batch_size
        self.check(rows, num_tokens)
        # A slice of everything costs as much as the allocation did.
        whole = rows == self.max_bs and num_tokens == self.max_num_tokens

        def first(buffer: Tensor, count: int) -> Tensor:
            return buffer if whole else buffer[:count]

        accepts = None
        if batch.forward_mode is ForwardMode.DRAFT_EXTEND and self._num_accept_tokens is not None:
            accepts = first(self._num_accept_tokens, rows)
        taps = None
        kernel_size = self._spec.kernel_size
        if batch.is_tree and batch.tokens_per_row is not None and self._spec.max_draft_tokens > 1:
            width = batch.tokens_per_row * kernel_size
            taps = self._tree_taps.view(-1)[: rows * width]
            taps = taps.view(rows, batch.tokens_per_row, kernel_size)
        return ShortConvMetadata(
            forward_mode=batch.forward_mode,
            batch_size=rows,
            num_tokens=num_tokens,
            tokens_per_row=batch.tokens_per_row,
            cache_indices=first(self._cache_indices, rows),
            query_start_loc=first(self._query_start_loc, rows + 1),
            has_initial_state=first(self._has_initial_state, rows),
            cache_mask=first(self._cache_mask, rows),
            safe_idx=first(self._safe_idx, rows),
            cu=first(self._cu, rows + 1),
            si=first(self._si, num_tokens),
            track_conv_indices=first(self._track_conv_indices, rows),
            track_cache_indices=first(self._track_cache_indices, rows),
            writes=first(self._writes, rows),
            num_accept_tokens=accepts,
            tree_taps=taps,
            tracks=batch.tracks,
            padded=padded,
            batch=batch,
            plan=plan,
        )
