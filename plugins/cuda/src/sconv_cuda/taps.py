"""The weights and the bias of a channel block, in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import scaled

__all__ = ["load_offset", "load_taps"]


@triton.jit
def load_taps(weight, channel, inside, K: tl.constexpr, ALIGNED: tl.constexpr, SILU: tl.constexpr):
    """Return K scaled float32 vectors: column j of ``weight[channel]``, a contiguous ``[D, K]``.

    The taps of a channel lie side by side, so reading one column touches the cache lines of all of
    them. Where they fill whole words they are read as such, once, and taken apart in registers.
    """
    bits: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth
    taps = ()
    if ALIGNED and (K * bits) % 64 == 0:
        per_word: tl.constexpr = 64 // bits
        words: tl.constexpr = K // per_word
        packed = weight.to(tl.pointer_type(tl.int64)) + channel * words
        for q in tl.static_range(words):
            word = tl.load(packed + q, mask=inside, other=0)
            for j in tl.static_range(per_word):
                tap = _unpack(word >> (j * bits), weight.dtype.element_ty)
                taps = taps + (scaled(tap, SILU),)
    elif ALIGNED and K * bits == 32:
        word = tl.load(weight.to(tl.pointer_type(tl.int32)) + channel, mask=inside, other=0)
        for j in tl.static_range(K):
            tap = _unpack(word >> (j * bits), weight.dtype.element_ty)
            taps = taps + (scaled(tap, SILU),)
    else:
        for j in tl.static_range(K):
            tap = tl.load(weight + channel * K + j, mask=inside, other=0).to(tl.float32)
            taps = taps + (scaled(tap, SILU),)
    return taps


@triton.jit
def load_offset(bias, has_bias, channel, inside, SILU: tl.constexpr):
    """Return the scaled float32 ``bias[channel]``, zero without one."""
    value = tl.load(bias + channel, mask=inside & (has_bias != 0), other=0).to(tl.float32)
    return scaled(value, SILU)


@triton.jit
def _unpack(word, DTYPE: tl.constexpr):
    """Read the low bits of an integer as a float."""
    if DTYPE.primitive_bitwidth == 16:
        return word.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    else:
        return word.to(tl.int32).to(DTYPE, bitcast=True).to(tl.float32)
