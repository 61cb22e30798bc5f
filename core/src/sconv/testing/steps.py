"""One step in plain numbers: what a test draws, and what it becomes for a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..step.batch import ForwardBatch, ForwardMode

__all__ = ["Step", "grow_tree", "links_of", "rows_of"]


@dataclass(frozen=True)
class Step:
    """A step by physical slots. Sequences have one entry per row.

    Attributes:
        mode: The mode.
        slots: Row of the pool of each row; -1 = none, 0 = the dummy.
        lengths: Tokens of each row.
        before: Tokens in each row's state before the step.
        tail: Tokens past the last row (ragged modes).
        draft_tokens: Tokens per row of a verify or draft-extend step.
        parents: Tree of a verify step; None = chain.
        links: The tree is given by child and sibling links instead.
        accepts: Kept tokens of a draft-extend step.
        track_slots: Rows of the pool that receive snapshots, -1 = none; None = no tracking.
        track_mask: Rows that are snapshot; None = those with a slot in ``track_slots``.
        track_lengths: Length of an extend at which it is snapshot, -1 = none; None = its end.
        by_slots: Name the rows by slots instead of by request rows.
        host_tokens: Tell the backend how many tokens there are (ragged modes).
        index_dtype: Dtype of the lengths.
    """

    mode: ForwardMode
    slots: tuple[int, ...]
    lengths: tuple[int, ...]
    before: tuple[int, ...]
    tail: int = 0
    draft_tokens: int = 1
    parents: tuple[tuple[int, ...], ...] | None = None
    links: bool = False
    accepts: tuple[int, ...] | None = None
    track_slots: tuple[int, ...] | None = None
    track_mask: tuple[bool, ...] | None = None
    track_lengths: tuple[int, ...] | None = None
    by_slots: bool = False
    host_tokens: bool = True
    index_dtype: torch.dtype = torch.int64

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """Packed tokens, the tail included."""
        return sum(self.lengths) + self.tail

    @property
    def resumes(self) -> tuple[bool, ...]:
        """Rows that resume a window."""
        if self.mode is ForwardMode.IDLE:
            return (True,) * self.rows
        return tuple(length > 0 for length in self.before)

    @property
    def snapshot_targets(self) -> tuple[int, ...]:
        """``track_slots`` after the mask, -1 = none."""
        if self.track_slots is None:
            return (-1,) * self.rows
        mask = (True,) * self.rows if self.track_mask is None else self.track_mask
        return tuple(
            slot if wanted else -1 for slot, wanted in zip(self.track_slots, mask, strict=True)
        )

    def batch(
        self,
        request_rows: Sequence[int],
        slot_id: Callable[[int], int] = int,
        device: torch.device | str = "cpu",
    ) -> ForwardBatch:
        """Build the batch.

        Args:
            request_rows: Request row of each row.
            slot_id: The engine's id of a row of the pool, -1 included.
            device: Where its tensors go.
        """

        def tensor(values: Sequence[object], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        def lengths(values: Sequence[int]) -> Tensor:
            return tensor(values, self.index_dtype)

        if self.mode is ForwardMode.IDLE:
            return ForwardBatch.idle(self.rows)
        rows = None if self.by_slots else tensor(request_rows)
        slots = tensor([slot_id(slot) for slot in self.slots]) if self.by_slots else None
        mask = targets = None
        if self.track_slots is not None:
            targets = tensor([slot_id(slot) for slot in self.track_slots])
            mask = None if self.track_mask is None else tensor(self.track_mask, torch.bool)
        match self.mode:
            case ForwardMode.DECODE:
                return ForwardBatch.decode(
                    rows,
                    lengths(self.before),
                    slots=slots,
                    mamba_track_mask=mask,
                    mamba_track_indices=targets,
                )
            case ForwardMode.TARGET_VERIFY:
                tree: dict[str, Tensor] = {}
                if self.parents is not None and self.links:
                    child, sibling = links_of(self.parents, self.draft_tokens)
                    tree = {"next_token": tensor(child), "next_sibling": tensor(sibling)}
                elif self.parents is not None:
                    tree = {"parents": tensor(self.parents, torch.int32)}
                tree = {
                    name: value.reshape(self.rows, self.draft_tokens)
                    for name, value in tree.items()
                }
                return ForwardBatch.target_verify(
                    rows, lengths(self.before), self.draft_tokens, slots=slots, **tree
                )
            case ForwardMode.DRAFT_EXTEND:
                assert self.accepts is not None
                return ForwardBatch.draft_extend(
                    rows,
                    lengths(self.before),
                    self.draft_tokens,
                    tensor(self.accepts, torch.int32),
                    slots=slots,
                    mamba_track_mask=mask,
                    mamba_track_indices=targets,
                )
            case _:
                make = ForwardBatch.mixed if self.mode is ForwardMode.MIXED else ForwardBatch.extend
                return make(
                    rows,
                    lengths(self.lengths),
                    lengths(self.before),
                    slots=slots,
                    num_tokens=self.num_tokens if self.host_tokens else None,
                    mamba_track_mask=mask,
                    mamba_track_indices=targets,
                    mamba_track_seqlens=None
                    if self.track_lengths is None or targets is None
                    else tensor(self.track_lengths),
                )


def grow_tree(
    choose: Callable[[Sequence[int]], int], draft_tokens: int, topk: int
) -> tuple[int, ...]:
    """Return the parents of one row's nodes; no node gets more than ``topk`` children.

    Args:
        choose: Picks a parent among the nodes that may have one child more.
        draft_tokens: Nodes, the root included.
        topk: ``draft_topk`` of the spec.
    """
    parents = [-1]
    for node in range(1, draft_tokens):
        parents.append(choose([above for above in range(node) if parents.count(above) < topk]))
    return tuple(parents)


def links_of(
    parents: Sequence[Sequence[int]], draft_tokens: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return first-child and next-sibling links of trees that are given by parents."""
    children, siblings = [], []
    for row in parents:
        child, sibling = [-1] * draft_tokens, [-1] * draft_tokens
        last_child: dict[int, int] = {}
        for node, parent in enumerate(row):
            if parent < 0:
                continue
            if parent in last_child:
                sibling[last_child[parent]] = node
            else:
                child[parent] = node
            last_child[parent] = node
        children.append(child)
        siblings.append(sibling)
    return children, siblings


def rows_of(step: Step, order: Sequence[int]) -> Step:
    """Return the step with its rows in another order, or with some of them left out."""

    def pick(values: tuple[object, ...] | None) -> tuple[object, ...] | None:
        return None if values is None else tuple(values[row] for row in order)

    names = (
        "slots",
        "lengths",
        "before",
        "parents",
        "accepts",
        "track_slots",
        "track_mask",
        "track_lengths",
    )
    return replace(step, **{name: pick(getattr(step, name)) for name in names})  # type: ignore[arg-type]
