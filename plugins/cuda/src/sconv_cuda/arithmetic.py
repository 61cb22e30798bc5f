"""What every convolution kernel does to a sum before it is stored."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["finish", "scaled"]

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


#: exp(-s) is 2 to the power of this times s.
_EXPONENT = tl.constexpr(-1.4426950408889634)


@triton.jit
def scaled(factor, SILU: tl.constexpr):
    """Prepare a weight or a bias: with silu, sums are exponents of 2 already (:func:`finish`)."""
    if SILU:
        return factor * _EXPONENT
    else:
        return factor


@triton.jit
def finish(total, current, SILU: tl.constexpr, RESIDUAL: tl.constexpr):
    """Apply the activation to a sum of scaled products, then the residual, in float32."""
    if SILU:
        # s / (1 + exp(-s)) with total = s * _EXPONENT, which cancels.
        total = total * _reciprocal(tl.exp2(total) * _EXPONENT + _EXPONENT)
    if RESIDUAL:
        total = total + current
    return total


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
