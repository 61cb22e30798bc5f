"""Vectorised arithmetic of short convolutions, in plain torch on any device.

Windows are time-major here, ``[N, K-1, D]`` with the oldest input first, whatever the pool's axis.
Nothing reads a value on the host and no shape depends on data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["combine_taps", "gather_windows", "write_rows"]


def combine_taps(
    taps: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: bool,
    *,
    out: Tensor,
) -> None:
    """``out = act(bias + sum_j taps[j] * weight[:, j]) (+ taps[K-1])``, rounded once. In graph.

    The sum is float32 whatever the inputs, and runs from the current token to the oldest.

    Args:
        taps: K tensors ``[..., D]``, oldest first; the last is the current token.
        weight: ``[D, K]``.
        bias: ``[D]`` or None.
        activation: None, ``"silu"`` or ``"swish"``.
        residual: Add the current token after the activation.
        out: ``[..., D]``, any float dtype.
    """
    columns = weight.to(torch.float32).unbind(1)  # K x [D]
    current = taps[-1].to(torch.float32)
    acc = current * columns[-1]
    for tap, column in zip(reversed(taps[:-1]), reversed(columns[:-1]), strict=True):
        acc.addcmul_(tap.to(torch.float32), column)
    if bias is not None:
        acc += bias
    if activation is not None:
        functional.silu(acc, inplace=True)
    if residual:
        acc += current
    out.copy_(acc)


def gather_windows(source: Tensor, old: Tensor, x: Tensor) -> Tensor:
    """Assemble windows from packed tokens and old windows; a pure selection. In graph.

    Args:
        source: ``[B, K-1]`` int64: a packed token, or -1 to -(K-1) for the newest to the oldest
            column of the row's old window.
        old: ``[B, K-1, D]`` old windows, zero where a row starts afresh.
        x: ``[T, D]`` packed tokens, T >= 1.

    Returns:
        ``[B, K-1, D]`` in old's dtype.
    """
    window = old.shape[1]
    tokens = x.index_select(0, source.clamp(min=0).view(-1)).view(old.shape).to(old.dtype)
    columns = (source + window).clamp(0, window - 1)
    kept = old.gather(1, columns[:, :, None].expand(old.shape))
    return torch.where((source >= 0)[:, :, None], tokens, kept)


def write_rows(pool: Tensor, rows: Tensor, values: Tensor, mask: Tensor | None, old: Tensor) -> None:
    """Write ``values[i]`` to ``pool[rows[i]]`` where ``mask[i]``; None = everywhere. In graph.

    A masked row writes back what was there, since a recorded step cannot drop it. Rows that share a
    target are all masked ones, or all point at the dummy row 0.

    Args:
        pool: ``[S, K-1, D]``, any strides.
        rows: ``[B]`` int64, 0 or more.
        values: ``[B, K-1, D]`` in the pool's dtype.
        mask: ``[B]`` bool or None.
        old: ``[B, K-1, D]``, the rows' content.
    """
    if mask is not None:
        values = torch.where(mask[:, None, None], values, old)
    pool.index_copy_(0, rows, values)
