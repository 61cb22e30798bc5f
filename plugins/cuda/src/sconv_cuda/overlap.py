"""When a kernel may start before the one in front of it has finished.

With programmatic dependent launch a kernel starts early, does what depends on nobody, and waits for
all kernels in front of it where it needs their results. Two things are read before that wait:

* Weights. No kernel of a step writes them. Whoever writes weights by a kernel that itself releases
  its dependents early has to put a plain one, or a synchronisation, in between.
* The slots of a step, if they are *settled*: a convolution of the same step was launched before,
  and the first one of a step lets nobody start before it has seen the metadata. Metadata kernels
  never release anybody early. With the slots, inputs and windows are prefetched, not read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["prefetch", "release", "wait"]


@triton.jit
def release(PDL: tl.constexpr):
    """Let the next kernel start now."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for all kernels in front; from here on the next one may start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch(
    x,
    x_step,
    tokens,
    window,
    column_step,
    begin,
    dim,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Bring a row's window and its first TOKENS inputs closer, to where all writes meet.

    What is prefetched may still change: the loads come after the wait, and find it there.
    """
    sector: tl.constexpr = 256 // x.dtype.element_ty.primitive_bitwidth
    lines: tl.constexpr = K - 1 + TOKENS
    padded: tl.constexpr = 2 if lines <= 2 else 4 if lines <= 4 else 8 if lines <= 8 else 16
    lane = tl.arange(0, padded * (BLOCK // sector))
    line = lane // (BLOCK // sector)
    place = tl.minimum(begin + (lane % (BLOCK // sector)) * sector, dim - 1)
    old = (window + line * column_step + place).to(tl.int64)
    if TOKENS > 1:
        x += tl.maximum(tl.minimum(line - (K - 1), tokens - 1), 0) * x_step
    pointer = tl.where(line < K - 1, old, (x + place).to(tl.int64))
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointer],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
