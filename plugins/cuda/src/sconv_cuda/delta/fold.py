"""Add the accepted records of a row to its state."""

from __future__ import annotations

import triton
import triton.language as tl

from .paths import has

__all__ = ["folded"]


@triton.jit
def folded(
    s,
    corrections,
    keys,
    gates,
    path,
    value,
    channel,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHANNEL: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    """Return the state after the last node of a path: ``e^G S + sum u_s (e^{G - G_s} k_s)^T``.

    ``s`` is a tile of the state before, float32 ``[value, channel]``. Records are one row's and one
    head's. The gates are multiplied up from the end first, so that a token costs each element of
    the state one multiplication.
    """
    after = tl.full([DK], 1.0, tl.float32)
    rows = ()
    us = ()
    for i in tl.static_range(DRAFTS):
        node = DRAFTS - 1 - i
        on = has(path, node)
        u = tl.load(corrections + node * DV + value, mask=(value < DV) & on, other=0.0)
        us = us + (u,)
        key = tl.load(keys + node * DK + channel, mask=(channel < DK) & on, other=0.0)
        rows = rows + (key.to(tl.float32) * after,)
        if CHANNEL:
            gate = tl.load(gates + node * DK + channel, mask=(channel < DK) & on, other=0.0)
        else:
            gate = tl.load(gates + node, mask=on, other=0.0)
        after = after * tl.exp(gate)
    s = s * after[None, :]
    for i in tl.static_range(DRAFTS):
        s += us[DRAFTS - 1 - i][:, None] * rows[DRAFTS - 1 - i][None, :]
    return s
