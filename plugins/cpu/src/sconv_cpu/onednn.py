"""Depthwise convolution through oneDNN, where it gives the same values as plain torch.

A packed ``[T, D]`` stream is an image of height T, width 1 and D channels in channels-last order,
so a short convolution is torch's ``conv2d`` with one group per channel, on the memory as it lies.
For 16-bit inputs oneDNN accumulates in float32 and rounds once. Products of two 16-bit numbers are
exact in float32, so its fused multiply-adds round like separate ones, and only the order of the
taps could differ. Whether it does is tested once per dtype and width, on this machine. Only
the sign of a zero, the payload of a NaN, and what is below 2**-126 may differ all the same.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from sconv.plugin import ConvParams, convolve

__all__ = [
    "as_image",
    "as_kernel",
    "conv_rows",
    "convolve_image",
    "matches_plain_torch",
    "supports",
]

#: Fewer channels take other oneDNN kernels, and are not worth a call.
_MIN_DIM: Final = 16


def supports(dim: int, *dtypes: torch.dtype) -> bool:
    """Whether a convolution of these dtypes may go to oneDNN: one 16-bit dtype for all."""
    return (
        dim >= _MIN_DIM
        and dtypes[0] in (torch.bfloat16, torch.float16)
        and all(dtype is dtypes[0] for dtype in dtypes[1:])
        and bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)
    )


def as_image(inputs: Tensor) -> Tensor:
    """View contiguous ``[N, H, D]`` as ``[N, D, H, 1]`` in channels-last order."""
    rows, length, dim = inputs.shape
    return inputs.view(rows, length, 1, dim).permute(0, 3, 1, 2)


def as_kernel(weight: Tensor) -> Tensor:
    """View contiguous ``[D, K]`` as ``[D, 1, K, 1]``."""
    return weight.view(weight.shape[0], 1, -1, 1)


def convolve_image(image: Tensor, kernel: Tensor, *, padding: int = 0) -> Tensor:
    """Convolve each channel on its own: ``[N, D, n + K-1, 1]`` into ``[N, D, n, 1]``."""
    return functional.conv2d(image, kernel, groups=image.shape[1], padding=(padding, 0))


def conv_rows(inputs: Tensor, weight: Tensor, *, padding: int = 0) -> Tensor:
    """Convolve ``[N, n + K-1, D]`` by ``[D, K]`` into ``[N, n, D]``, no bias, rounded once.

    ``padding`` rows of zeros go before and after each sequence.
    """
    image, kernel = as_image(inputs.contiguous()), as_kernel(weight.contiguous())
    out = convolve_image(image, kernel, padding=padding)
    return out.permute(0, 2, 3, 1).reshape(inputs.shape[0], -1, inputs.shape[2])


@cache
def matches_plain_torch(dtype: torch.dtype, kernel_size: int) -> bool:
    """Whether oneDNN gives :func:`sconv.plugin.convolve`'s bits here, on a set of shapes.

    The inputs are large numbers of both signs among small ones, so that a small one survives or is
    absorbed depending on when it is added: another order of the taps, or a sum narrower than
    float32, changes the result in its leading digits.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    for rows, length, dim in ((1, 1, 64), (1, 37, 130), (5, 1, 48), (3, 7, 256)):
        shape = (rows, length + kernel_size - 1, dim)
        small = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") / 4096
        large = torch.randint(-1, 2, shape, generator=generator, dtype=torch.int64, device="cpu")
        large = large.to(torch.float32) * 32768.0
        inputs = torch.where(large == 0, small, large).to(dtype)
        signs = torch.randint(
            0, 2, (dim, kernel_size), generator=generator, dtype=torch.int64, device="cpu"
        )
        weight = (2 * signs - 1).to(dtype)
        plain = torch.empty(rows, length, dim, dtype=dtype, device="cpu")
        convolve(inputs, ConvParams(weight, None, None, False), out=plain)
        if not torch.equal(plain, conv_rows(inputs, weight)):
            return False
    return True
