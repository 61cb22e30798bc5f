"""What every convolution kernel is given, whatever the mode: streams, and the state of their layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from sconv.pool import ConvStatePool
from sconv.spec import StateSpec

from .launch import ALIGNMENT, Tile

__all__ = ["VECTOR", "Layer", "Operands", "aligned"]

#: Elements in which widths and strides are counted where everything is aligned: a vector access of
#: 16 bits each. Of 32 bits it is two accesses.
VECTOR: Final = 8


def aligned(tensor: Tensor, stride: int) -> bool:
    """Whether rows of a tensor, ``stride`` elements apart, can be read in whole vectors."""
    return tensor.data_ptr() % ALIGNMENT == 0 and stride % VECTOR == 0


class Layer:
    """The streams of one layer that a launch serves, and where their state lies.

    Attributes:
        state: The layer's tensor, all streams side by side.
        widest: Channels of the widest of the streams.
        width: Channels of all of them.
        aligned: Whether windows and widths allow vector accesses.
    """

    __slots__ = (
        "_blocks",
        "_dims",
        "_starts",
        "aligned",
        "dims",
        "first",
        "state",
        "strides",
        "widest",
        "width",
    )

    def __init__(
        self, spec: StateSpec, pool: ConvStatePool, layer_id: int, streams: Sequence[str]
    ) -> None:
        parts = [spec.stream_slice(layer_id, stream) for stream in streams]
        self.state = pool.layers[layer_id]
        self.dims = tuple(part.dim for part in parts)
        self.widest = max(self.dims)
        self.width = sum(self.dims)
        starts = tuple(part.start for part in parts)
        time = spec.window_axis == "time"
        slot, column, channel = self.state.stride()
        if not time:
            column, channel = channel, column
        self.aligned = all(number % VECTOR == 0 for number in (*self.dims, *starts))
        self.aligned &= aligned(self.state, slot if time else 0)
        self.aligned &= column % VECTOR == 0 if time else True
        self.strides = {1: (slot, column, channel), VECTOR: (slot, column, channel)}
        if time:
            self.strides[VECTOR] = (slot // VECTOR, column // VECTOR, 1)
        self._dims = {vec: tuple(dim // vec for dim in self.dims) for vec in (1, VECTOR)}
        self._starts = {vec: tuple(start // vec for start in starts) for vec in (1, VECTOR)}
        self._blocks: dict[int, tuple[tuple[int, ...], int]] = {}

    def place(self, vec: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the streams' widths and first channels, in vectors of ``vec``."""
        return self._dims[vec], self._starts[vec]

    def blocks(self, block: int) -> tuple[tuple[int, ...], int]:
        """Return each stream's first channel block, and the number of all blocks."""
        found = self._blocks.get(block)
        if found is None:
            firsts, total = [], 0
            for dim in self.dims:
                firsts.append(total)
                total += -(-dim // block)
            found = self._blocks[block] = (tuple(firsts), total)
        return found


@dataclass(slots=True)
class Operands:
    """One call of ``short_conv`` or ``short_conv_group``, checked and with its outputs allocated.

    Attributes:
        layer: Where the state is.
        xs, weights, biases, ys: One tensor per stream. Without a bias, any tensor.
        has_bias: Whether biases are read.
        vec: VECTOR where all accesses can be vectors, else 1.
        silu, residual: What is done to the sums.
    """

    layer: Layer
    xs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    ys: tuple[Tensor, ...]
    has_bias: bool
    vec: int
    silu: bool
    residual: bool

    @classmethod
    def build(
        cls,
        layer: Layer,
        xs: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
        biases: tuple[Tensor | None, ...],
        silu: bool,
        residual: bool,
    ) -> Operands:
        """Allocate the outputs, and see how far everything is aligned."""
        weights = tuple([weight.contiguous() for weight in weights])
        has_bias = biases[0] is not None
        vectors = layer.aligned
        for x, weight in zip(xs, weights, strict=True):
            vectors = vectors and aligned(x, x.stride(0)) and aligned(weight, 0)
        read = weights
        if has_bias:
            read = tuple([bias.contiguous() for bias in biases if bias is not None])
            vectors = vectors and all(aligned(bias, 0) for bias in read)
        ys = tuple([torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs])
        return cls(layer, xs, weights, read, ys, has_bias, VECTOR if vectors else 1, silu, residual)

    def arguments(self, tile: Tile) -> tuple[tuple[Any, ...], int]:
        """Return the arguments that all convolution kernels begin with, and the channel blocks."""
        vec, layer = self.vec, self.layer
        dims, starts = layer.place(vec)
        firsts, blocks = layer.blocks(tile.block)
        return (
            self.xs,
            tuple([x.stride(0) // vec for x in self.xs]),
            self.weights,
            self.biases,
            self.ys,
            dims,
            starts,
            firsts,
            layer.state,
            *layer.strides[vec],
        ), blocks

    def constants(self, spec: StateSpec, tile: Tile) -> tuple[Any, ...]:
        """Return the constants that all convolution kernels begin with."""
        return (
            spec.kernel_size,
            tile.block,
            tile.depth,
            spec.window_axis == "time",
            self.vec,
            self.silu,
            self.residual,
            len(self.xs),
        )
