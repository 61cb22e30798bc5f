"""What every convolution kernel does to a sum before it is stored."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["convolved", "rounded", "scaled"]

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


#: exp(-s) is 2 to the power of this times s.
_EXPONENT = tl.constexpr(-1.4426950408889634)


@triton.jit
def scaled(factor, SILU: tl.constexpr):
    """Prepare a weight or a bias: with silu, sums are exponents of 2 already."""
    if SILU:
        return factor * _EXPONENT
    else:
        return factor


@triton.jit
def convolved(
    window,
    current,
    taps,
    offset,
    FIRST: tl.constexpr,
    K: tl.constexpr,
    SILU: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Return the output of one token, in float32.

    ``current`` is the token's input and ``window[FIRST : FIRST + K-1]`` the K-1 before it, oldest
    first, of any dtype; taps and offset are :func:`scaled`. The newest product comes first in every
    kernel, so that a token's bits do not depend on the one that it meets.
    """
    current = current.to(tl.float32)
    total = offset + current * taps[K - 1]
    for j in tl.static_range(K - 1):
        total += window[FIRST + K - 2 - j].to(tl.float32) * taps[K - 2 - j]
    if SILU:
        # s / (1 + exp(-s)) with total = s * _EXPONENT, which cancels.
        total = total * _reciprocal(tl.exp2(total) * _EXPONENT + _EXPONENT)
    if RESIDUAL:
        total = total + current
    return total


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """Convert to the nearest number of a dtype, as a GPU does."""
    if _INTERPRETED:
        if DTYPE.is_bf16():
            if not value.dtype.is_bf16():
                # Triton's interpreter cuts the lower bits off, so they are rounded away first.
                exact = value.to(tl.float32)
                bits = exact.to(tl.int32, bitcast=True)
                nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
                bits = tl.where(exact == exact, nearest, bits)
                value = bits.to(tl.float32, bitcast=True)
    return value.to(DTYPE)


@triton.jit
def _reciprocal(value):
    """Return ``1 / value`` to one unit in the last place; of infinity it is 0."""
    if _INTERPRETED:
        return 1.0 / value
    else:
        # A division is exact for huge divisors too, which costs more than the whole convolution.
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
        )
