"""What every convolution kernel does to a sum before it is stored."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["finish"]


@triton.jit
def finish(total, current, SILU: tl.constexpr, RESIDUAL: tl.constexpr):
    """Apply the activation, then the residual, in float32."""
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    if RESIDUAL:
        total = total + current
    return total
