"""Depthwise convolution through oneDNN, where it gives the same bits as plain torch.

A packed ``[T, D]`` stream is an image of height T, width 1 and D channels in channels-last order,
so a short convolution is torch's ``conv2d`` with one group per channel, on the memory as it lies.
It accumulates in float32 with fused multiply-adds, as torch's addcmul does, and rounds once. The
order of the taps, or the fusing where a machine has no such instruction, could differ. Whether they
do is tested once per dtype and width, on this machine.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from sconv.dense_ops import convolve

__all__ = ["conv_rows", "matches_plain_torch", "supports"]

#: Fewer channels take other oneDNN kernels, and are not worth a call.
_MIN_DIM: Final = 16


def supports(dim: int, *dtypes: torch.dtype) -> bool:
    """Whether a convolution of these dtypes may go to oneDNN: one dtype for all."""
    return (
        dim >= _MIN_DIM
        and all(dtype is dtypes[0] for dtype in dtypes[1:])
        and bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)
    )


def conv_rows(inputs: Tensor, weight: Tensor, *, padding: int = 0) -> Tensor:
    """Convolve ``[N, n + K-1, D]`` by ``[D, K]`` into ``[N, n, D]``, no bias, rounded once.

    ``padding`` rows of zeros go before and after each sequence.
    """
    rows, length, dim = inputs.shape
    image = inputs.contiguous().view(rows, length, 1, dim).permute(0, 3, 1, 2)
    kernel = weight.contiguous().view(dim, 1, -1, 1)
    out = functional.conv2d(image, kernel, groups=dim, padding=(padding, 0))
    return out.permute(0, 2, 3, 1).reshape(rows, -1, dim)


@cache
def matches_plain_torch(dtype: torch.dtype, kernel_size: int) -> bool:
    """Whether oneDNN gives :func:`sconv.dense_ops.convolve`'s bits here, on a set of shapes.

    A part of the inputs are large numbers of both signs among small ones, so that a small one
    survives or is absorbed depending on when it is added: another order of the taps, or a sum
    narrower than float32, changes the result in its leading digits. The others are ordinary: where
    a product is not exact, rounding it before the addition changes the last digit of many results.
    """
    generator = torch.Generator().manual_seed(0)
    for rows, length, dim in ((1, 1, 64), (1, 37, 130), (5, 1, 48), (3, 7, 257)):
        shape = (rows, length + kernel_size - 1, dim)
        ordinary = torch.randn(shape, generator=generator)
        large = torch.randint(-1, 2, shape, generator=generator) * 32768.0
        mixed = torch.where(large == 0, ordinary / 4096, large)
        weight = torch.randn((dim, kernel_size), generator=generator)
        for inputs, kernel in ((mixed, weight.sign()), (ordinary, weight)):
            if not _agree(inputs.to(dtype), kernel.to(dtype)):
                return False
    return True


def _agree(inputs: Tensor, weight: Tensor) -> bool:
    rows, length, dim = inputs.shape
    plain = inputs.new_empty(rows, length + 1 - weight.shape[1], dim)
    convolve(inputs, weight, bias=None, activation=None, residual=False, out=plain)
    return torch.equal(plain, conv_rows(inputs, weight))
