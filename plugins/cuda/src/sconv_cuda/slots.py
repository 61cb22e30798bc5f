"""From an engine's row numbers to rows of the pool, inside of the kernel that needs them.

An integer tensor of an engine is 32 or 64 bits wide. Kernels read it as 32-bit words, ``step`` of
them apart (:func:`words`), so that one compilation serves both; slots and lengths fit in a word.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sconv import ConvStatePool, ForwardBatch
from sconv.plugin import MetadataBuffers

__all__ = ["SlotSource", "lookup", "translate", "words"]


def words(values: Tensor) -> tuple[Tensor, int]:
    """Return an int32 view of an int32 or int64 tensor, and the words from value to value."""
    if not values.is_contiguous():
        values = values.contiguous()
    if values.dtype is torch.int64:
        return values.view(torch.int32), 2
    return values, 1


@triton.jit
def lookup(ids, map_index, map_size, there):
    """Return the slot id of request rows, -1 for rows outside of the map."""
    known = there & (ids >= 0) & (ids < map_size)
    return tl.load(map_index + ids, mask=known, other=-1)


@triton.jit
def translate(
    ids, table_index, table_step, table_size, NULL_ZERO: tl.constexpr, TRANSLATE: tl.constexpr
):
    """Turn slot ids into rows of the pool; every "no slot" becomes -1."""
    if NULL_ZERO:
        ids = tl.where(ids == 0, -1, ids)
    if TRANSLATE:
        known = (ids >= 0) & (ids < table_size)
        ids = tl.load(table_index + ids.to(tl.int64) * table_step, mask=known, other=-1)
    return tl.maximum(ids, -1)


class SlotSource:
    """How a pool's rows are found, as arguments of a kernel, by name.

    Attributes:
        constants: ``NULL_ZERO, TRANSLATE``; False where the host translates, out of graph.
    """

    def __init__(self, pool: ConvStatePool) -> None:
        self._pool = pool
        by_table = isinstance(pool.virtual_to_physical, Tensor)
        on_host = pool.translates_on_host
        self.constants = {
            "NULL_ZERO": 0 in pool.null_slots and not on_host,
            "TRANSLATE": by_table,
        }

    def translation(self) -> dict[str, Any]:
        """Return the tables that :func:`lookup` and :func:`translate` read."""
        table = self._pool.virtual_to_physical
        slots = self._pool.req_to_slot
        values, step, size = slots, 1, 0
        if isinstance(table, Tensor):
            values, step = words(table)
            size = table.shape[0]
        return {
            "map_index": slots,
            "map_size": slots.shape[0],
            "physical_index": values,
            "physical_step": step,
            "physical_size": size,
        }

    def rows(
        self, batch: ForwardBatch, buffers: MetadataBuffers, unused: Tensor
    ) -> tuple[Tensor, int, dict[str, Any], bool]:
        """Return a batch's ids as words, the tables, and whether the ids are request rows."""
        tables = self.translation()
        if self._pool.translates_on_host:
            return *words(buffers.host_slots[: batch.batch_size]), tables, False
        if batch.slots is not None:
            return *words(batch.slots), tables, False
        if batch.req_pool_indices is not None:
            return *words(batch.req_pool_indices), tables, True
        return unused, 1, tables, False

    def targets(
        self, batch: ForwardBatch, buffers: MetadataBuffers, unused: Tensor
    ) -> tuple[Tensor, int]:
        """Return the slots of a batch's snapshots as words."""
        if batch.mamba_track_indices is None:
            return unused, 1
        if self._pool.translates_on_host:
            return words(buffers.host_tracks[: batch.batch_size])
        return words(batch.mamba_track_indices)

    def committed(
        self, ids: Tensor, targets: Tensor | None, *, are_slots: bool
    ) -> tuple[Tensor, Tensor | None, bool]:
        """Return a commit's ids and targets, translated if the host has to, and LOOKUP."""
        if not self._pool.translates_on_host:
            return ids, targets, not are_slots
        slots = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
        self._pool.lookup_slots(None if are_slots else ids, ids if are_slots else None, out=slots)
        self._pool.translate_(slots)
        if targets is not None:
            targets = self._pool.translate_(targets.to(torch.int64, copy=True))
        return slots, targets, False
