"""From a call of a hook to the kernel of its mode."""

from __future__ import annotations

import torch
from torch import Tensor

from sconv.batch import ForwardMode
from sconv.metadata import ShortConvMetadata
from sconv.pool import ConvStatePool
from sconv.spec import StateSpec

from .decode import launch_decode
from .draft_extend import launch_draft_extend
from .extend import launch_extend
from .launch import Launcher
from .operands import Layer, Operands
from .verify import launch_verify

__all__ = ["Convolutions"]


class Convolutions:
    """Runs convolutions of one backend; remembers where each layer's state lies."""

    def __init__(self, spec: StateSpec, pool: ConvStatePool, launcher: Launcher) -> None:
        self.spec = spec
        self.pool = pool
        self.launcher = launcher
        self._layers: dict[tuple[int, tuple[str, ...]], Layer] = {}

    def layer(self, layer_id: int, streams: tuple[str, ...]) -> Layer:
        """Return where the streams of a layer lie."""
        key = (layer_id, streams)
        found = self._layers.get(key)
        if found is None:
            found = self._layers[key] = Layer(self.spec, self.pool, layer_id, streams)
        return found

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
    ) -> list[Tensor]:
        """Convolve streams of one layer in one launch; their dtypes are the same."""
        if meta.num_tokens == 0 or meta.batch_size == 0 or meta.forward_mode is ForwardMode.IDLE:
            return [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in xs]
        operands = Operands.build(
            self.layer(layer_id, streams), xs, weights, biases, silu, residual
        )
        self.launch(operands, meta, layer_id)
        return list(operands.ys)

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

    def launch(self, operands: Operands, meta: ShortConvMetadata, layer_id: int) -> None:
        """Launch the kernel of a step's mode."""
        if meta.forward_mode is ForwardMode.DECODE:
            launch_decode(self.launcher, self.spec, operands, meta)
        elif meta.forward_mode.is_ragged:
            launch_extend(self.launcher, self.spec, operands, meta)
        elif meta.forward_mode is ForwardMode.TARGET_VERIFY:
            launch_verify(self.launcher, self.spec, operands, meta, self.pool.windows, layer_id)
        else:
            launch_draft_extend(self.launcher, self.spec, operands, meta)
