"""Launches of a commit, and the table of all layers that it reads, which is built once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sconv import ConvStatePool, StateSpec
from sconv.plugin import InputWindows

from .commit import commit
from .launch import ALIGNMENT, Compiled, Launcher, Tile
from .layer import VECTOR
from .slots import SlotSource, words
from .tiles import COMMIT_TILES, tile_for
from .verify import has_unit_channels

__all__ = ["Commits"]


@dataclass(frozen=True, slots=True)
class _Table:
    """Where all layers lie, on the device.

    Attributes:
        states: The state that it was made for.
        windows: The verify windows that it was made for.
        entries: ``[L, TABLE_COLUMNS]`` int64.
        vec: VECTOR where all accesses can be vectors, else 1.
        widest: Channels of the widest layer.
    """

    states: tuple[Tensor, ...]
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
        self._compiled: dict[tuple[Any, ...], Compiled] = {}

    def forget(self) -> None:
        """Forget what was looked up for earlier commits."""
        self._compiled.clear()

    def prepare(self) -> _Table:
        """Build the table of layers, unless the one that exists is still right. Out of graph."""
        table = self._table
        if (
            table is None
            or table.states is not self.pool.layers
            or table.windows is not self.pool.windows.layers
        ):
            table = self._table = _build_table(self.spec, self.pool)
        return table

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
        resumes = windows.resumes if isinstance(windows, InputWindows) else None
        id_words, id_step = words(ids)
        step_words, step_step = words(steps)
        tracks = targets is not None and track_steps is not None
        target_words, target_step = words(targets) if targets is not None else (id_words, 1)
        node_words, node_step = words(track_steps) if track_steps is not None else (id_words, 1)
        blocks = -(-table.widest // tile.block)
        arguments = {
            "state": self.pool.layers[0],
            "kept": windows.layers[0],
            "table_index": table.entries,
            "rows_index": id_words,
            "rows_step": id_step,
            **self.source.translation(),
            "steps_index": step_words,
            "steps_step": step_step,
            "targets_index": target_words,
            "targets_step": target_step,
            "track_steps_index": node_words,
            "track_steps_step": node_step,
            "paths_index": id_words if paths is None else paths,
            "resumes_index": id_words if resumes is None else resumes,
            "some_fresh": int(resumes is not None),
            "tracks": int(tracks),
            "drafts": drafts,
            "path_rows": 0 if paths is None else paths.shape[1],
            "pool_rows": self.pool.num_rows,
            "rows": rows,
            "layers": layers,
            "blocks": blocks,
        }
        key = (tile, table.vec, looks_up, paths is None)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self.launcher.look_up(
                commit,
                arguments,
                {
                    "K": self.spec.kernel_size,
                    "BLOCK": tile.block,
                    "DEPTH": tile.depth,
                    "TIME": self.spec.window_axis == "time",
                    "VEC": table.vec,
                    "LOOKUP": looks_up,
                    **self.source.constants,
                    "TREE": paths is not None,
                    "WINDOWS": dense,
                    "UNIT": has_unit_channels(windows, self.spec.window_axis == "time"),
                    "PDL": self.launcher.pdl,
                },
                warps=tile.warps,
                aligned=table.vec > 1,
            )
        frozen = self.launcher.freeze(tuple(arguments.values()))
        self.launcher.launch(compiled, (blocks * rows * -(-layers // tile.depth), 1, 1), frozen)


def _build_table(spec: StateSpec, pool: ConvStatePool) -> _Table:
    time = spec.window_axis == "time"
    dense = not isinstance(pool.windows, InputWindows)
    size = spec.dtype.itemsize
    states = pool.layers
    # As the kernel addresses them: windows of a row may overlap.
    windows = [
        layer.as_strided(*pool.windows.geometry(number))
        for number, layer in enumerate(pool.windows.layers)
    ]
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
    unit = has_unit_channels(pool.windows, time)
    counted = [4, *((0, 1, 2) if time else ()), *((5, 6, 7, 8) if unit else ())]
    whole = all(row[column] % VECTOR == 0 for row in rows for column in counted)
    whole &= all(base.data_ptr() % ALIGNMENT == 0 for base in (states[0], windows[0]))
    vec = VECTOR if whole else 1
    entries = torch.tensor(rows, dtype=torch.int64, device="cpu")
    entries[:, counted] //= vec
    return _Table(
        states=states,
        windows=pool.windows.layers,
        entries=entries.to(pool.device),
        vec=vec,
        widest=max(row[4] for row in rows),
    )
