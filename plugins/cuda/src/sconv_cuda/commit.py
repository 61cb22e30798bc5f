"""Keep what a verify step accepted: all layers, all streams, windows and snapshots in one launch.

All streams of a layer lie side by side, so a row's window is one range of channels per layer, and
nothing here depends on streams. What differs between layers is in a table on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sconv.pool import ConvStatePool
from sconv.spec import StateSpec
from sconv.windows import InputWindows

from .launch import ALIGNMENT, Launcher, Tile, kernel
from .layer import VECTOR
from .slots import SlotSource, lookup, translate, words
from .tiles import COMMIT_TILES, tile_for

__all__ = ["Commits", "commit"]

#: Columns of the layer table: the state's offset from layer 0, its slot, column and channel stride,
#: the width, and the verify windows' offset from layer 0, row, token, column and channel stride.
TABLE_COLUMNS = tl.constexpr(10)


@kernel
def commit(
    state,  # layer 0, [S, K-1, D] or [S, D, K-1]
    kept,  # layer 0's verify windows, [B, dtn, D], or DENSE [B, dtn, K-1, D] in any order
    table_index,  # [L, TABLE_COLUMNS] int64, in VEC elements
    rows_index,  # [B] request rows (LOOKUP) or slots
    rows_step,
    map_index,  # [requests] int32, slot of each request row
    map_size,
    physical_index,  # slot id to pool row (TRANSLATE)
    physical_step,
    physical_size,
    steps_index,  # [B] node whose window is kept
    steps_step,
    targets_index,  # [B] slots of the snapshots; read if tracks
    targets_step,
    track_steps_index,  # [B] node whose window is the snapshot; read if tracks
    track_steps_step,
    paths_index,  # [B, path_rows, K-1] int32, where the columns of a TREE node's window lie
    tracks,
    drafts,
    path_rows,
    pool_rows,
    rows,
    layers,
    blocks,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    TIME: tl.constexpr,
    VEC: tl.constexpr,
    LOOKUP: tl.constexpr,
    NULL_ZERO: tl.constexpr,
    TRANSLATE: tl.constexpr,
    TREE: tl.constexpr,
    DENSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program owns BLOCK channels of one row in DEPTH layers. It reads before it writes.

    So the window of a slot, which is also a source, can be overwritten in place.
    """
    pid = tl.program_id(0)
    block = pid % blocks
    row = (pid // blocks) % rows
    layer_begin = (pid // blocks // rows) * DEPTH
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    ids = tl.load(rows_index + row.to(tl.int64) * rows_step)
    if LOOKUP:
        ids = lookup(ids, map_index, map_size, True)
    step = tl.load(steps_index + row.to(tl.int64) * steps_step)
    there = tracks != 0
    target = tl.load(targets_index + row.to(tl.int64) * targets_step, mask=there, other=-1)
    track_step = tl.load(
        track_steps_index + row.to(tl.int64) * track_steps_step, mask=there, other=-1
    )
    slot = translate(ids, physical_index, physical_step, physical_size, NULL_ZERO, TRANSLATE)
    target = translate(target, physical_index, physical_step, physical_size, NULL_ZERO, TRANSLATE)
    # Slot 0 is the dummy. A row whose index is not one of the step's changes nothing at all.
    live = (slot > 0) & (slot < pool_rows) & (step >= 0) & (step < drafts)
    snapped = live & (target > 0) & (target < pool_rows)
    snapped = snapped & (track_step >= 0) & (track_step < drafts)

    if live:
        for depth in tl.static_range(DEPTH):
            layer = layer_begin + depth
            if layer < layers:
                _move(
                    state,
                    kept,
                    table_index + layer * TABLE_COLUMNS,
                    paths_index + row.to(tl.int64) * path_rows * (K - 1),
                    row,
                    slot.to(tl.int64),
                    step,
                    snapped,
                    target.to(tl.int64),
                    track_step,
                    block * BLOCK + tl.arange(0, BLOCK),
                    K,
                    TIME,
                    VEC,
                    TREE,
                    DENSE,
                )


@triton.jit
def _move(
    state,
    kept,
    entry_index,
    path_index,
    row,
    slot,
    step,
    snapped,
    target,
    track_step,
    channel,
    K: tl.constexpr,
    TIME: tl.constexpr,
    VEC: tl.constexpr,
    TREE: tl.constexpr,
    DENSE: tl.constexpr,
):
    state_offset = tl.load(entry_index)
    slot_step = tl.load(entry_index + 1)
    column_step = tl.load(entry_index + 2)
    inside = channel < tl.load(entry_index + 4) * VEC
    if TIME:
        windows = state + state_offset * VEC + channel
        slot_step = slot_step * VEC
        column_step = column_step * VEC
    else:
        windows = state + state_offset + channel * tl.load(entry_index + 3)
    if DENSE:
        source = kept + tl.load(entry_index + 5) + row * tl.load(entry_index + 6)
        source = source + channel * tl.load(entry_index + 9)
        token_step = tl.load(entry_index + 7)
        kept_column_step = tl.load(entry_index + 8)
    else:
        source = kept + (tl.load(entry_index + 5) + row * tl.load(entry_index + 6)) * VEC + channel
        token_step = tl.load(entry_index + 7) * VEC
        kept_column_step = token_step

    window = windows + slot * slot_step
    moved = _window(
        window, column_step, source, token_step, kept_column_step, path_index, step, inside,
        K, TREE, DENSE,
    )  # fmt: skip
    if snapped:
        copied = _window(
            window, column_step, source, token_step, kept_column_step, path_index, track_step,
            inside, K, TREE, DENSE,
        )  # fmt: skip
        snapshot = windows + target * slot_step
        for j in tl.static_range(K - 1):
            tl.store(snapshot + j * column_step, copied[j], mask=inside)
    for j in tl.static_range(K - 1):
        tl.store(window + j * column_step, moved[j], mask=inside)


@triton.jit
def _window(
    window,
    column_step,
    source,
    token_step,
    kept_column_step,
    path_index,
    step,
    inside,
    K: tl.constexpr,
    TREE: tl.constexpr,
    DENSE: tl.constexpr,
):
    """Read the window after node ``step``."""
    columns = ()
    for j in tl.static_range(K - 1):
        if DENSE:
            value = tl.load(source + step * token_step + j * kept_column_step, mask=inside)
        else:
            place = step + 1 + j
            if TREE:
                place = tl.load(path_index + step * (K - 1) + j)
            if place < K - 1:
                value = tl.load(window + place * column_step, mask=inside)
            else:
                value = tl.load(source + (place - (K - 1)) * token_step, mask=inside)
        columns = columns + (value,)
    return columns


@dataclass(frozen=True, slots=True)
class _Table:
    """Where all layers lie, on the device.

    Attributes:
        windows: The verify windows that it was made for.
        entries: ``[L, TABLE_COLUMNS]`` int64.
        vec: VECTOR where all accesses can be vectors, else 1.
        widest: Channels of the widest layer.
    """

    windows: tuple[Tensor, ...]
    entries: Tensor
    vec: int
    widest: int


class Commits:
    """Runs the commits of one backend."""

    def __init__(self, spec: StateSpec, pool: ConvStatePool, launcher: Launcher) -> None:
        self.spec = spec
        self.pool = pool
        self.launcher = launcher
        self.source = SlotSource(pool)
        self._table: _Table | None = None

    def prepare(self) -> _Table:
        """Build the table of layers, unless the one that exists is still right. Out of graph."""
        if self._table is None or self._table.windows is not self.pool.windows.layers:
            self._table = _build_table(self.spec, self.pool)
        return self._table

    def run(
        self,
        ids: Tensor,
        steps: Tensor,
        targets: Tensor | None,
        track_steps: Tensor | None,
        *,
        drafts: int,
        slots: bool,
        tree: bool,
        tile: Tile | None = None,
    ) -> None:
        """Launch :func:`commit`; in the tile of the shape class, unless one is given. In graph.

        Args:
            ids: ``[B]`` request rows, or slots.
            steps: ``[B]`` node whose window is kept.
            targets, track_steps: ``[B]`` slots and nodes of the snapshots, or None.
            drafts: Tokens per row of the verify step.
            slots: Whether ``ids`` are slots.
            tree: Whether the verify step's tokens were trees.
        """
        rows, layers = ids.shape[0], self.spec.num_layers
        if rows == 0:
            return
        table = self.prepare()
        ids, targets, looks_up = self.source.committed(ids, targets, are_slots=slots)
        if tile is None:
            tile = tile_for(COMMIT_TILES, rows * layers * table.widest, table.widest)
        windows = self.pool.windows
        dense = not isinstance(windows, InputWindows)
        paths = windows.paths if isinstance(windows, InputWindows) and tree else None
        id_words, id_step = words(ids)
        step_words, step_step = words(steps)
        tracks = targets is not None and track_steps is not None
        target_words, target_step = words(targets) if targets is not None else (id_words, 1)
        node_words, node_step = words(track_steps) if track_steps is not None else (id_words, 1)
        blocks = -(-table.widest // tile.block)
        self.launcher(
            commit,
            blocks * rows * -(-layers // tile.depth),
            (
                self.pool.layers[0],
                windows.view(0),
                table.entries,
                id_words,
                id_step,
                *self.source.translation(),
                step_words,
                step_step,
                target_words,
                target_step,
                node_words,
                node_step,
                id_words if paths is None else paths,
                int(tracks),
                drafts,
                0 if paths is None else paths.shape[1],
                self.pool.num_rows,
                rows,
                layers,
                blocks,
            ),
            (
                self.spec.kernel_size,
                tile.block,
                tile.depth,
                self.spec.window_axis == "time",
                table.vec,
                looks_up,
                *self.source.constants,
                paths is not None,
                dense,
                self.launcher.pdl,
            ),
            warps=tile.warps,
            aligned=table.vec > 1,
        )


def _build_table(spec: StateSpec, pool: ConvStatePool) -> _Table:
    time = spec.window_axis == "time"
    dense = not isinstance(pool.windows, InputWindows)
    size = spec.dtype.itemsize
    states = pool.layers
    windows = [pool.windows.view(layer) for layer in range(spec.num_layers)]
    # Offsets between allocations, so that one base pointer with a known type serves all layers.
    rows = []
    for layer, (state, kept) in enumerate(zip(states, windows, strict=True)):
        slot, column, channel = state.stride()
        if not time:
            column, channel = channel, column
        kept_column, kept_channel = 0, 1
        if dense:
            kept_column, kept_channel = kept.stride()[2:] if time else kept.stride()[:1:-1]
        rows.append(
            (
                (state.data_ptr() - states[0].data_ptr()) // size,
                slot,
                column,
                channel,
                spec.layer_dim(layer),
                (kept.data_ptr() - windows[0].data_ptr()) // size,
                kept.stride(0),
                kept.stride(1),
                kept_column,
                kept_channel,
            )
        )
    # Counted in vectors: the width always, the rest where channels lie side by side.
    counted = [4, *((0, 1, 2) if time else ()), *(() if dense else (5, 6, 7))]
    whole = all(row[column] % VECTOR == 0 for row in rows for column in counted)
    whole &= all(base.data_ptr() % ALIGNMENT == 0 for base in (states[0], windows[0]))
    vec = VECTOR if whole else 1
    entries = torch.tensor(rows, dtype=torch.int64)
    entries[:, counted] //= vec
    return _Table(
        windows=pool.windows.layers,
        entries=entries.to(pool.device),
        vec=vec,
        widest=max(row[4] for row in rows),
    )
