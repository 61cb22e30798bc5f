"""What an engine says of one step: the mode, the rows, and their lengths.

A batch holds references to the engine's tensors and checks none of their values; shapes, dtypes and
devices are checked when a step is prepared, against the backend that it is prepared for.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from ..errors import BatchError
from ..messages import kind_of
from ..state.tensor_memory import memory_fault

__all__ = ["ForwardBatch", "ForwardMode", "check_is_batch"]

#: What says of a step which rows it moves on, and by how much.
_STEP_TENSORS: Final = (
    "req_pool_indices",
    "slots",
    "extend_seq_lens",
    "extend_prefix_lens",
    "parents",
    "next_token",
    "next_sibling",
    "num_accept_tokens",
)


class ForwardMode(enum.Enum):
    """What a step does to the state of its rows."""

    DECODE = "decode"
    EXTEND = "extend"
    MIXED = "mixed"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND = "draft_extend"
    IDLE = "idle"

    @property
    def is_ragged(self) -> bool:
        """Whether rows have lengths of their own (extend and mixed)."""
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED)


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """One step. Use the constructors below; each takes what its mode needs and nothing else.

    Rows are named by ``req_pool_indices`` (``[B]`` int64, the engine's request rows) or, where an
    engine has none, by ``slots`` (``[B]`` int32 or int64). Tensors lie on the backend's device;
    every length tensor is ``[B]``, int32 or int64.

    Attributes:
        forward_mode: The mode.
        batch_size: Rows B, padding included.
        num_tokens: Packed tokens T if the host knows them, else None.
        tokens_per_row: Tokens of every row where all rows have as many, else None.
        req_pool_indices: Request rows, or None.
        slots: Slots, or None.
        seq_lens: Tokens of each row that are in its state before the step, or None.
        extend_seq_lens: New tokens of each row (extend, mixed).
        extend_prefix_lens: Tokens that each row resumes from (extend, mixed).
        parents: ``[B, dtn]`` int32 parent of each node, -1 for a root; None = chain.
        next_token: ``[B, dtn]`` first child of each node, -1 = none; given instead of parents.
        next_sibling: ``[B, dtn]`` next sibling of each node, -1 = none.
        num_accept_tokens: Tokens whose effect is kept (draft-extend); negative = padded row.
        mamba_track_mask: ``[B]`` bool, rows that are snapshot.
        mamba_track_indices: ``[B]`` int64, slots that receive the snapshots.
        mamba_track_seqlens: ``[B]``, length at which an extend is snapshot, -1 = none.
    """

    forward_mode: ForwardMode
    batch_size: int
    num_tokens: int | None
    tokens_per_row: int | None
    req_pool_indices: Tensor | None = None
    slots: Tensor | None = None
    seq_lens: Tensor | None = None
    extend_seq_lens: Tensor | None = None
    extend_prefix_lens: Tensor | None = None
    parents: Tensor | None = None
    next_token: Tensor | None = None
    next_sibling: Tensor | None = None
    num_accept_tokens: Tensor | None = None
    mamba_track_mask: Tensor | None = None
    mamba_track_indices: Tensor | None = None
    mamba_track_seqlens: Tensor | None = None

    def __post_init__(self) -> None:
        if type(self.forward_mode) is not ForwardMode:
            raise BatchError(
                f"forward_mode is {self.forward_mode!r}: expected a sconv.ForwardMode. Make a "
                "batch with one of the constructors of its mode, such as ForwardBatch.decode"
            )

    @classmethod
    def decode(
        cls,
        req_pool_indices: Tensor | None = None,
        seq_lens: Tensor | None = None,
        *,
        slots: Tensor | None = None,
        mamba_track_mask: Tensor | None = None,
        mamba_track_indices: Tensor | None = None,
    ) -> ForwardBatch:
        """One token per row; the window moves on by it.

        ``mamba_track_mask`` marks the rows whose window after the step is also written to the slot
        in ``mamba_track_indices``; without a mask, every row with a slot there.
        """
        rows = _rows(req_pool_indices, slots)
        return cls(
            ForwardMode.DECODE,
            rows,
            rows,
            1,
            req_pool_indices=req_pool_indices,
            slots=slots,
            seq_lens=seq_lens,
            mamba_track_mask=mamba_track_mask,
            mamba_track_indices=mamba_track_indices,
        )

    @classmethod
    def extend(
        cls,
        req_pool_indices: Tensor | None = None,
        extend_seq_lens: Tensor | None = None,
        extend_prefix_lens: Tensor | None = None,
        *,
        slots: Tensor | None = None,
        num_tokens: int | None = None,
        mamba_track_mask: Tensor | None = None,
        mamba_track_indices: Tensor | None = None,
        mamba_track_seqlens: Tensor | None = None,
    ) -> ForwardBatch:
        """Any number of tokens per row, 0 included; a row with a prefix resumes its window.

        ``num_tokens`` saves a backend one host sync per step. ``mamba_track_seqlens`` is the length
        (prefix included) at which a row's window is written to ``mamba_track_indices``.
        """
        rows = _rows(req_pool_indices, slots)
        if extend_seq_lens is None or extend_prefix_lens is None:
            raise BatchError(
                "extend and mixed need extend_seq_lens and extend_prefix_lens, one number per row"
            )
        return cls(
            ForwardMode.EXTEND,
            rows,
            num_tokens,
            None,
            req_pool_indices=req_pool_indices,
            slots=slots,
            extend_seq_lens=extend_seq_lens,
            extend_prefix_lens=extend_prefix_lens,
            mamba_track_mask=mamba_track_mask,
            mamba_track_indices=mamba_track_indices,
            mamba_track_seqlens=mamba_track_seqlens,
        )

    @classmethod
    def mixed(
        cls,
        req_pool_indices: Tensor | None = None,
        extend_seq_lens: Tensor | None = None,
        extend_prefix_lens: Tensor | None = None,
        *,
        slots: Tensor | None = None,
        num_tokens: int | None = None,
        mamba_track_mask: Tensor | None = None,
        mamba_track_indices: Tensor | None = None,
        mamba_track_seqlens: Tensor | None = None,
    ) -> ForwardBatch:
        """Prefill rows and decoding rows in one batch: a decoding row is an extend by one token."""
        extend = cls.extend(
            req_pool_indices,
            extend_seq_lens,
            extend_prefix_lens,
            slots=slots,
            num_tokens=num_tokens,
            mamba_track_mask=mamba_track_mask,
            mamba_track_indices=mamba_track_indices,
            mamba_track_seqlens=mamba_track_seqlens,
        )
        return replace(extend, forward_mode=ForwardMode.MIXED)

    @classmethod
    def target_verify(
        cls,
        req_pool_indices: Tensor | None = None,
        seq_lens: Tensor | None = None,
        draft_token_num: int | None = None,
        *,
        slots: Tensor | None = None,
        parents: Tensor | None = None,
        next_token: Tensor | None = None,
        next_sibling: Tensor | None = None,
    ) -> ForwardBatch:
        """``draft_token_num`` tokens per row, root first; nothing is kept before the commit.

        A tree is given by ``parents`` or by ``next_token`` and ``next_sibling``; otherwise the
        tokens of a row are a chain.
        """
        rows = _rows(req_pool_indices, slots)
        per_row = _draft_tokens(draft_token_num)
        if (next_token is None) != (next_sibling is None):
            raise BatchError("next_token and next_sibling come together: first child, next sibling")
        if parents is not None and next_token is not None:
            raise BatchError(
                "a tree comes as parents or as next_token and next_sibling, not as both"
            )
        return cls(
            ForwardMode.TARGET_VERIFY,
            rows,
            rows * per_row,
            per_row,
            req_pool_indices=req_pool_indices,
            slots=slots,
            seq_lens=seq_lens,
            parents=parents,
            next_token=next_token,
            next_sibling=next_sibling,
        )

    @classmethod
    def draft_extend(
        cls,
        req_pool_indices: Tensor | None = None,
        seq_lens: Tensor | None = None,
        draft_token_num: int | None = None,
        num_accept_tokens: Tensor | None = None,
        *,
        slots: Tensor | None = None,
        mamba_track_mask: Tensor | None = None,
        mamba_track_indices: Tensor | None = None,
    ) -> ForwardBatch:
        """``draft_token_num`` tokens per row, of which ``num_accept_tokens`` move the window on.

        A row whose accepted tokens cross a multiple of ``spec.track_grid`` is snapshot at it, into
        its slot in ``mamba_track_indices``.
        """
        rows = _rows(req_pool_indices, slots)
        per_row = _draft_tokens(draft_token_num)
        if seq_lens is None or num_accept_tokens is None:
            raise BatchError(
                "draft_extend needs seq_lens and num_accept_tokens, one number per row each"
            )
        return cls(
            ForwardMode.DRAFT_EXTEND,
            rows,
            rows * per_row,
            per_row,
            req_pool_indices=req_pool_indices,
            slots=slots,
            seq_lens=seq_lens,
            num_accept_tokens=num_accept_tokens,
            mamba_track_mask=mamba_track_mask,
            mamba_track_indices=mamba_track_indices,
        )

    @classmethod
    def idle(cls, batch_size: int = 0) -> ForwardBatch:
        """No tokens; ``batch_size`` padded rows without a slot, for ranks that pad an idle step."""
        if isinstance(batch_size, bool) or not isinstance(batch_size, int):
            raise BatchError(f"batch_size={batch_size!r}: expected an int")
        if batch_size < 0:
            raise BatchError(f"batch_size={batch_size}: expected 0 or more")
        return cls(ForwardMode.IDLE, batch_size, 0, 0)

    @property
    def is_tree(self) -> bool:
        """Whether a verify step's tokens are a tree."""
        return self.parents is not None or self.next_token is not None

    def is_same_step(self, other: ForwardBatch, *, values: bool) -> bool:
        """Whether another batch of the same mode names the same rows, lengths and trees.

        An engine may describe one step in two objects, around the same tensors.

        Args:
            other: The other batch.
            values: Whether equal values in other memory are the same too; reading them costs a sync
                on a device. Otherwise the tensors must be the same memory.
        """
        return all(
            _is_same(getattr(self, name), getattr(other, name), values=values)
            for name in _STEP_TENSORS
        )

    @property
    def tracks(self) -> bool:
        """Whether the batch names slots that receive snapshots."""
        return self.mamba_track_indices is not None


def check_is_batch(value: object) -> None:
    """Check that a step is described by a batch, and not by an engine's own description.

    Raises:
        BatchError: It is something else.
    """
    if not isinstance(value, ForwardBatch):
        raise BatchError(
            f"forward_batch is {kind_of(value)}: expected a sconv.ForwardBatch, made by one of its "
            "constructors, such as ForwardBatch.decode"
        )


def _rows(req_pool_indices: Tensor | None, slots: Tensor | None) -> int:
    if (req_pool_indices is None) == (slots is None):
        raise BatchError("name the rows by req_pool_indices or by slots: exactly one of them")
    rows = slots if req_pool_indices is None else req_pool_indices
    name = "slots" if req_pool_indices is None else "req_pool_indices"
    if not isinstance(rows, Tensor):
        raise BatchError(f"{name} is {kind_of(rows)}: expected a tensor [B]")
    if (type(rows) is not Tensor or rows.layout is not torch.strided) and (
        fault := memory_fault(rows)
    ):
        raise BatchError(f"{name} {fault}")
    if rows.dim() != 1:
        raise BatchError(f"{name} has shape {list(rows.shape)}: expected [B], one entry per row")
    return rows.shape[0]


def _is_same(mine: Tensor | None, theirs: Tensor | None, *, values: bool) -> bool:
    if mine is theirs:
        return True
    if mine is None or not isinstance(theirs, Tensor) or memory_fault(theirs) is not None:
        return False
    if mine.device != theirs.device:
        return False
    if mine.shape != theirs.shape:
        return False
    # Without addresses, which fake tensors do not have.
    if (
        mine.untyped_storage() is theirs.untyped_storage()
        and mine.storage_offset() == theirs.storage_offset()
        and mine.stride() == theirs.stride()
        and mine.dtype is theirs.dtype
    ):
        return True
    return values and bool((mine == theirs).all())


def _draft_tokens(draft_token_num: int | None) -> int:
    if isinstance(draft_token_num, bool) or not isinstance(draft_token_num, int):
        raise BatchError(f"draft_token_num={draft_token_num!r}: expected an int, the root included")
    if draft_token_num < 1:
        raise BatchError(f"draft_token_num={draft_token_num}: a row has at least its root")
    return draft_token_num
