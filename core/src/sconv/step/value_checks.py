"""Checks of values: ranges of rows, slots and lengths, and rows that would write one slot.

They read tensors on the host. On the CPU that costs no sync, so ranges are always checked there;
elsewhere, and for batches whose result is undefined, that is for checked mode
(:mod:`sconv.engine.checked`). A refused batch has changed nothing.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ..errors import BatchError
from ..state.pool import ConvStatePool
from ..state.spec import StateSpec
from .batch import ForwardBatch, ForwardMode
from .draft_tree import parents_from_links
from .tracking import crossing_steps

__all__ = [
    "MOST_TOKENS",
    "check_physical",
    "check_undefined",
    "check_values",
    "slots_of",
    "values_are_checked",
]

#: Most tokens of a step, and of a row: what the int32 of the metadata can count.
MOST_TOKENS: Final = torch.iinfo(torch.int32).max


def values_are_checked(device: torch.device) -> bool:
    """Whether values on this device are checked always: where reading them costs no sync."""
    return device.type == "cpu"


def check_values(batch: ForwardBatch, spec: StateSpec, pool: ConvStatePool) -> None:
    """Check the values of a batch whose shapes are right. Out of graph; reads them on the host.

    Raises:
        BatchError: The message says which value, what was expected and, for a row, which.
    """
    if batch.batch_size == 0:
        return
    if batch.req_pool_indices is not None:
        slots = _slots_of_requests(batch.req_pool_indices, pool)
        if pool.virtual_to_physical is None:
            check_physical("req_to_slot", slots, pool)
    if not pool.translates_on_host:
        table = pool.virtual_to_physical
        ids = table.shape[0] if isinstance(table, Tensor) else pool.num_rows
        for name, value in (
            ("slots", batch.slots),
            ("mamba_track_indices", batch.mamba_track_indices),
        ):
            if value is not None:
                _check_range(name, value, -1, ids - 1)
        if isinstance(table, Tensor):
            _check_reach(batch, pool)
    for name, value in (
        ("seq_lens", batch.seq_lens),
        ("extend_prefix_lens", batch.extend_prefix_lens),
    ):
        if value is not None:
            _check_range(name, value, 0, MOST_TOKENS)
    if batch.is_tree:
        _check_tree(batch, spec, pool)
    if batch.extend_seq_lens is not None:
        _check_range("extend_seq_lens", batch.extend_seq_lens, 0, MOST_TOKENS)
        total = int(batch.extend_seq_lens.sum())
        # A padded bucket has tokens past the last row, so more is fine and fewer is not.
        if batch.num_tokens is not None and batch.num_tokens < total:
            raise BatchError(
                f"num_tokens={batch.num_tokens}, but extend_seq_lens add up to {total}"
            )


def _slots_of_requests(rows: Tensor, pool: ConvStatePool) -> Tensor:
    """``[B]`` int32, what ``req_to_slot`` has for the rows, which are checked by the look-up."""
    if rows.device.type != "cpu":
        pool.check_request_rows(rows)
    try:
        return pool.req_to_slot.index_select(0, rows)
    except IndexError:
        # Its message names neither the row nor the bound.
        pool.check_request_rows(rows)
        raise


def _check_reach(batch: ForwardBatch, pool: ConvStatePool) -> None:
    """An engine fills its table itself, with rows that may not exist."""
    if batch.forward_mode is not ForwardMode.IDLE:
        check_physical("virtual_to_physical", slots_of(batch, pool), pool)
    if batch.mamba_track_indices is not None:
        targets = pool.translate_(batch.mamba_track_indices.to(torch.int64, copy=True))
        check_physical("virtual_to_physical", targets, pool)


def check_physical(source: str, rows: Tensor, pool: ConvStatePool) -> None:
    """Check rows of the pool that a table or a function of an engine gave. Reads them on the host.

    Raises:
        BatchError: One is past the pool's last.
    """
    most = int(rows.amax())
    if most >= pool.num_rows:
        raise BatchError(
            f"{source} gives row {most} of the pool for a row of this batch: the state has rows 0 "
            f"to {pool.num_rows - 1}. Adopt the tensors and the table of one allocator"
        )


def _check_tree(batch: ForwardBatch, spec: StateSpec, pool: ConvStatePool) -> None:
    """Whether parents come before their children, and have no more of them than the spec says."""
    parents = batch.parents
    if parents is None:
        assert batch.next_token is not None
        assert batch.next_sibling is not None
        parents = parents_from_links(batch.next_token, batch.next_sibling)
    else:
        _check_parents(parents)
    node = torch.arange(parents.shape[1], device=parents.device, dtype=torch.int64)
    if spec.draft_topk == 1:
        wrong = (parents != node - 1).any(1)
    else:
        children = (parents[:, :, None] == node).sum(1)  # [B, dtn]
        wrong = (children > spec.draft_topk).any(1)
    if bool(wrong.any()):
        # What a padded row holds means nothing.
        wrong &= slots_of(batch, pool) > 0
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        most = (
            "the spec says chains: leave parents and links out"
            if spec.draft_topk == 1
            else f"the spec says {spec.draft_topk} children of a node at most"
        )
        raise BatchError(
            f"row {row} is a tree with the parents {parents[row].tolist()}, and {most}, or build "
            "the backend with a larger draft_topk"
        )


def _check_parents(parents: Tensor) -> None:
    node = torch.arange(parents.shape[1], device=parents.device, dtype=torch.int64)
    wrong = (parents < -1) | (parents >= node)
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise BatchError(
            f"parents holds {int(parents[row, column])} for node {column} of row {row}: expected "
            "an earlier node of the row, or -1 for a root"
        )


def _check_range(name: str, value: Tensor, low: int, high: int) -> None:
    least, most = (int(bound) for bound in value.aminmax())
    if least < low or most > high:
        wrong = least if least < low else most
        raise BatchError(f"{name} holds {wrong}: expected {low} to {high}")


def check_undefined(batch: ForwardBatch, pool: ConvStatePool) -> None:
    """Check what every backend may answer in its own way: counts past a row, slots written twice.

    Raises:
        BatchError: The message says which value, what was expected and, for a row, which.
    """
    if batch.forward_mode is ForwardMode.IDLE or batch.batch_size == 0:
        return
    if batch.num_accept_tokens is not None:
        most = int(batch.num_accept_tokens.max())
        if most > (batch.tokens_per_row or 0):
            raise BatchError(
                f"num_accept_tokens holds {most}: a row has {batch.tokens_per_row} tokens"
            )
    slots = slots_of(batch, pool)
    if pool.virtual_to_physical is not None:
        check_physical("virtual_to_physical", slots, pool)
    live = _positive(slots)
    if len(set(live)) != len(live):
        raise BatchError(
            f"two rows of the batch have one slot: {live}. Only the dummy slot 0 may be shared"
        )
    if batch.mamba_track_indices is not None:
        _check_snapshots(batch, pool, slots, batch.mamba_track_indices)


def _check_snapshots(
    batch: ForwardBatch, pool: ConvStatePool, slots: Tensor, track_indices: Tensor
) -> None:
    """Snapshots that are due have slots of their own, and lengths that their rows pass."""
    targets = pool.translate_(track_indices.to(torch.int64, copy=True))
    due = (slots > 0) & (targets > 0)  # [B]
    if batch.mamba_track_mask is not None:
        due &= batch.mamba_track_mask
    if batch.extend_seq_lens is not None and batch.extend_prefix_lens is not None:
        due &= batch.extend_seq_lens > 0
        if batch.mamba_track_seqlens is not None:
            due &= batch.mamba_track_seqlens != -1
            _check_lengths(
                batch.mamba_track_seqlens, batch.extend_prefix_lens, batch.extend_seq_lens, due
            )
    elif batch.num_accept_tokens is not None:
        assert batch.seq_lens is not None
        grid = pool.spec.track_grid
        if grid is None:
            return
        due &= crossing_steps(batch.seq_lens, batch.num_accept_tokens, grid) >= 0
    taken = _positive(targets[due])
    if len(set(taken)) != len(taken):
        raise BatchError(
            f"two rows of the batch are snapshot into one slot: {taken}. Give each snapshot a slot "
            "of its own, and -1 to the rows that have none"
        )
    if both := sorted(set(taken) & set(_positive(slots))):
        raise BatchError(
            f"snapshots go to slots {both}, which rows of this batch own: the order of the writes "
            "would decide. Give each snapshot a slot that no row of the batch has"
        )


def _check_lengths(lengths: Tensor, before: Tensor, new: Tensor, due: Tensor) -> None:
    wrong = due & ((lengths < before) | (lengths > before + new))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        first = int(before[row])
        raise BatchError(
            f"mamba_track_seqlens holds {int(lengths[row])} for row {row}: expected {first} to "
            f"{first + int(new[row])}, the lengths that this step passes, or -1 for no snapshot"
        )


def slots_of(batch: ForwardBatch, pool: ConvStatePool) -> Tensor:
    """Return ``[B]`` int64, the pool's row of each row of the batch, -1 = none. A new tensor."""
    slots = batch.slots
    if slots is None:
        assert batch.req_pool_indices is not None
        slots = pool.req_to_slot.index_select(0, batch.req_pool_indices)
    return pool.translate_(slots.to(torch.int64, copy=True))


def _positive(slots: Tensor) -> list[int]:
    return sorted(slot for slot in slots.tolist() if slot > 0)
