"""From a call of a hook to the kernel of its mode, in as little host time as possible.

What a launch needs is put together once per step (its mode, its tensors), once per layer (where the
state lies) and once per kind of call (dtypes, activation); a call adds its own tensors.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from sconv.batch import ForwardMode
from sconv.metadata import ShortConvMetadata
from sconv.pool import ConvStatePool
from sconv.spec import StateSpec

from .decode import DECODE
from .draft_extend import DRAFT_EXTEND
from .extend import EXTEND
from .launch import ALIGNMENT, Compiled, Launcher, Tile
from .layer import VECTOR, Layer
from .streams import UNITS
from .tiles import tile_for
from .verify import VERIFY

__all__ = ["MODES", "Convolutions"]

#: Programs along the second axis of a grid, by CUDA.
_MOST_UNITS: Final = 65535

MODES: Final = {
    ForwardMode.DECODE: DECODE,
    ForwardMode.EXTEND: EXTEND,
    ForwardMode.MIXED: EXTEND,
    ForwardMode.TARGET_VERIFY: VERIFY,
    ForwardMode.DRAFT_EXTEND: DRAFT_EXTEND,
}


class _Step:
    """What all convolutions of one prepared step share."""

    __slots__ = ("arguments", "constants", "meta", "mode", "shapes", "tensors", "work")

    def __init__(self, meta: ShortConvMetadata, pool: ConvStatePool, launcher: Launcher) -> None:
        self.meta = meta
        self.mode = MODES[meta.forward_mode]
        self.tensors = self.mode.step(meta)
        self.arguments = launcher.freeze(self.tensors)
        self.constants = (*self.mode.constants(meta, pool.windows), launcher.pdl)
        self.work = self.mode.work(meta)
        # By the layer's width and widest stream: the tile, and the programs per channel block.
        self.shapes: dict[tuple[int, int], tuple[Tile, int]] = {}

    def shape(self, layer: Layer) -> tuple[Tile, int]:
        key = (layer.width, layer.widest)
        found = self.shapes.get(key)
        if found is None:
            tile = tile_for(self.mode.tiles, self.work * layer.width, layer.widest)
            found = self.shapes[key] = (tile, self.mode.units(self.meta, tile))
        return found


class Convolutions:
    """Runs the convolutions of one backend.

    Attributes:
        settled: A convolution of the prepared step was launched already (:mod:`.overlap`).
    """

    def __init__(self, spec: StateSpec, pool: ConvStatePool, launcher: Launcher) -> None:
        self.spec = spec
        self.pool = pool
        self.launcher = launcher
        self.settled = False
        self._time = spec.window_axis == "time"
        self._narrow = spec.kernel_size <= 4
        self._step: _Step | None = None
        self._layers: dict[tuple[int, tuple[str, ...]], Layer] = {}
        self._places: dict[tuple[Layer, int, int], tuple[tuple[Any, ...], int]] = {}
        self._compiled: dict[tuple[Any, ...], Compiled] = {}

    def layer(self, layer_id: int, streams: tuple[str, ...]) -> Layer:
        """Return where the streams of a layer lie."""
        found = self._layers.get((layer_id, streams))
        if found is None:
            found = Layer(self.spec, self.pool, layer_id, streams)
            self._layers[layer_id, streams] = found
        return found

    def forget(self) -> None:
        """Forget the step and what was looked up for its calls."""
        self.settled = False
        self._step = None
        self._compiled.clear()

    def run(
        self,
        meta: ShortConvMetadata,
        layer_id: int,
        streams: tuple[str, ...],
        xs: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
        biases: tuple[Tensor | None, ...],
        silu: bool,
        residual: bool,
        tile: Tile | None = None,
    ) -> list[Tensor]:
        """Convolve streams of one layer in one launch. Their dtypes are the same. In graph.

        Args:
            meta: The prepared step.
            layer_id: The layer.
            streams: The streams, and one of each of the following for each.
            xs: ``[T, D]``.
            weights: ``[D, K]`` or ``[D, 1, K]``.
            biases: ``[D]``, or all None.
            silu: Apply it to the sums.
            residual: Add the inputs.
            tile: A shape in place of the table's, for measurements.
        """
        if meta.num_tokens == 0 or meta.batch_size == 0 or meta.forward_mode is ForwardMode.IDLE:
            return [x.new_zeros(x.shape) for x in xs]
        step = self._step
        if step is None or step.meta is not meta:
            step = self._step = _Step(meta, self.pool, self.launcher)
        layer = self._layers.get((layer_id, streams))
        if layer is None:
            layer = self._layers[layer_id, streams] = Layer(self.spec, self.pool, layer_id, streams)
        if tile is None:
            tile, units = step.shape(layer)
        else:
            units = step.mode.units(meta, tile)

        if not all(weight.is_contiguous() for weight in weights):
            weights = tuple([weight.contiguous() for weight in weights])
        has_bias = biases[0] is not None
        read = weights
        if has_bias:
            read = tuple([bias.contiguous() for bias in biases if bias is not None])
        addresses = (
            tuple([x.data_ptr() for x in xs]),
            tuple([weight.data_ptr() for weight in weights]),
            tuple([value.data_ptr() for value in read]),
        )
        # The address bits of everything that is read in vectors, and whether strides are whole.
        low, whole = 0, layer.aligned
        strides = tuple([x.stride(0) for x in xs])
        for x, weight, value in zip(*addresses, strict=True):
            low |= x | weight | value
        for stride in strides:
            whole = whole and stride % VECTOR == 0
        extra: tuple[Any, ...] = ()
        if step.mode.keeps:
            kept = self.pool.windows.view(layer_id)
            low |= kept.data_ptr()
            whole = whole and (kept.dim() == 4 or kept.stride(1) % VECTOR == 0)
        vec = VECTOR if whole and low % ALIGNMENT == 0 else 1
        if step.mode.keeps:
            extra = step.mode.layer(self.pool.windows, kept, vec, self._time)
        ys = tuple([x.new_empty(x.shape) for x in xs])

        place = self._places.get((layer, tile.block, vec))
        if place is None:
            arguments, blocks = layer.arguments(tile.block, vec)
            place = (self.launcher.freeze(arguments), blocks)
            self._places[layer, tile.block, vec] = place
        flags = step.mode.flags(meta, tile, self.settled)
        key = (
            step.mode, tile, vec, silu, residual, len(xs), xs[0].dtype, weights[0].dtype,
            read[0].dtype, flags, step.constants,
        )  # fmt: skip
        compiled = self._compiled.get(key)
        strides = tuple([stride // vec for stride in strides])
        if compiled is None:
            compiled = self.launcher.compile(
                step.mode.kernel,
                (xs, strides, weights, read, ys, int(has_bias))
                + layer.arguments(tile.block, vec)[0]
                + extra
                + step.tensors,
                (
                    self.spec.kernel_size, tile.block, tile.depth, self._time, vec, silu, residual,
                    len(xs), *flags, *step.constants,
                ),
                warps=tile.warps,
                aligned=vec > 1,
                # Narrow kernels on 16 bits gain from more programs at once; others would spill.
                registers=tile.registers if self._narrow and xs[0].element_size() == 2 else 0,
            )  # fmt: skip
            self._compiled[key] = compiled
        launcher = self.launcher
        grid = (place[1], units, 1)
        if units > _MOST_UNITS:
            grid = (place[1], UNITS.value, -(-units // UNITS.value))
        if launcher.interpreted:
            own: tuple[Any, ...] = (xs, strides, weights, read, ys)
        else:
            outputs = tuple([y.data_ptr() for y in ys])
            own = (addresses[0], strides, addresses[1], addresses[2], outputs)
        launcher.launch(
            compiled,
            grid,
            (*own, int(has_bias), *place[0], *launcher.freeze(extra), *step.arguments),
        )
        self.settled = True
        return list(ys)

    def run_group(
        self,
        meta: ShortConvMetadata,
        layer_id: int,
        streams: tuple[str, ...],
        xs: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
        biases: tuple[Tensor | None, ...],
        silu: bool,
        residual: bool,
    ) -> list[Tensor]:
        """Convolve streams of one layer, in one launch if their dtypes and biases are alike."""
        kinds = {
            (x.dtype, weight.dtype, None if bias is None else bias.dtype)
            for x, weight, bias in zip(xs, weights, biases, strict=True)
        }
        if len(kinds) == 1:
            return self.run(meta, layer_id, streams, xs, weights, biases, silu, residual)
        return [
            self.run(meta, layer_id, (stream,), (x,), (weight,), (bias,), silu, residual)[0]
            for stream, x, weight, bias in zip(streams, xs, weights, biases, strict=True)
        ]
