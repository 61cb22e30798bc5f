"""The order of a step, shared by all plugins of this project: plan, fill, publish.

A subclass fills metadata and moves state; this class decides when, into which tensors, and what a
reader sees in between.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import BatchError, GraphBufferError, MetadataError
from ..hookspecs import hookimpl
from ..state.pool import ConvStatePool
from ..state.spec import StateSpec
from ..state.windows import choose_layout, make_windows
from ..step.batch import ForwardBatch, ForwardMode, check_is_batch
from ..step.batch_checks import check_batch
from ..step.metadata import MetadataBuffers, ShortConvMetadata
from ..step.value_checks import MOST_TOKENS, check_physical, values_are_checked

__all__ = ["PluginBackend"]


class PluginBackend:
    """Step hooks that need no kernel. A subclass gives :meth:`_fill` and the rest of the contract.

    Attributes:
        window_layouts: Layouts of verify windows that the class keeps, first choice first; the same
            as in the capabilities that its plugin declares.
        copies_shape: An eager step copies what depends on its shape alone from the last one of the
            same shape, which costs less than to compute it; :meth:`_fill` then leaves it as it is
            (``buffers.shape_filled``).
        spec: What the backend was built for.
        device: Where its tensors lie, index included; an adopted pool's, if there is one.
        pool: Its state.
        forward_metadata: Metadata of the step that is prepared, or None.
        verify_tokens: Tokens per row of the last verify step that was prepared; the commit's bound.
        verify_rows: Rows of that step.
        verify_by_slots: It named its rows by slots, so the commit's ``req_pool_indices`` are slots.
        verify_tree: Its tokens were a tree.
    """

    window_layouts: ClassVar[tuple[str, ...]] = ("dense",)
    copies_shape: ClassVar[bool] = False

    def __init__(
        self, *, spec: StateSpec, device: torch.device, pool: ConvStatePool | None
    ) -> None:
        """Build the state, unless an adopted pool brings it, and choose the verify windows.

        Raises:
            SpecError: The class does not keep the window layout that the spec names.
        """
        self.spec = spec
        self.pool = pool if pool is not None else ConvStatePool(spec, device)
        self.device = self.pool.device
        if not self.pool.has_windows:
            layout = choose_layout(spec, self.window_layouts, backend=type(self).__name__)
            self.pool.windows = make_windows(layout, spec, self.pool.device)
        self.forward_metadata: ShortConvMetadata | None = None
        self.verify_tokens = 0
        self.verify_rows = 0
        self.verify_by_slots = False
        self.verify_tree = False
        self._buffers: MetadataBuffers | None = None
        self._planned_tokens: int | None = None
        self._padded = True
        self._last_shape: ShortConvMetadata | None = None

    def _fill(
        self,
        meta: ShortConvMetadata,
        batch: ForwardBatch,
        buffers: MetadataBuffers,
    ) -> None:
        """Fill the metadata of a step. In graph."""
        raise NotImplementedError

    def _new_plan(self) -> Any:
        """Return what the backend wants its metadata of a step to carry, as ``plan``."""
        return None

    @property
    def max_rows(self) -> int:
        """Most rows of a batch."""
        static = 0 if self._buffers is None else self._buffers.max_bs
        return max(self.spec.max_requests, static)

    @hookimpl
    def init_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """See :meth:`sconv.hookspecs.StepSpec.init_graph_state`."""
        for name, size in (("max_bs", max_bs), ("max_num_tokens", max_num_tokens)):
            if isinstance(size, bool) or not isinstance(size, int):
                raise BatchError(f"{name}={size!r}: expected an int")
        if self._buffers is not None:
            self._buffers.check(max_bs, max_num_tokens)
            return
        if max_bs < 1 or max_num_tokens < max_bs:
            raise GraphBufferError(
                "static buffers hold at least one row and a token per row",
                have={"max_bs": max_bs, "max_num_tokens": max_num_tokens},
                need={"max_bs": max(max_bs, 1), "max_num_tokens": max(max_bs, 1)},
            )
        # A tensor made under inference mode could not be filled outside of it later.
        with torch.inference_mode(False):
            buffers = MetadataBuffers(self.spec, max_bs, max_num_tokens, self.device)
            self._prepare_static(buffers)
            self.pool.reserve(max_bs)
        self._buffers = buffers

    def _prepare_static(self, buffers: MetadataBuffers) -> None:
        """Allocate what else captured steps need, before any of it is in use."""

    @hookimpl
    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """See :meth:`sconv.hookspecs.StepSpec.init_forward_metadata`."""
        tokens = self._plan(forward_batch)
        like = self._last_shape
        if like is not None and not like.has_shape_of(forward_batch):
            like = None
        buffers = MetadataBuffers(
            self.spec,
            forward_batch.batch_size,
            tokens,
            self.device,
            only=forward_batch,
            like=like,
        )
        # Most steps are as padded as the one before.
        meta = buffers.step(forward_batch, tokens, padded=self._padded, plan=self._new_plan())
        self._keep_translated(self._translated(forward_batch), buffers)
        # Fresh memory: until the step is published, the last one is as it was.
        self._fill(meta, forward_batch, buffers)
        padded = self._is_padded(meta)
        if padded is not meta.padded:
            meta = replace(meta, padded=padded)
        self._padded = padded
        # A tensor of another type is of some tracing mode, and ends with it.
        if self.copies_shape and meta.has_shape_of(forward_batch) and type(meta.cu) is Tensor:
            self._last_shape = meta
        self._begin(forward_batch)
        self.forward_metadata = meta

    @hookimpl
    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool
    ) -> None:
        """See :meth:`sconv.hookspecs.StepSpec.init_forward_metadata_out_graph`."""
        buffers = self._static_buffers(forward_batch)
        tokens = self._plan(forward_batch)
        buffers.check(forward_batch.batch_size, tokens)
        translated = self._translated(forward_batch)
        self._begin(forward_batch)
        self._planned_tokens = tokens
        self._keep_translated(translated, buffers)

    @hookimpl
    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """See :meth:`sconv.hookspecs.StepSpec.init_forward_metadata_in_graph`."""
        buffers = self._static_buffers(forward_batch)
        check_batch(forward_batch, self.spec, self.pool, self.max_rows, values=False)
        tokens = forward_batch.num_tokens
        if tokens is None:
            tokens = self._planned_tokens
        if tokens is None:
            raise MetadataError(
                "the step's token count is unknown: give ForwardBatch num_tokens=, or call "
                "init_forward_metadata_out_graph first"
            )
        meta = buffers.step(forward_batch, tokens, padded=True, plan=self._new_plan())
        self.pool.note_recorded(f"{meta.forward_mode.value} of {meta.batch_size} rows")
        self._fill(meta, forward_batch, buffers)
        self.forward_metadata = meta

    @hookimpl
    def conv_state_metadata(self, layer_id: int, forward_batch: ForwardBatch) -> ShortConvMetadata:
        """See :meth:`sconv.hookspecs.StepSpec.conv_state_metadata`."""
        meta = self.forward_metadata
        if meta is None:
            raise MetadataError(
                "no step is prepared: call init_forward_metadata, or both halves "
                "(init_forward_metadata_out_graph, then init_forward_metadata_in_graph) first"
            )
        return meta

    def _plan(self, batch: ForwardBatch) -> int:
        """Check the batch and return its packed tokens; a refused batch changes nothing."""
        check_is_batch(batch)
        check_batch(batch, self.spec, self.pool, self.max_rows)
        if batch.num_tokens is not None:
            return batch.num_tokens
        assert batch.extend_seq_lens is not None
        tokens = int(batch.extend_seq_lens.sum())
        if not 0 <= tokens <= MOST_TOKENS:
            raise BatchError(
                f"extend_seq_lens add up to {tokens}: expected 0 to {MOST_TOKENS} tokens in a step"
            )
        return tokens

    def _begin(self, batch: ForwardBatch) -> None:
        """Forget the last step: the batch is accepted. What a commit needs outlives other modes."""
        self.forward_metadata = None
        self._planned_tokens = None
        if batch.forward_mode is ForwardMode.TARGET_VERIFY:
            assert batch.tokens_per_row is not None
            self.verify_tokens = batch.tokens_per_row
            self.verify_rows = batch.batch_size
            self.verify_by_slots = batch.slots is not None
            self.verify_tree = batch.is_tree

    def _is_padded(self, meta: ShortConvMetadata) -> bool:
        """Whether an eager step has rows without a slot, or tokens past the last row.

        True where finding out would cost a sync.
        """
        return True

    def _translated(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None] | None:
        """Run an allocator's own translation, which is not recordable.

        Returns:
            ``[B]`` int64 rows of the pool of the rows and of their snapshots; None if the device
            translates.
        """
        if not self.pool.translates_on_host:
            return None
        slots = torch.empty(batch.batch_size, dtype=torch.int64, device=self.device)
        self.pool.lookup_slots(batch.req_pool_indices, batch.slots, out=slots)
        self.pool.translate_(slots)
        tracks = batch.mamba_track_indices
        if tracks is not None:
            tracks = self.pool.translate_(tracks.to(torch.int64, copy=True))
        if batch.batch_size and values_are_checked(self.device):
            for rows in (slots, tracks):
                if rows is not None:
                    check_physical("virtual_to_physical", rows, self.pool)
        return slots, tracks

    def _keep_translated(
        self, translated: tuple[Tensor, Tensor | None] | None, buffers: MetadataBuffers
    ) -> None:
        """Write translated rows where the recorded part of the step reads them."""
        if translated is None:
            return
        slots, tracks = translated
        buffers.host_slots[: slots.shape[0]].copy_(slots)
        if tracks is not None:
            buffers.host_tracks[: tracks.shape[0]].copy_(tracks)

    def _static_buffers(self, batch: ForwardBatch) -> MetadataBuffers:
        check_is_batch(batch)
        if self._buffers is None:
            raise GraphBufferError(
                "no static buffers: call init_graph_state before the first capture",
                have={"max_bs": 0},
                need={"max_bs": batch.batch_size},
            )
        return self._buffers
