"""Gates, step sizes and lengths, as the recurrence uses them; all in float32."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

__all__ = ["decayed", "inverse_norm", "log_decay", "sigmoid"]

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def sigmoid(x):
    """Return ``1 / (1 + exp(-x))``."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def log_decay(x, rate_log, SAFE: tl.constexpr, BOUND: tl.constexpr):
    """Return the log decay of a raw gate with its bias added; ``rate_log`` is ``A_log``."""
    rate = tl.exp(rate_log)
    if SAFE:
        return BOUND * sigmoid(rate * x)
    else:
        small = tl.minimum(x, 20.0)
        # The fast logarithm is off by 2^-22 around one, which a large rate would multiply.
        power = tl.exp(small)
        soft = tl.log(1.0 + power) if _INTERPRETED else libdevice.log1p(power)
        return -rate * tl.where(x > 20.0, x, soft)


@triton.jit
def inverse_norm(squares, NORMALIZE: tl.constexpr):
    """Return what scales a vector with this sum of squares to unit length."""
    if NORMALIZE:
        return tl.rsqrt(squares + 1e-6)
    else:
        return squares * 0.0 + 1.0


@triton.jit
def decayed(x, log_gate, on):
    """Scale x where ``on``; elsewhere the gate is not looked at, be it NaN."""
    return x * tl.where(on, tl.exp(log_gate), 1.0)
