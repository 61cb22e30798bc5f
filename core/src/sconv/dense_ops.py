"""Vectorised arithmetic of short convolutions, in plain torch on any device.

Windows and inputs are time-major here, oldest first, whatever the pool's axis. Nothing reads a
value on the host and no shape depends on data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

__all__ = [
    "convolve",
    "convolve_step",
    "gather_windows",
    "node_places",
    "select_nodes",
    "sum_taps",
]

#: Input elements of a block: its float32 temporaries stay in a core's second-level cache.
_BLOCK: Final = 1 << 17


def convolve(
    inputs: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None,
    activation: str | None,
    residual: bool,
    out: Tensor,
) -> None:
    """``out = act(bias + sum_j inputs[:, t + j] * weight[:, j]) (+ inputs[:, t + K-1])``. In graph.

    Summed in float32 from the oldest tap to the current token, and rounded once. An element's value
    does not depend on how the work is cut into blocks.

    Args:
        inputs: ``[N, n + K-1, D]``: N sequences, each with the K-1 inputs before its first output.
        weight: ``[D, K]``.
        bias: ``[D]`` or None.
        activation: None, ``"silu"`` or ``"swish"``.
        residual: Add the current token after the activation.
        out: ``[N, n, D]``, any float dtype.
    """
    columns = _columns(weight)
    axis = 0 if out.shape[0] > 1 else 1
    halo = 0 if axis == 0 else len(columns) - 1
    size = out.shape[axis]
    step = max(1, _BLOCK * size // max(1, inputs.numel()))
    for start in range(0, size, step):
        count = min(step, size - start)
        block = inputs.narrow(axis, start, count + halo).to(torch.float32)
        target = out.narrow(axis, start, count)
        length = target.shape[1]
        taps = [block[:, j : j + length] for j in range(len(columns))]
        _round_sum(taps, columns, bias, activation, residual, target)


def convolve_step(
    old: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None,
    activation: str | None,
    residual: bool,
    out: Tensor,
) -> None:
    """Convolve one token per row, bit for bit as :func:`convolve` would. In graph.

    Args:
        old: ``[B, K-1, D]`` windows.
        x: ``[B, D]`` tokens.
        weight: ``[D, K]``.
        bias: ``[D]`` or None.
        activation: None, ``"silu"`` or ``"swish"``.
        residual: Add x after the activation.
        out: ``[B, D]``, any float dtype.
    """
    columns = _columns(weight)
    size = x.shape[0]
    step = max(1, _BLOCK * size // max(1, old.numel()))
    # Where nothing is converted there are no temporaries to keep in a cache, and each block costs a
    # meeting of the threads.
    if step >= size or old.dtype is x.dtype is out.dtype is torch.float32:
        taps = [*old.to(torch.float32).unbind(1), x.to(torch.float32)]
        _round_sum(taps, columns, bias, activation, residual, out)
        return
    for start in range(0, size, step):
        count = min(step, size - start)
        taps = [
            *old.narrow(0, start, count).to(torch.float32).unbind(1),
            x.narrow(0, start, count).to(torch.float32),
        ]
        _round_sum(taps, columns, bias, activation, residual, out.narrow(0, start, count))


def _columns(weight: Tensor) -> tuple[Tensor, ...]:
    """K contiguous float32 columns ``[D]``."""
    dim, width = weight.shape
    columns = torch.empty((width, dim, 1), dtype=torch.float32, device=weight.device)
    # The third axis keeps torch's CPU copy off its blocked transpose, which takes twice as long for
    # so few columns: 21 us against 9 for [2048, 4], as much as all the arithmetic of one token.
    return columns.copy_(weight.t()[:, :, None]).squeeze(2).unbind(0)


def sum_taps(
    taps: Sequence[Tensor],
    columns: Sequence[Tensor],
    *,
    bias: Tensor | None,
    activation: str | None,
    residual: bool,
    out: Tensor | None = None,
) -> Tensor:
    """``act(bias + sum_j taps[j] * columns[j]) (+ taps[-1])`` in float32, not rounded. In graph.

    The one place where the order of the additions is written down; what else convolves must give
    the same bits.

    Args:
        taps: K float32 tensors of one shape ``[..., D]``, the oldest input first.
        columns: K float32 tensors ``[D]``.
        bias: ``[D]`` or None.
        activation: None, ``"silu"`` or ``"swish"``.
        residual: Add the newest input after the activation.
        out: Where to sum, float32; None for a new tensor.
    """
    acc = torch.mul(taps[0], columns[0], out=out)
    for tap, column in zip(taps[1:], columns[1:], strict=True):
        acc.addcmul_(tap, column)
    if bias is not None:
        acc += bias
    if activation is not None:
        # torch's silu rounds differently in a vector lane and in the rest at the end of a block, so
        # that a row's output would depend on its neighbours. Its exp and its arithmetic do not.
        acc.div_(acc.neg().exp_().add_(1))
    if residual:
        acc += taps[-1]
    return acc


def _round_sum(
    taps: Sequence[Tensor],
    columns: Sequence[Tensor],
    bias: Tensor | None,
    activation: str | None,
    residual: bool,
    out: Tensor,
) -> None:
    direct = out if out.dtype is torch.float32 else None
    acc = sum_taps(taps, columns, bias=bias, activation=activation, residual=residual, out=direct)
    if direct is None:
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
    return torch.where((source >= 0)[:, :, None], tokens, select_nodes(old, columns))


def select_nodes(inputs: Tensor, index: Tensor) -> Tensor:
    """Pick positions per row: ``[B, n, D]`` by ``[B, ...]`` int64 -> ``[B, ..., D]``. In graph.

    As one lookup of whole positions in ``[B * n, D]``: a gather along the middle axis needs an
    index per channel, and takes several times as long.
    """
    _, length, dim = inputs.shape
    flat = node_places(index.flatten(1), length).view(-1)
    return inputs.reshape(-1, dim).index_select(0, flat).view(*index.shape, dim)


def node_places(index: Tensor, length: int) -> Tensor:
    """Number a position within each row across all rows, ``length`` in each. In graph.

    For a lookup in a tensor whose first two axes, rows and positions, are made one.

    Args:
        index: ``[B, ...]`` int64 positions.
        length: Positions of a row, at least 1.
    """
    base = torch.arange(0, index.shape[0] * length, length, device=index.device)
    return index + base.view(-1, *[1] * (index.dim() - 1))
