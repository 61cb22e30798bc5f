"""Commit the accepted drafts of all layers from their records, with snapshots, in one launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..arithmetic import rounded
from ..launch import ALIGNMENT, Launcher, kernel
from ..layer import VECTOR
from ..metadata_fields import resolve_slots
from ..overlap import wait
from ..slots import translate, words
from .fold import folded
from .inputs import Heads, Records
from .named_launch import launch
from .paths import paths

__all__ = ["CommitTile", "StateTable", "commit", "commit_tile"]


@dataclass(frozen=True, slots=True)
class CommitTile:
    """The shape of a program; no choice changes a bit of a result.

    Attributes:
        values: Value channels of a head that it owns.
        warps: Its warps.
        registers: Most registers of a thread; 0 = the compiler's choice.
    """

    values: int
    warps: int
    registers: int = 0


def commit_tile(drafts: int, *, channel: bool) -> CommitTile:
    """Return the shape that was fastest on one NVIDIA H200, for 4 and 8 drafts a row."""
    if drafts > 8:
        return CommitTile(values=8, warps=1)
    if drafts > 4 and channel:
        return CommitTile(values=32, warps=4, registers=128)
    return CommitTile(values=8, warps=1, registers=128)


@dataclass(frozen=True, slots=True)
class StateTable:
    """Where the states of all layers lie.

    Attributes:
        first: The first layer's state.
        entries: ``[L, 2]`` int64: elements from the first layer's state, and between slots.
        aligned: Whether all rows allow vector accesses.
    """

    first: Tensor
    entries: Tensor
    aligned: bool

    @classmethod
    def build(cls, states: tuple[Tensor, ...]) -> StateTable:
        """Read the addresses of ``[S, HV, dv, dk]`` states of one dtype. Out of graph."""
        first = states[0]
        rows = [
            ((state.data_ptr() - first.data_ptr()) // first.element_size(), state.stride(0))
            for state in states
        ]
        whole = all(number % VECTOR == 0 for row in rows for number in row)
        return cls(
            first,
            torch.tensor(rows, dtype=torch.int64, device="cpu").to(first.device),
            whole and first.data_ptr() % ALIGNMENT == 0,
        )


def commit(
    launcher: Launcher,
    heads: Heads,
    table: StateTable,
    records: Records,
    ids: Tensor,
    steps: Tensor,
    resumes: Tensor,
    *,
    source: Mapping[str, Any],
    drafts: int,
    tree: Tensor | None,
    targets: Tensor | None = None,
    track_steps: Tensor | None = None,
    tile: CommitTile | None = None,
) -> None:
    """Move the states of all layers to the accepted nodes. In graph, one launch.

    Args:
        launcher: Of the device.
        heads: Of every layer.
        table: Of all layers.
        records: Stacked, ``[L, R, ...]``, by position in the batch.
        ids: ``[B]`` request rows, or slots; of any integer dtype, like all that follow.
        steps: ``[B]`` last accepted node; outside of the step = nothing changes.
        resumes: As in the verify step.
        source: How slots are found: ``map_index`` to ``TRANSLATE`` of the kernel.
        drafts: Tokens of a row in the verify step.
        tree: As in the verify step.
        targets: ``[B]`` slots that get a snapshot, if the row keeps anything.
        track_steps: ``[B]`` nodes whose state that is.
        tile: Instead of :func:`commit_tile`.
    """
    rows, layers = ids.shape[0], table.entries.shape[0]
    if rows == 0:
        return
    if tile is None:
        tile = commit_tile(drafts, channel=heads.channel)
    values = min(tile.values, heads.value_dim)
    tracks = targets is not None and track_steps is not None
    id_words, id_step = words(ids)
    step_words, step_step = words(steps)
    target_words, target_step = words(targets) if targets is not None else (id_words, 1)
    node_words, node_step = words(track_steps) if track_steps is not None else (id_words, 1)
    launch(
        launcher,
        commit_states,
        layers * rows * heads.values * (heads.value_dim // values),
        {**heads.constants, **source},
        {
            "state": table.first,
            "table_index": table.entries,
            "rows_index": id_words,
            "rows_step": id_step,
            "resumes_index": resumes,
            "pool_rows": table.first.shape[0],
            "steps_index": step_words,
            "steps_step": step_step,
            "targets_index": target_words,
            "targets_step": target_step,
            "nodes_index": node_words,
            "nodes_step": node_step,
            "paths_index": id_words if tree is None else tree,
            "corrections": records.u,
            "keys": records.k,
            "gates": records.g,
            "record_rows": records.u.shape[1],
            "places": records.places,
            "rows": rows,
            "DRAFTS": drafts,
            "TREE": tree is not None,
            "TRACKS": tracks,
            "VALUES": values,
            "VEC": VECTOR if table.aligned else 1,
            "PDL": launcher.pdl,
        },
        warps=tile.warps,
        aligned=table.aligned,
        registers=tile.registers,
    )


@kernel
def commit_states(
    state,
    table_index,  # [L, 2]
    rows_index,
    rows_step,
    map_index,
    map_size,
    physical_index,
    physical_step,
    physical_size,
    resumes_index,
    pool_rows,
    steps_index,
    steps_step,
    targets_index,
    targets_step,
    nodes_index,
    nodes_step,
    paths_index,  # [B, DRAFTS] int32, of trees
    corrections,  # [L, R, HV, P, DV]
    keys,  # [L, R, H, P, DK]
    gates,  # [L, R, HV, P] or [L, R, HV, P, DK]
    record_rows,
    places,
    rows,
    H: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHANNEL: tl.constexpr,
    DRAFTS: tl.constexpr,
    TREE: tl.constexpr,
    TRACKS: tl.constexpr,
    LOOKUP: tl.constexpr,
    NULL_ZERO: tl.constexpr,
    TRANSLATE: tl.constexpr,
    VALUES: tl.constexpr,
    VEC: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program owns VALUES channels of a layer's row and head; it reads before it writes."""
    wait(PDL)
    block = tl.program_id(0) % (DV // VALUES)
    head = tl.program_id(0) // (DV // VALUES) % HV
    unit = tl.program_id(0) // (DV // VALUES * HV)
    row = (unit % rows).to(tl.int64)
    layer = (unit // rows).to(tl.int64)
    slot = resolve_slots(
        tl.load(rows_index + row * rows_step),
        map_index,
        map_size,
        physical_index,
        physical_step,
        physical_size,
        True,
        LOOKUP,
        NULL_ZERO,
        TRANSLATE,
    ).to(tl.int64)
    step = tl.load(steps_index + row * steps_step)
    # Slot 0 is the dummy. A row whose index is not one of the step's changes nothing at all.
    live = (slot > 0) & (slot < pool_rows) & (step >= 0) & (step < DRAFTS)
    if live:
        value = block * VALUES + tl.arange(0, VALUES)
        channel = tl.arange(0, DK)
        slot_step = tl.load(table_index + layer * 2 + 1) // VEC * VEC
        start = tl.load(table_index + layer * 2) // VEC * VEC
        within = head * DV * DK + value[:, None] * DK + channel[None, :]
        record = layer * record_rows + row
        u = corrections + (record * HV + head) * places * DV
        k = keys + (record * H + head // (HV // H)) * places * DK
        g = gates + (record * HV + head) * places * (DK if CHANNEL else 1)
        resumes = tl.load(resumes_index + row).to(tl.int1)
        before = tl.load(state + start + slot * slot_step + within).to(tl.float32)
        before = tl.where(resumes, before, 0.0)
        if TRACKS:
            target = translate(
                tl.load(targets_index + row * targets_step),
                physical_index,
                physical_step,
                physical_size,
                NULL_ZERO,
                TRANSLATE,
            ).to(tl.int64)
            node = tl.load(nodes_index + row * nodes_step)
            snapped = (target > 0) & (target < pool_rows) & (node >= 0) & (node < DRAFTS)
            if snapped:
                after = folded(
                    before, u, k, g, paths(paths_index, row, node, DRAFTS, TREE), value, channel,
                    DK, DV, CHANNEL, DRAFTS,
                )  # fmt: skip
                tl.store(
                    state + start + target * slot_step + within,
                    rounded(after, state.dtype.element_ty),
                )
        after = folded(
            before, u, k, g, paths(paths_index, row, step, DRAFTS, TREE), value, channel,
            DK, DV, CHANNEL, DRAFTS,
        )  # fmt: skip
        tl.store(
            state + start + slot * slot_step + within,
            rounded(after, state.dtype.element_ty),
        )
