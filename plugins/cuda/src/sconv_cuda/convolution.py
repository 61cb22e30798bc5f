"""From a call of a hook to the kernel of its mode, in as little host time as possible.

What a launch needs is put together once per step (its mode, its tensors), once per layer (where the
state lies) and once per kind of call (dtypes, activation); a call adds its own tensors.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from sconv import ConvStatePool, ForwardMode, ShortConvMetadata, StateSpec
from sconv.plugin import VerifyWindows

from .decode import DECODE
from .draft_extend import DRAFT_EXTEND
from .extend import EXTEND
from .launch import ALIGNMENT, Compiled, Launcher, Tile, merged
from .layer import VECTOR, Layer
from .mode import Mode
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


class _Shape:
    """How a step's launches on layers of one size are made.

    Attributes:
        tile: The shape of a program.
        units: Programs per channel block.
        compiled: What is ready of the mode in this tile, by what else a compilation depends on.
    """

    __slots__ = ("compiled", "tile", "units")

    def __init__(self, tile: Tile, units: int, compiled: dict[tuple[Any, ...], Compiled]) -> None:
        self.tile, self.units, self.compiled = tile, units, compiled


class _Step:
    """What all convolutions of one prepared step share."""

    __slots__ = ("arguments", "bounds", "constants", "meta", "mode", "named", "shapes", "work")

    def __init__(
        self, meta: ShortConvMetadata, pool: ConvStatePool, launcher: Launcher, time: bool
    ) -> None:
        self.meta = meta
        self.mode = MODES[meta.forward_mode]
        self.named = self.mode.step(meta)
        self.arguments = launcher.freeze(tuple(self.named.values()))
        self.constants = self.mode.constants(meta, pool.windows, time)
        self.bounds = self.mode.bounds(pool.windows, time)
        self.work = self.mode.work(meta)
        self.shapes: dict[tuple[int, int], _Shape] = {}


class _Kept:
    """The verify windows of a layer, as arguments of the kernel that writes them.

    Attributes:
        low: A number whose low bits are those of an address, as :attr:`Layer.low`.
    """

    __slots__ = ("_found", "_launcher", "_tensor", "_time", "_windows", "low")

    def __init__(
        self, windows: VerifyWindows, layer_id: int, launcher: Launcher, time: bool
    ) -> None:
        self._windows, self._launcher, self._time = windows, launcher, time
        tensor = windows.layers[layer_id].as_strided(*windows.geometry(layer_id))
        self._tensor = tensor
        self._found: dict[int, tuple[dict[str, Any], tuple[Any, ...]]] = {}
        self.low = tensor.data_ptr()
        if tensor.dim() != 4:
            self.low |= tensor.stride(1) * (ALIGNMENT // VECTOR)

    def arguments(self, mode: Mode, vec: int) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """Return them as tensors and numbers by name, and these frozen."""
        found = self._found.get(vec)
        if found is None:
            named = mode.layer(self._windows, self._tensor, vec, self._time)
            found = self._found[vec] = (named, self._launcher.freeze(tuple(named.values())))
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
        self._layers: dict[tuple[int, tuple[str, ...]], Layer] = pool.new_cache()
        self._compiled: dict[tuple[Any, ...], dict[tuple[Any, ...], Compiled]] = {}
        self._kept: dict[int, _Kept] = {}
        self._kept_in: tuple[Tensor, ...] | None = None

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
        step = self._step
        if step is None or step.meta is not meta:
            if meta.forward_mode is ForwardMode.IDLE or not (meta.num_tokens and meta.batch_size):
                return [x.new_zeros(x.shape) for x in xs]
            step = self._step = _Step(meta, self.pool, self.launcher, self._time)
        mode = step.mode
        layer = self._layers.get((layer_id, streams)) or self.layer(layer_id, streams)
        shape = step.shapes.get(layer.size) if tile is None else None
        if shape is None:
            shape = self._shape(step, layer, tile)

        for weight in weights:
            if not weight.is_contiguous():
                weights = tuple([weight.contiguous() for weight in weights])
                break
        has_bias = biases[0] is not None
        read = weights
        if has_bias:
            read = tuple([bias.contiguous() for bias in biases if bias is not None])
        strides = tuple([x.stride(0) for x in xs])
        x_at = tuple([x.data_ptr() for x in xs])
        weight_at = read_at = tuple([weight.data_ptr() for weight in weights])
        if has_bias:
            read_at = tuple([value.data_ptr() for value in read])
        # The low bits of every address and row that vector accesses would have to respect.
        low = layer.low
        for place, stride, weight_place in zip(x_at, strides, weight_at, strict=True):
            low |= place | weight_place | stride * (ALIGNMENT // VECTOR)
        if has_bias:
            for place in read_at:
                low |= place
        kept = self._kept_windows(layer_id) if mode.keeps else None
        if kept is not None:
            low |= kept.low
        vec = 1 if low % ALIGNMENT else VECTOR
        ys = tuple([torch.empty_like(x) for x in xs])

        tile = shape.tile
        frozen, blocks = layer.frozen(self.launcher, tile.block, vec)
        key = (
            vec, silu, residual, self.settled, len(xs), xs[0].dtype, weights[0].dtype,
            read[0].dtype,
        )  # fmt: skip
        compiled = shape.compiled.get(key)
        if vec > 1:
            strides = tuple([stride // VECTOR for stride in strides])
        if compiled is None:
            # The groups come in the order in which every call strings their values together.
            compiled = shape.compiled[key] = self.launcher.look_up(
                mode.kernel,
                merged(
                    {
                        "xs": xs,
                        "x_strides": strides,
                        "weights": weights,
                        "biases": read,
                        "ys": ys,
                        "has_bias": int(has_bias),
                    },
                    layer.arguments(tile.block, vec)[0],
                    {} if kept is None else kept.arguments(mode, vec)[0],
                    step.named,
                ),
                merged(
                    {
                        "K": self.spec.kernel_size,
                        "BLOCK": tile.block,
                        "DEPTH": tile.depth,
                        "TIME": self._time,
                        "VEC": vec,
                        "SILU": silu,
                        "RESIDUAL": residual,
                        "STREAMS": len(xs),
                        "PDL": self.launcher.pdl,
                    },
                    mode.flags(meta, tile, self.settled),
                    step.constants,
                ),
                warps=tile.warps,
                aligned=vec > 1,
                # Narrow kernels on 16 bits gain from more programs at once; others would spill.
                registers=tile.registers
                if step.bounds and self._narrow and xs[0].element_size() == 2
                else 0,
            )  # fmt: skip
        launcher, units = self.launcher, shape.units
        grid = (blocks, units, 1)
        if units > _MOST_UNITS:
            grid = (blocks, UNITS.value, -(-units // UNITS.value))
        if launcher.interpreted:
            own: tuple[Any, ...] = (xs, strides, weights, read, ys)
        else:
            own = (x_at, strides, weight_at, read_at, tuple([y.data_ptr() for y in ys]))
        arguments = (*own, int(has_bias), *frozen)
        if kept is not None:
            arguments += kept.arguments(mode, vec)[1]
        launcher.launch(compiled, grid, arguments + step.arguments)
        self.settled = True
        return list(ys)

    def _kept_windows(self, layer_id: int) -> _Kept:
        """Return where verify keeps a layer's windows; looked up after the first time."""
        windows = self.pool.windows
        if self._kept_in is not windows.layers:
            # Room for more rows was made elsewhere.
            self._kept_in = windows.layers
            self._kept.clear()
        kept = self._kept.get(layer_id)
        if kept is None:
            kept = self._kept[layer_id] = _Kept(windows, layer_id, self.launcher, self._time)
        return kept

    def _shape(self, step: _Step, layer: Layer, tile: Tile | None) -> _Shape:
        """Make the launches' shape for layers of this size, in a tile of one's own if given."""
        chosen = tile
        if chosen is None:
            chosen = tile_for(step.mode.tiles, step.work * layer.width, layer.widest)
        kind = (step.mode, chosen, tuple(step.constants.values()), step.meta.tracks)
        compiled = self._compiled.setdefault(kind, {})
        shape = _Shape(chosen, step.mode.units(step.meta, chosen), compiled)
        if tile is None:
            step.shapes[layer.size] = shape
        return shape

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
