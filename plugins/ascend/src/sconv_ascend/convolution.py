"""Short convolutions in few, large operators: on an NPU a launch costs more than its arithmetic."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from sconv.plugin import ConvParams, sum_taps

__all__ = ["convolve", "convolve_step"]

#: Outputs of a block: bounds the float32 copies of a long prompt to a few times 128 MiB.
_BLOCK: Final = 1 << 25


def convolve(inputs: Tensor, conv: ConvParams, out: Tensor, *, block: int = _BLOCK) -> None:
    """Convolve ``[N, n + K-1, D]`` into ``[N, n, D]``. In graph.

    The arithmetic is :func:`sconv.plugin.sum_taps`, so the values are those of the CPU backend
    as far as the device's operators round alike. They do not depend on how work is cut into blocks.
    """
    columns = _columns(conv.weight)
    width = len(columns)
    rows, tokens, dim = out.shape
    step = max(1, block // max(1, rows * dim))
    for start in range(0, tokens, step):
        count = min(step, tokens - start)
        part = inputs.narrow(1, start, count + width - 1).to(torch.float32)
        shifted = [part.narrow(1, tap, count) for tap in range(width)]
        out.narrow(1, start, count).copy_(sum_taps(shifted, columns, conv))


def convolve_step(old: Tensor, x: Tensor, conv: ConvParams) -> Tensor:
    """Convolve one token per row: windows ``[B, K-1, D]``, tokens ``[B, D]``. In graph."""
    inputs = [*old.to(torch.float32).unbind(1), x.to(torch.float32)]
    return sum_taps(inputs, _columns(conv.weight), conv).to(x.dtype)


def _columns(weight: Tensor) -> tuple[Tensor, ...]:
    """K contiguous float32 columns ``[D]`` of ``[D, K]``."""
    return weight.to(torch.float32).t().contiguous().unbind(0)
