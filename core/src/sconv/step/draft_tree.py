"""Draft trees: who a node's parent is, and which inputs its convolution reads.

A verify step has dtn nodes per row. Node ``t`` of a chain reads the nodes before it; node ``t`` of
a tree reads its ancestors, which are scattered over the row, and both run into the row's old window
once they pass the root. Everything here is recordable: no host sync, no shape that depends on data,
and loops only over K or log2(dtn).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import BatchError

__all__ = ["ancestor_taps", "parents_from_links"]


def parents_from_links(next_token: Tensor, next_sibling: Tensor) -> Tensor:
    """Turn first-child and next-sibling links into parents. In graph.

    Only the first child of a node is named by its parent, so a later child finds the parent through
    the head of its sibling chain; pointer doubling reaches the head in log2(dtn) steps. Nodes may
    come in any order. Links outside of ``0..dtn-1`` count as absent, so that the stale links of a
    padded row give some parents, but never an index out of range.

    Args:
        next_token: ``[B, dtn]`` integer, first child of each node within its row, -1 = none.
        next_sibling: ``[B, dtn]`` integer, next sibling of each node within its row, -1 = none.

    Returns:
        ``[B, dtn]`` int32, the parent of each node within its row, -1 for a root.

    Raises:
        BatchError: The two shapes differ or are not ``[B, dtn]``.
    """
    if next_token.dim() != 2 or next_token.shape != next_sibling.shape:
        raise BatchError(
            "next_token and next_sibling must both be [B, dtn], got "
            f"{tuple(next_token.shape)} and {tuple(next_sibling.shape)}"
        )
    named_by = _invert(next_token)  # [B, dtn] parent of a first child
    previous = _invert(next_sibling)  # [B, dtn]
    node = torch.arange(next_token.shape[1], device=next_token.device, dtype=torch.int64).expand_as(
        named_by
    )
    head = torch.where(previous >= 0, previous, node)
    for _ in range((next_token.shape[1] - 1).bit_length()):
        head = head.gather(1, head)
    return named_by.gather(1, head).to(torch.int32)


def _invert(links: Tensor) -> Tensor:
    """``[B, dtn]`` int64: the node whose link points here, -1 = none."""
    if links.shape[1] == 0:
        return links.to(torch.int64)
    node = torch.arange(links.shape[1], dtype=torch.int32, device=links.device)
    # By comparison: writes of two nodes to one place, as stale links ask for, have no order.
    points = links[:, :, None] == node  # [B, dtn, dtn]
    return torch.where(points, node[:, None], -1).amax(1).to(torch.int64)


def ancestor_taps(parents: Tensor, kernel_size: int, *, out: Tensor | None = None) -> Tensor:
    """Index the K inputs that each node's convolution reads. In graph.

    The indexes count along the row's sequence ``V``: the old window (K-1 columns, oldest first),
    then the dtn inputs. Tap K-1 is the node, tap K-2 its parent, and so on; past the root the taps
    continue into the window from its newest column down. A chain gives ``taps[b, t, j] == t + j``.
    The window after node ``t`` is ``V[taps[b, t, 1:]]``.

    No tap falls off the window: entering it takes one step at least and lands on column K-2, and
    the K-2 steps that are left end at column 0.

    Args:
        parents: ``[B, dtn]`` integer; a parent outside of ``0..dtn-1`` means that the node follows
            the old window directly.
        kernel_size: K, at least 2.
        out: ``[B, dtn, K]`` int64 to write to, at a fixed address.

    Returns:
        ``[B, dtn, K]`` int64, ``out`` if it was given.

    Raises:
        BatchError: A shape, a dtype or ``kernel_size`` is not as above.
    """
    if parents.dim() != 2 or kernel_size < 2:
        raise BatchError(
            "ancestor_taps needs parents [B, dtn] and kernel_size >= 2, got "
            f"{tuple(parents.shape)} and {kernel_size}"
        )
    rows, dtn = parents.shape
    window = kernel_size - 1
    if out is None:
        out = torch.empty((rows, dtn, kernel_size), dtype=torch.int64, device=parents.device)
    elif out.shape != (rows, dtn, kernel_size) or out.dtype != torch.int64:
        raise BatchError(
            f"out must be int64 {(rows, dtn, kernel_size)}, got {out.dtype} {tuple(out.shape)}"
        )

    parents = parents.to(torch.int64)
    position = torch.arange(window + dtn, device=parents.device, dtype=torch.int64)  # [K-1+dtn]
    inside = (parents >= 0) & (parents < dtn)
    step_back = torch.cat(
        [
            (position[:window] - 1).expand(rows, window),
            torch.where(inside, parents + window, window - 1),
        ],
        dim=1,
    )  # [B, K-1+dtn]

    tap = position[window:].expand(rows, dtn)
    out[:, :, window] = tap
    for j in range(window - 1, -1, -1):
        tap = step_back.gather(1, tap)
        out[:, :, j] = tap
    return out
