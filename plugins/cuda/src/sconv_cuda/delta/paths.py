"""Which drafts are on the path to a draft, as bits of one number."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["has", "node_bits", "paths", "paths_of"]


def node_bits(count: int, device: torch.device) -> Tensor:
    """Return ``[count]`` int64, the bit of each node. Out of graph."""
    bit = torch.arange(count, dtype=torch.int64, device=device)
    return torch.ones(count, dtype=torch.int64, device=device) << bit


def paths_of(ancestors: Tensor, bits: Tensor) -> Tensor:
    """Return ``[B, N]`` int32 sets of nodes, once a step for all layers. In graph.

    Args:
        ancestors: ``[B, N, N]`` bool: whether s is on the path from the root to t, t included; N
            at most 32.
        bits: ``[N]`` of :func:`node_bits`.
    """
    return torch.where(ancestors, bits, 0).sum(-1).to(torch.int32)


@triton.jit
def paths(paths_index, row, node, DRAFTS: tl.constexpr, TREE: tl.constexpr):
    """Return the set of nodes from the root to ``node``, itself included.

    ``paths_index`` is ``[B, DRAFTS]`` int32, read in trees alone: a chain has all earlier tokens.
    """
    if TREE:
        return tl.load(paths_index + row * DRAFTS + node)
    else:
        return (2 << node) - 1


@triton.jit
def has(path, node: tl.constexpr):
    """Return whether ``node`` is in a set."""
    return ((path >> node) & 1) != 0
