"""One commit in checked mode: whether it is that of the verify step, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import BatchError, MetadataError
from ..state.pool import ConvStatePool
from ..state.shadow import Content, SlotRecord
from .checked_step import CheckedStep, Row

__all__ = ["plan_commit"]


@dataclass(frozen=True, slots=True)
class _Write:
    slot: int
    length: int | None
    note: str


def plan_commit(
    verify: CheckedStep,
    pool: ConvStatePool,
    last_correct_step_indices: Tensor,
    mamba_track_indices: Tensor | None,
    mamba_steps_to_track: Tensor | None,
    req_pool_indices: Tensor,
) -> Callable[[], None]:
    """Compare a commit whose shapes are checked with its verify step. Syncs.

    A row that keeps nothing, or has no slot by now, changes nothing and may name anything.

    Returns:
        What records the commit, once it is made.

    Raises:
        BatchError: A row is not the verify step's, or its slot changed hands or was written since.
        MetadataError: Convolutions of the verify step have not run.
    """
    nodes = last_correct_step_indices.tolist()
    names = req_pool_indices.tolist()
    slots = _slots(verify, pool, req_pool_indices)
    targets, steps = [-1] * len(nodes), [-1] * len(nodes)
    if mamba_track_indices is not None and mamba_steps_to_track is not None:
        targets = pool.translate_(mamba_track_indices.to(torch.int64, copy=True)).tolist()
        steps = mamba_steps_to_track.tolist()
    rows = {row.index: row for row in verify.rows}
    kept: dict[int, _Write] = {}
    taken: dict[int, _Write] = {}
    for index, (node, slot) in enumerate(zip(nodes, slots, strict=True)):
        if not (_is_node(verify, node) and 0 < slot < pool.num_rows):
            continue
        if names[index] != verify.names[index]:
            raise BatchError(
                f"req_pool_indices names {names[index]} for row {index}, which was "
                f"{verify.names[index]} in the verify step: give the rows of that step in its "
                "order, and -1 as the last node of each that was dropped"
            )
        row = rows.get(index)
        _check_owner(index, slot, row, verify, pool)
        assert row is not None
        if slot in kept:
            raise BatchError(f"two rows of the commit have one slot: {slot}")
        kept[slot] = _Write(slot, _length(verify, row, node), "last written by a commit")
        target = targets[index]
        if not (_is_node(verify, steps[index]) and 0 < target < pool.num_rows):
            continue
        if not verify.shadow.in_use(target):
            raise BatchError(
                f"row {index} is snapshot into slot {target}, which is not in use "
                f"({verify.shadow[target].note}): hand it out first"
            )
        if target in taken:
            raise BatchError(f"two rows of the commit are snapshot into one slot: {target}")
        taken[target] = _Write(target, _length(verify, row, steps[index]), "a snapshot of a commit")
    if both := sorted(kept.keys() & taken.keys()):
        raise BatchError(
            f"snapshots go to slots {both}, which rows of this commit own: the order of the writes "
            "would decide. Give each snapshot a slot that no row of the commit has"
        )
    if kept and not verify.complete:
        raise MetadataError(
            f"the commit would keep windows that this step did not make: {verify.progress()}. Run "
            "every layer before the commit, or keep nothing (-1)"
        )

    def record() -> None:
        for write in (*kept.values(), *taken.values()):
            verify.shadow[write.slot].set(Content.WRITTEN, write.length, write.note)

    return record


def _slots(verify: CheckedStep, pool: ConvStatePool, rows: Tensor) -> list[int]:
    ids = rows
    if verify.batch.slots is None:
        pool.check_request_rows(rows)
        ids = pool.req_to_slot.index_select(0, rows)
    found: list[int] = pool.translate_(ids.to(torch.int64, copy=True)).tolist()
    return found


def _is_node(verify: CheckedStep, node: int) -> bool:
    return 0 <= node < (verify.batch.tokens_per_row or 0)


def _length(verify: CheckedStep, row: Row, node: int) -> int | None:
    return None if row.before is None else row.before + verify.depth(row.index, node)


def _check_owner(
    index: int, slot: int, row: Row | None, verify: CheckedStep, pool: ConvStatePool
) -> None:
    record = verify.shadow[slot]
    if row is None or not _is_owners(record, slot, row):
        had = "none" if row is None else row.slot
        then = "" if row is not None and slot == row.slot else f" It had {had} then."
        raise BatchError(
            f"row {index} of the commit has slot {slot}, which is not its request's of the verify "
            f"step ({record.note}).{then} Give -1 as the last node of a row whose request is gone"
        )
    if slot == row.slot and record.writes != row.writes and pool.window_layout == "inputs":
        raise BatchError(
            f"slot {slot} of row {index} was written since the verify step ({record.note}), and "
            "the layout 'inputs' makes windows from the state as it was then: commit once, and "
            "before the row's next step"
        )


def _is_owners(record: SlotRecord, slot: int, row: Row) -> bool:
    if slot == row.slot:
        return record.owner == row.owner
    # An engine may have moved the request: its new slot then holds a state of the same length.
    return record.content is Content.UNKNOWN or (
        record.content is Content.WRITTEN and record.length in (row.before, None)
    )
