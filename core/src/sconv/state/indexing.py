"""Lookups of positions within rows, in tensors whose first two axes are rows and positions."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["node_places", "select_nodes"]


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
    base = torch.arange(0, index.shape[0] * length, length, device=index.device, dtype=torch.int64)
    return index + base.view(-1, *[1] * (index.dim() - 1))
