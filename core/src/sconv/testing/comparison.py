"""How close a backend must come: state bit for bit, outputs within one rounding."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["assert_same_bits", "output_bound", "same_bits"]


def output_bound(expected: Tensor, size: Tensor, dtype: torch.dtype, kernel_size: int) -> Tensor:
    """Return how far an output may be from the exact one.

    K products and K additions in float32 err by at most (K+2) half-ulps of the sum of magnitudes,
    and silu's slope is below 1.1; the exponential and the division add a few ulps of the result.
    Then comes one rounding to the output's dtype, whose subnormals have a step of their own.

    Args:
        expected: The exact outputs.
        size: The same sum over magnitudes: ``|bias| + sum |tap * w| (+ |x|)``.
        dtype: Dtype of the outputs.
        kernel_size: K.
    """
    single, info = torch.finfo(torch.float32), torch.finfo(dtype)
    arithmetic = 1.1 * (kernel_size + 8) * (single.eps / 2) * size
    step = info.smallest_normal * info.eps / 2
    return arithmetic + (expected.abs() + arithmetic) * (info.eps / 2) + step


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bits, so that equal NaNs are equal and 0 is not -0."""
    return one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))


def assert_same_bits(one: Tensor, other: Tensor, what: str) -> None:
    """Raise AssertionError with the first row that differs."""
    assert one.dtype == other.dtype, f"{what}: {one.dtype} instead of {other.dtype}"
    assert one.shape == other.shape, f"{what}: {list(one.shape)} instead of {list(other.shape)}"
    differs = _bits(one) != _bits(other)
    if differs.any():
        place = tuple(int(index) for index in differs.nonzero()[0])
        raise AssertionError(
            f"{what}: {one[place].item()} instead of {other[place].item()} at {place}, one of "
            f"{int(differs.sum())} differences"
        )


def _bits(tensor: Tensor) -> Tensor:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().cpu().contiguous().view(width[tensor.element_size()])
