"""Vectorised arithmetic of short convolutions, in plain torch on any device.

Windows and inputs are time-major here, oldest first, whatever the pool's axis. Nothing reads a
value on the host and no shape depends on data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "ConvParams",
    "convolve",
    "convolve_step",
    "sum_taps",
]

#: Input elements of a block: its float32 temporaries stay in a core's second-level cache.
_BLOCK: Final = 1 << 17


class ConvParams(NamedTuple):
    """What a convolution multiplies its inputs by and adds; the same for all parts of one call."""

    weight: Tensor  # [D, K]
    bias: Tensor | None  # [D]
    activation: str | None  # None, "silu" or "swish"
    residual: bool  # add the current token after the activation


def convolve(
    inputs: Tensor,
    conv: ConvParams,
    *,
    out: Tensor,
) -> None:
    """``out = act(bias + sum_j inputs[:, t + j] * weight[:, j]) (+ inputs[:, t + K-1])``. In graph.

    Summed in float32 from the oldest tap to the current token, and rounded once. An element's value
    does not depend on how the work is cut into blocks.

    Args:
        inputs: ``[N, n + K-1, D]``: N sequences, each with the K-1 inputs before its first output.
        conv: Weight, bias, activation and residual.
        out: ``[N, n, D]``, any float dtype.
    """
    columns = _columns(conv.weight)
    axis = 0 if out.shape[0] > 1 else 1
    halo = 0 if axis == 0 else len(columns) - 1
    size = out.shape[axis]
    step = max(1, _BLOCK * size // max(1, inputs.numel()))
    for start in range(0, size, step):
        count = min(step, size - start)
        block = inputs.narrow(axis, start, count + halo).to(torch.float32)
        target = out.narrow(axis, start, count)
        length = target.shape[1]
        taps = [block[:, j : j + length] for j in range(len(columns))]
        _round_sum(taps, columns, conv, target)


def convolve_step(
    old: Tensor,
    x: Tensor,
    conv: ConvParams,
    *,
    out: Tensor,
) -> None:
    """Convolve one token per row, bit for bit as :func:`convolve` would. In graph.

    Args:
        old: ``[B, K-1, D]`` windows.
        x: ``[B, D]`` tokens.
        conv: Weight, bias, activation and residual.
        out: ``[B, D]``, any float dtype.
    """
    columns = _columns(conv.weight)
    size = x.shape[0]
    step = max(1, _BLOCK * size // max(1, old.numel()))
    # Where nothing is converted there are no temporaries to keep in a cache, and each block costs a
    # meeting of the threads.
    if step >= size or old.dtype is x.dtype is out.dtype is torch.float32:
        taps = [*old.to(torch.float32).unbind(1), x.to(torch.float32)]
        _round_sum(taps, columns, conv, out)
        return
    for start in range(0, size, step):
        count = min(step, size - start)
        taps = [
            *old.narrow(0, start, count).to(torch.float32).unbind(1),
            x.narrow(0, start, count).to(torch.float32),
        ]
        _round_sum(taps, columns, conv, out.narrow(0, start, count))


def _columns(weight: Tensor) -> tuple[Tensor, ...]:
    """K contiguous float32 columns ``[D]``."""
    dim, width = weight.shape
    columns = torch.empty((width, dim, 1), dtype=torch.float32, device=weight.device)
    # The third axis keeps torch's CPU copy off its blocked transpose, which takes twice as long for
    # so few columns: 21 us against 9 for [2048, 4], as much as all the arithmetic of one token.
    return columns.copy_(weight.t()[:, :, None]).squeeze(2).unbind(0)


def sum_taps(
    taps: Sequence[Tensor],
    columns: Sequence[Tensor],
    conv: ConvParams,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``act(bias + sum_j taps[j] * columns[j]) (+ taps[-1])`` in float32, not rounded. In graph.

    The one place where the order of the additions is written down; what else convolves must give
    the same bits.

    Args:
        taps: K float32 tensors of one shape ``[..., D]``, the oldest input first.
        columns: K float32 tensors ``[D]``, the columns of the weight.
        conv: Bias, activation and residual; its weight is not read.
        out: Where to sum, float32; None for a new tensor.
    """
    acc = torch.mul(taps[0], columns[0], out=out)
    for tap, column in zip(taps[1:], columns[1:], strict=True):
        acc.addcmul_(tap, column)
    if conv.bias is not None:
        acc += conv.bias
    if conv.activation is not None:
        # torch's silu rounds differently in a vector lane and in the rest at the end of a block, so
        # that a row's output would depend on its neighbours. Its exp and its arithmetic do not.
        acc.div_(acc.neg().exp_().add_(1))
    if conv.residual:
        acc += taps[-1]
    return acc


def _round_sum(
    taps: Sequence[Tensor],
    columns: Sequence[Tensor],
    conv: ConvParams,
    out: Tensor,
) -> None:
    direct = out if out.dtype is torch.float32 else None
    acc = sum_taps(taps, columns, conv, out=direct)
    if direct is None:
        out.copy_(acc)
