"""Dense verify windows, and what every layout does: rows, bytes, keeping, giving back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import GraphBufferError, SpecError
from ...messages import kind_of
from ..indexing import node_places, select_nodes
from ..overlap import overlaps_itself
from ..spec import StateSpec, WindowLayout
from ..tensor_memory import memory_fault

__all__ = ["VerifyWindows"]


class VerifyWindows:
    """For every layer, row and draft token, the K-1 inputs that end at that token.

    The base of the other layouts, which keep the same in less. A backend with kernels of its own
    reads and writes :attr:`layers`; :meth:`store` and :meth:`window_after` do so in plain torch, on
    any device.

    Attributes:
        layout: Name of the layout: ``"dense"``.
        takes_trees: Whether the steps that are kept may be trees.
        layers: The memory: ``[rows, dtn, K-1, D]`` or ``[rows, dtn, D, K-1]`` per layer; empty
            without speculation. Zeroing and copying go through these.
        rows: Batch positions that can be verified at once.
    """

    layout: ClassVar[WindowLayout] = "dense"
    takes_trees: ClassVar[bool] = True

    def __init__(self, spec: StateSpec, device: torch.device) -> None:
        """Allocate one row per request row; :meth:`reserve` makes room for a padded batch."""
        self._spec = spec
        self._device = device
        self._adopted = False
        self.rows = 0
        self.layers: tuple[Tensor, ...] = ()
        self.reserve(spec.max_requests)

    @classmethod
    def adopt(cls, spec: StateSpec, layers: Sequence[Tensor]) -> VerifyWindows:
        """Use an engine's dense windows, one tensor per layer, any strides.

        The windows of a row may slide over shared columns, with one stride from token to token and
        from column to column: they can then hold chains alone.

        Raises:
            SpecError: A tensor does not fit the spec, shares memory in another way, or this layout
                is not dense.
        """
        if cls.layout != "dense":
            raise SpecError("windows: only dense verify windows can be adopted")
        if spec.window_layout not in ("auto", "dense"):
            raise SpecError(
                "windows: an engine's verify windows are dense, and the spec asks for "
                f"window_layout={spec.window_layout!r}: say 'auto' or 'dense', or give no windows"
            )
        if not isinstance(layers, Sequence):
            raise SpecError(f"windows is {kind_of(layers)}: expected one tensor per layer")
        if len(layers) != spec.num_layers:
            raise SpecError(f"windows: {len(layers)} tensors for {spec.num_layers} layers")
        for number, layer in enumerate(layers):
            tail = cls.row_shape(spec, number)
            if not isinstance(layer, Tensor):
                raise SpecError(f"windows: layer {number} is {kind_of(layer)}: expected a tensor")
            if fault := memory_fault(layer):
                raise SpecError(f"windows: layer {number} {fault}")
            if layer.requires_grad:
                raise SpecError(
                    f"windows: layer {number} requires grad: it is written in place, so detach it"
                )
            if layer.dtype != spec.dtype or layer.dim() != 4 or tuple(layer.shape[1:]) != tail:
                raise SpecError(
                    f"windows: layer {number} is {list(layer.shape)} {layer.dtype}, expected "
                    f"[rows, {', '.join(map(str, tail))}] {spec.dtype}"
                )
            if layer.device != layers[0].device:
                raise SpecError(
                    f"windows: layer {number} is on {layer.device}, layer 0 on {layers[0].device}"
                )
        slides = [_check_apart(spec, number, layer) for number, layer in enumerate(layers)]
        kind = _SlidingWindows if any(slides) else cls
        windows = kind.__new__(kind)
        windows._spec, windows._device, windows._adopted = spec, layers[0].device, True
        windows.layers = tuple(layers)
        windows.rows = min(layer.shape[0] for layer in layers)
        return windows

    @classmethod
    def row_shape(cls, spec: StateSpec, layer_id: int) -> tuple[int, ...]:
        """Return the shape of one row of one layer: ``(dtn, K-1, D)`` or ``(dtn, D, K-1)``."""
        return (spec.max_draft_tokens, *spec.window_shape(layer_id))

    @classmethod
    def row_nbytes(cls, spec: StateSpec) -> int:
        """Return the physical bytes that one row costs in all layers; 0 without speculation."""
        if spec.max_draft_tokens == 1:
            return 0
        elements = sum(
            math.prod(cls.row_shape(spec, layer_id)) for layer_id in range(spec.num_layers)
        )
        return elements * spec.dtype.itemsize

    @property
    def adopted(self) -> bool:
        """Whether the tensors belong to an engine, which may read them."""
        return self._adopted

    @property
    def nbytes(self) -> int:
        """Physical bytes."""
        return sum(layer.numel() * layer.element_size() for layer in self.layers)

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` batch positions. Out of graph, before any capture.

        Raises:
            GraphBufferError: The windows belong to an engine and are too few, or there is no memory
                for so many; those that were there stay.
        """
        if rows <= self.rows or self._spec.max_draft_tokens == 1:
            return
        if self._adopted:
            raise GraphBufferError(
                "adopted verify windows are too few", have={"rows": self.rows}, need={"rows": rows}
            )
        try:
            # A tensor made under inference mode could not be written outside of it later.
            with torch.inference_mode(False):
                self._allocate(rows)
        except (RuntimeError, TypeError) as exc:
            raise GraphBufferError(
                f"no memory for verify windows of {rows * self.row_nbytes(self._spec)} bytes: "
                "`sconv plan` says how many requests fit",
                have={"rows": self.rows},
                need={"rows": rows},
            ) from exc
        self.rows = rows

    def _allocate(self, rows: int) -> None:
        self.layers = tuple(
            torch.zeros(
                (rows, *self.row_shape(self._spec, layer_id)),
                dtype=self._spec.dtype,
                device=self._device,
            )
            for layer_id in range(self._spec.num_layers)
        )

    def geometry(self, layer_id: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return shape and strides of a layer as a kernel addresses it: by row and token first.

        Both in elements, from the first element of ``layers[layer_id]``: ``[rows, dtn, K-1, D]`` or
        ``[rows, dtn, D, K-1]`` by the window axis where the layout holds windows,
        ``[rows, dtn, D]`` where it holds inputs. Windows of one row may share memory, which a
        tensor of these strides would not protect: torch's ``zero_``, ``fill_`` and ``copy_``
        through it succeed and mean something else. So numbers are handed out, and no such tensor.
        """
        layer = self.layers[layer_id]
        return tuple(layer.shape), layer.stride()

    def read(self, layer_id: int) -> Tensor:
        """Return a copy of a layer in the shape of :meth:`geometry`, each window on its own.

        For looking at: what is written to it stays in it.
        """
        return (
            self.layers[layer_id]
            .as_strided(*self.geometry(layer_id))
            .clone(memory_format=torch.contiguous_format)
        )

    def stream(self, layer_id: int, stream: str) -> Tensor:
        """Return one stream's part of a layer, a view with D last whatever the window axis.

        ``[rows, dtn, K-1, D]`` here.
        """
        layer = self.layers[layer_id]
        if self._spec.window_axis == "channel":
            layer = layer.transpose(2, 3)
        return self._channels(layer, layer_id, stream)

    def store_paths(self, taps: Tensor) -> None:
        """Note which inputs each node of a tree step reads. In graph; before :meth:`store`.

        Args:
            taps: ``[B, dtn, K]`` int64 of :func:`sconv.plugin.ancestor_taps`.
        """

    def store_resumes(self, resumes: Tensor) -> None:
        """Note which rows of a verify step resume their windows. In graph; before :meth:`store`.

        Args:
            resumes: ``[B]`` bool; the others start from zeros, whatever their slots hold.
        """

    def store(self, layer_id: int, stream: str, inputs: Tensor, taps: Tensor | None) -> None:
        """Keep what the window after any token of a verify step takes. In graph.

        Args:
            layer_id: The layer.
            stream: The stream.
            inputs: ``[B, K-1 + dtn, D]``: each row's old window, oldest first, then its tokens.
            taps: ``[B, dtn, K]`` int64, where each tap of a tree node lies in ``inputs``; None for
                a chain.
        """
        size = self._spec.window_size
        rows, tokens = inputs.shape[0], inputs.shape[1] - size
        kept = self.stream(layer_id, stream)[:rows, :tokens]  # [B, dtn, K-1, D]
        if taps is None:
            kept.copy_(inputs[:, 1:].unfold(1, size, 1).transpose(2, 3))
        else:
            kept.copy_(select_nodes(inputs, taps[:, :, 1:]))

    def window_after(self, layer_id: int, steps: Tensor, state: Tensor, *, tree: bool) -> Tensor:
        """Return the window of each row after one of its nodes, all streams side by side. In graph.

        Values are selected, never multiplied: what other tokens or rows hold, NaN included, does
        not show.

        Args:
            layer_id: The layer.
            steps: ``[B]`` int64, a node of the last verify step for each of its first B rows.
            state: The rows' persistent windows, ``[B, K-1, D]`` or ``[B, D, K-1]`` by the window
                axis, as they were at the verify step. Read by ``inputs`` alone.
            tree: Whether that step was a tree.

        Returns:
            A new tensor like ``state``.
        """
        layer = self.layers[layer_id]
        return layer.flatten(0, 1).index_select(0, node_places(steps, layer.shape[1]))

    def _channels(self, layer: Tensor, layer_id: int, stream: str) -> Tensor:
        """Narrow a view with D last to one stream."""
        part = self._spec.stream_slice(layer_id, stream)
        return layer.narrow(-1, part.start, part.dim)


class _SlidingWindows(VerifyWindows):
    """An engine's dense windows whose columns are shared, as those of :class:`DedupWindows` are."""

    takes_trees: ClassVar[bool] = False


def _check_apart(spec: StateSpec, number: int, layer: Tensor) -> bool:
    """Whether the windows of a row slide over shared columns.

    Raises:
        SpecError: Memory is shared otherwise, or it slides and the spec has trees.
    """
    if not overlaps_itself(layer.shape, layer.stride()):
        return False
    rows, tokens = layer.shape[:2]
    row, step = layer.stride()[:2]
    column = 2 if spec.window_axis == "time" else 3
    channel = 5 - column
    # The columns that the windows of a row are cut from, each once.
    shape = (rows, tokens + spec.window_size - 1, layer.shape[channel])
    strides = (row, step, layer.stride(channel))
    if step != layer.stride(column) or overlaps_itself(shape, strides):
        raise SpecError(
            f"windows: layer {number} has shape {list(layer.shape)} and strides "
            f"{list(layer.stride())}, so that windows share memory: expected each on its own, or "
            "windows of a row that slide by one column per token"
        )
    if spec.draft_topk > 1:
        raise SpecError(
            f"windows: layer {number} slides over shared columns, and draft_topk="
            f"{spec.draft_topk} asks for trees, whose windows would need different values in one "
            "column: adopt windows of their own, or use draft_topk=1"
        )
    return True
