"""Where a verify step keeps what the commit needs: every window, or the inputs that make them.

Rows are positions in the batch (of the graph bucket), not slots: a padded row has its own and
overwrites nobody's. Verify writes here and leaves the pool alone: a skipped commit loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import GraphBufferError, SpecError
from .spec import StateSpec

__all__ = ["InputWindows", "VerifyWindows"]


class VerifyWindows:
    """Dense windows: for every layer, row and draft token, the K-1 inputs that end at that token.

    Attributes:
        layout: ``"dense"``.
        layers: ``[rows, dtn, K-1, D]`` or ``[rows, dtn, D, K-1]`` per layer; empty without
            speculation.
        rows: Batch positions that can be verified at once.
    """

    layout = "dense"

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

        Raises:
            SpecError: A tensor does not fit the spec.
        """
        if len(layers) != spec.num_layers:
            raise SpecError(f"windows: {len(layers)} tensors for {spec.num_layers} layers")
        for number, layer in enumerate(layers):
            tail = (spec.max_draft_tokens, *spec.window_shape(number))
            if layer.dtype != spec.dtype or layer.dim() != 4 or tuple(layer.shape[1:]) != tail:
                raise SpecError(
                    f"windows: layer {number} is {list(layer.shape)} {layer.dtype}, expected "
                    f"[rows, {', '.join(map(str, tail))}] {spec.dtype}"
                )
        windows = cls.__new__(cls)
        windows._spec, windows._device, windows._adopted = spec, layers[0].device, True
        windows.layers = tuple(layers)
        windows.rows = min(layer.shape[0] for layer in layers)
        return windows

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
            GraphBufferError: The windows belong to an engine and are too few.
        """
        if rows <= self.rows or self._spec.max_draft_tokens == 1:
            return
        if self._adopted:
            raise GraphBufferError(
                "adopted verify windows are too few", have={"rows": self.rows}, need={"rows": rows}
            )
        self.rows = rows
        self._allocate(rows)

    def _allocate(self, rows: int) -> None:
        self.layers = tuple(
            torch.zeros(
                (rows, self._spec.max_draft_tokens, *self._spec.window_shape(layer)),
                dtype=self._spec.dtype,
                device=self._device,
            )
            for layer in range(self._spec.num_layers)
        )

    def stream(self, layer_id: int, stream: str) -> Tensor:
        """Return one stream's windows ``[rows, dtn, K-1, D]``, transposed for the channel axis."""
        part = self._spec.stream_slice(layer_id, stream)
        layer = self.layers[layer_id]
        if self._spec.window_axis == "channel":
            layer = layer.transpose(2, 3)
        return layer.narrow(3, part.start, part.dim)


class InputWindows(VerifyWindows):
    """Only the inputs of a verify step, 1/(K-1) of the dense bytes; trees by the path of each node.

    The window after node ``t`` is rebuilt at the commit: the row's persistent window, which verify
    left alone, followed by its inputs, ``V``, read at ``paths[row, t]``. So, unlike with dense
    windows, nothing may move a row's slot on between its verify and its commit.

    Attributes:
        layout: ``"inputs"``.
        layers: ``[rows, dtn, D]`` per layer, in the state's dtype, whatever the window axis.
        paths: ``[rows, dtn, K-1]`` int32, where the columns of each node's window lie in ``V``,
            oldest first; written by tree steps alone. None without speculation.
    """

    layout = "inputs"

    paths: Tensor | None = None

    @classmethod
    def adopt(cls, spec: StateSpec, layers: Sequence[Tensor]) -> InputWindows:
        """Refused: an engine's own windows are dense ones.

        Raises:
            SpecError: Always.
        """
        raise SpecError("windows: only dense verify windows can be adopted (VerifyWindows.adopt)")

    @property
    def nbytes(self) -> int:
        """Physical bytes, paths included."""
        paths = 0 if self.paths is None else self.paths.numel() * self.paths.element_size()
        return super().nbytes + paths

    def _allocate(self, rows: int) -> None:
        spec = self._spec
        self.layers = tuple(
            torch.zeros(
                (rows, spec.max_draft_tokens, spec.layer_dim(layer)),
                dtype=spec.dtype,
                device=self._device,
            )
            for layer in range(spec.num_layers)
        )
        self.paths = torch.zeros(
            (rows, spec.max_draft_tokens, spec.window_size), dtype=torch.int32, device=self._device
        )

    def stream(self, layer_id: int, stream: str) -> Tensor:
        """Return one stream's inputs: a view ``[rows, dtn, D]``."""
        part = self._spec.stream_slice(layer_id, stream)
        return self.layers[layer_id].narrow(2, part.start, part.dim)
