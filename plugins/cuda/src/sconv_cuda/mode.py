"""What the launches of a mode have in common, and what its kernel is given beyond that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sconv import ShortConvMetadata
from sconv.plugin import VerifyWindows

from .launch import Kernel, Tile
from .tiles import Table

__all__ = ["Mode"]


def _always(*_: object) -> bool:
    return True


def _nothing(*_: object) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, eq=False)
class Mode:
    """One convolution kernel.

    Attributes:
        kernel: Takes by name what all kernels take (:mod:`.convolution`), and what the four below
            give.
        tiles: Its shapes.
        work: Rows or tokens of a step, each of which costs the layer's channels.
        units: Programs of a step, each of which covers one channel block.
        step: Tensors and numbers of a step.
        layer: Of the verify windows of a layer and the vector width.
        constants: Of a step, its verify windows, and whether the window axis is the time.
        flags: Constants of a step, a tile, and whether the step is settled (:mod:`.overlap`).
        keeps: Whether verify windows are written.
        bounds: Whether a tile's bound on registers holds, by the verify windows and whether the
            window axis is the time; without it the compiler chooses.
    """

    kernel: Kernel
    tiles: Table
    work: Callable[[ShortConvMetadata], int]
    units: Callable[[ShortConvMetadata, Tile], int]
    step: Callable[[ShortConvMetadata], dict[str, Any]]
    layer: Callable[[VerifyWindows, Tensor, int, bool], dict[str, Any]] = _nothing
    constants: Callable[[ShortConvMetadata, VerifyWindows, bool], dict[str, Any]] = _nothing
    flags: Callable[[ShortConvMetadata, Tile, bool], dict[str, Any]] = _nothing
    keeps: bool = False
    bounds: Callable[[VerifyWindows, bool], bool] = _always
