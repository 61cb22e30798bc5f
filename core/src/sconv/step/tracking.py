"""Which window of a step is kept: accepted nodes, and snapshots for the prefix cache.

One convention holds for verify, its commit and draft-extend: a *step* is a **node index**. Node
``t`` names the window after the node's input has been taken in, so after ``t + 1`` tokens of a
chain, and -1 names nothing. Snapshots are labelled with a length; the window of length ``n`` that a
chain passes from ``pre`` tokens is the one after ``n - pre`` tokens, hence node ``n - pre - 1``.

A count of tokens must not stand in for a node index. The two differ by one, no range check tells
them apart, and the snapshot of length ``n - 1`` filed under ``n`` hurts only the requests that
resume from it, later and without an error. For a tree the two are not even related by a constant:
the ``i``-th accepted token is any node, and only ``accept_index`` knows which.

Everything here is a pure function of tensors and recordable: no host sync, no shape that depends on
data. Divisions are floor divisions, also for negative numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import BatchError

__all__ = [
    "align_track_seqlens",
    "crossing_steps",
    "decode_track_mask",
    "verify_step_indices",
]


def verify_step_indices(accept_index: Tensor, accept_lens: Tensor, draft_token_num: int) -> Tensor:
    """Node of the last accepted token of each row. In graph.

    Args:
        accept_index: ``[B, depth]`` integer flat node ids ``b * draft_token_num + node`` of the
            accepted path, root first, padded with -1. ``depth`` may be less than dtn.
        accept_lens: ``[B]`` integer, accepted tokens of the row, the root included.
        draft_token_num: dtn.

    Returns:
        ``[B]`` int64, the commit's ``last_correct_step_indices``: -1 where nothing was accepted, or
        where the count or the node id is not one of this row's.

    Raises:
        BatchError: A shape is not as above.
    """
    return _accepted_node(accept_index, accept_lens.to(torch.int64) - 1, draft_token_num)


def crossing_steps(
    seq_lens: Tensor,
    accept_lens: Tensor,
    grid: int,
    accept_index: Tensor | None = None,
    draft_token_num: int | None = None,
) -> Tensor:
    """Node whose window is the snapshot at the newest grid point that a row reached. In graph.

    A row crosses if ``seq_lens // grid`` and ``(seq_lens + accept_lens) // grid`` differ. A row
    that crosses more than once gets its last crossing. Serves the commit (``mamba_steps_to_track``)
    and, as a chain, draft-extend.

    Args:
        seq_lens: ``[B]`` integer, tokens in the state before the step.
        accept_lens: ``[B]`` integer, tokens of the step that are kept, the root included; a row
            with 0 or fewer (padding) crosses nothing.
        grid: Distance of snapshots in tokens, at least 1.
        accept_index: As in :func:`verify_step_indices`, for a tree; None for a chain, where the
            i-th accepted token is node i.
        draft_token_num: dtn, needed with ``accept_index``.

    Returns:
        ``[B]`` int64, -1 = no crossing.

    Raises:
        BatchError: ``grid`` is below 1, ``draft_token_num`` is missing, or a shape is not as above.
    """
    _check_positive("grid", grid)
    before = seq_lens.to(torch.int64)
    kept = accept_lens.to(torch.int64)
    boundary = (before + kept) // grid * grid
    # boundary <= before + kept, so a crossing row's node is always one of its accepted ones.
    crossed = (kept > 0) & (boundary > before)
    node = boundary - before - 1
    if accept_index is not None:
        if draft_token_num is None:
            raise BatchError(
                "crossing_steps needs draft_token_num with accept_index: its entries are flat ids "
                "b * draft_token_num + node"
            )
        # A row that commits nothing, because its count is not one of its own, snapshots nothing.
        crossed &= verify_step_indices(accept_index, accept_lens, draft_token_num) >= 0
        node = _accepted_node(accept_index, node, draft_token_num)
    return torch.where(crossed, node, -1)


def decode_track_mask(seq_lens_after: Tensor, grid: int) -> Tensor:
    """Rows whose window after this decode step is a snapshot. In graph.

    Args:
        seq_lens_after: ``[B]`` integer, tokens in the state **after** the step: ``seq_lens + 1``.
        grid: Distance of snapshots in tokens, at least 1.

    Returns:
        ``[B]`` bool.

    Raises:
        BatchError: ``grid`` is below 1.
    """
    _check_positive("grid", grid)
    return (seq_lens_after > 0) & (seq_lens_after % grid == 0)


def align_track_seqlens(track_seqlens: Tensor, prefix_lens: Tensor, chunk_size: int) -> Tensor:
    """Absolute snapshot lengths from an engine that asks for a boundary plus a remainder. In graph.

    Some engines pass ``boundary + 1`` (or any length within the next chunk) and count chunks from
    where this prefill resumed: the snapshot is at the last whole chunk after ``prefix_lens``.
    Lengths before the prefix, -1 (none) among them, give -1.

    Args:
        track_seqlens: ``[B]`` integer, -1 = none.
        prefix_lens: ``[B]`` integer, tokens in the state before the step.
        chunk_size: Tokens per chunk, at least 1.

    Returns:
        ``[B]`` int64, ready for ``mamba_track_seqlens``.

    Raises:
        BatchError: ``chunk_size`` is below 1.
    """
    _check_positive("chunk_size", chunk_size)
    prefix = prefix_lens.to(torch.int64)
    wanted = track_seqlens.to(torch.int64)
    aligned = (wanted - prefix) // chunk_size * chunk_size
    return torch.where((wanted >= 0) & (aligned >= 0), prefix + aligned, -1)


def _accepted_node(accept_index: Tensor, order: Tensor, draft_token_num: int) -> Tensor:
    """``[B]`` int64: node of the ``order[b]``-th accepted token, -1 if it is not in the row."""
    if accept_index.dim() != 2 or order.shape != accept_index.shape[:1]:
        raise BatchError(
            "accept_index must be [B, depth] with one count per row, got "
            f"{tuple(accept_index.shape)} and {tuple(order.shape)}"
        )
    rows, depth = accept_index.shape
    if depth == 0:
        return torch.full_like(order, -1)
    present = (order >= 0) & (order < depth)
    flat = accept_index.to(torch.int64).gather(1, order.clamp(0, depth - 1).unsqueeze(1)).squeeze(1)
    node = flat - torch.arange(rows, device=flat.device, dtype=torch.int64) * draft_token_num
    return torch.where(present & (node >= 0) & (node < draft_token_num), node, -1)


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise BatchError(f"{name} must be at least 1, got {value}")
