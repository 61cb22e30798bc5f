"""Where the streams of a layer lie, in the numbers that kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sconv import ConvStatePool, StateSpec

from .launch import ALIGNMENT, Launcher

__all__ = ["VECTOR", "Layer"]

#: Elements in which widths and strides are counted where everything is aligned: a vector access of
#: 16 bits each. Of 32 bits each it is two accesses.
VECTOR: Final = 8


class Layer:
    """The streams of one layer that a launch serves.

    Attributes:
        layer_id: The layer.
        state: The layer's tensor, all streams side by side.
        widest: Channels of the widest of the streams.
        width: Channels of all of them.
        size: Both.
        aligned: Whether windows and widths allow vector accesses.
        low: A number whose low bits are those of an address: zero as far as they are aligned.
    """

    __slots__ = (
        "_dims", "_frozen", "_starts", "_strides", "aligned", "layer_id", "low", "size", "state",
        "widest", "width",
    )  # fmt: skip

    def __init__(
        self, spec: StateSpec, pool: ConvStatePool, layer_id: int, streams: Sequence[str]
    ) -> None:
        parts = [spec.stream_slice(layer_id, stream) for stream in streams]
        self.layer_id = layer_id
        self.state = pool.layers[layer_id]
        self._dims = tuple(part.dim for part in parts)
        self._starts = tuple(part.start for part in parts)
        self.widest, self.width = max(self._dims), sum(self._dims)
        self.size = (self.width, self.widest)
        slot, column, channel = self.state.stride()
        counted = [*self._dims, *self._starts]
        if spec.window_axis == "time":
            counted += [slot, column]
            vectors = (slot // VECTOR, column // VECTOR, 1)
        else:
            column, channel = channel, column
            # Windows are read one element at a time; the rest still in vectors.
            vectors = (slot, column, channel)
        self._strides = {1: (slot, column, channel), VECTOR: vectors}
        self.aligned = self.state.data_ptr() % ALIGNMENT == 0
        self.aligned &= all(number % VECTOR == 0 for number in counted)
        self.low = 0 if self.aligned else 1
        self._frozen: dict[tuple[int, int], tuple[tuple[Any, ...], int]] = {}

    def frozen(self, launcher: Launcher, block: int, vec: int) -> tuple[tuple[Any, ...], int]:
        """Return the values of :meth:`arguments`, frozen; looked up after the first time."""
        found = self._frozen.get((block, vec))
        if found is None:
            arguments, blocks = self.arguments(block, vec)
            found = self._frozen[block, vec] = (launcher.freeze(tuple(arguments.values())), blocks)
        return found

    def arguments(self, block: int, vec: int) -> tuple[dict[str, Any], int]:
        """Return what a kernel is told about the layer, by name, and the channel blocks."""
        firsts, blocks = [], 0
        for dim in self._dims:
            firsts.append(blocks)
            blocks += -(-dim // block)
        slot, column, channel = self._strides[vec]
        return {
            "dims": tuple(dim // vec for dim in self._dims),
            "starts": tuple(start // vec for start in self._starts),
            "firsts": tuple(firsts),
            "state": self.state,
            "slot_stride": slot,
            "column_stride": column,
            "channel_stride": channel,
        }, blocks
