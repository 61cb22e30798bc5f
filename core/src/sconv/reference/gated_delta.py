"""The oracle of the gated delta rule: float64, one token and one head at a time.

It shares no code with any backend. A step of any mode is the same rows: each starts from a state,
or from zeros, and goes through its tokens; which of the states on the way are kept is all in which
modes differ. Tensors are read, never changed; results are on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import BatchError
from .convolution import Bools, Ints

__all__ = ["log_decay", "row_delta", "rows_delta"]

_EPS = 1e-6


def log_decay(
    gate: Tensor, A_log: Tensor, dt_bias: Tensor | None, *, lower_bound: float | None = None
) -> Tensor:
    """Return the log-decays of raw gates, float64 in the shape of ``gate``.

    Args:
        gate: ``[n, HV]`` or ``[n, HV, dk]``.
        A_log: ``[HV]``.
        dt_bias: ``gate``'s shape without the tokens, or None.
        lower_bound: Of a safe gate, or None.
    """
    x = _exact(gate)
    if dt_bias is not None:
        x = x + _exact(dt_bias)
    rate = _exact(A_log).exp().reshape(-1, *[1] * (gate.dim() - 2))
    if lower_bound is not None:
        return lower_bound / (1 + torch.exp(-rate * x))
    softplus = torch.where(x > 20, x, torch.log1p(torch.exp(torch.clamp(x, max=20))))
    return -rate * softplus


def row_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    normalize_qk: bool = True,
    parents: Ints | None = None,
) -> tuple[Tensor, Tensor]:
    """Go through the tokens of one row.

    Args:
        q: ``[n, H, dk]``.
        k: ``[n, H, dk]``.
        v: ``[n, HV, dv]``.
        gate: ``[n, HV]`` or ``[n, HV, dk]``, raw.
        beta: ``[n, HV]``, raw.
        state: ``[HV, dv, dk]`` before the row.
        A_log, dt_bias, lower_bound: As for :func:`log_decay`.
        scale: Of queries; None = ``dk ** -0.5``.
        normalize_qk: Divide queries and keys by ``sqrt(sum of squares + 1e-6)``.
        parents: ``[n]``, the node before each node, -1 = the state. None = chain.

    Returns:
        Outputs ``[n, HV, dv]``, and the state after each token ``[n, HV, dv, dk]``, both float64.

    Raises:
        BatchError: ``parents`` names a node that does not come before.
    """
    q, k, v, state = _exact(q), _exact(k), _exact(v), _exact(state)
    count, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[1:]
    decay = log_decay(gate, A_log, dt_bias, lower_bound=lower_bound).exp()
    strength = 1 / (1 + torch.exp(-_exact(beta)))
    before = range(-1, count - 1) if parents is None else [int(node) for node in parents]
    out = torch.zeros(count, value_heads, value_dim, dtype=torch.float64, device="cpu")
    states = torch.zeros(count, *state.shape, dtype=torch.float64, device="cpu")
    for t in range(count):
        if before[t] >= t:
            raise BatchError(f"parents[{t}] is {before[t]}: expected an earlier node, or -1")
        start = states[before[t]] if before[t] >= 0 else state
        for head in range(value_heads):
            key_head = head // (value_heads // key_heads)
            query, key = q[t, key_head], k[t, key_head]
            if normalize_qk:
                query = query / torch.sqrt((query * query).sum() + _EPS)
                key = key / torch.sqrt((key * key).sum() + _EPS)
            query = query * (1 / math.sqrt(key_dim) if scale is None else scale)
            matrix = start[head] * decay[t, head]  # a scalar, or one decay per column
            error = v[t, head] - matrix @ key
            matrix = matrix + strength[t, head] * torch.outer(error, key)
            out[t, head] = matrix @ query
            states[t, head] = matrix
    return out, states


def rows_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    pool: Tensor,
    *,
    slots: Ints,
    lengths: Ints,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    has_initial: Bools | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    normalize_qk: bool = True,
    parents: Sequence[Ints] | Tensor | None = None,
) -> tuple[Tensor, list[list[Tensor]]]:
    """Go through the packed rows of a step of any mode.

    Args:
        q, k, v, gate, beta: ``[T, ...]`` packed, see :func:`row_delta`; a tail is padding.
        pool: ``[S, HV, dv, dk]``.
        slots: ``[B]``, -1 = none: its outputs are zero.
        lengths: ``[B]`` tokens of each row.
        A_log, dt_bias, scale, lower_bound, normalize_qk: See :func:`row_delta`.
        has_initial: ``[B]``, False = the row starts from zeros; None = all resume.
        parents: ``[B, dtn]`` for trees.

    Returns:
        Outputs ``[T, HV, dv]`` float64, zero where there is no row; and for each row the states
        after 0, 1, ... of its tokens (of a tree: the old state, then one per node), none without a
        slot.
    """
    out = torch.zeros(v.shape, dtype=torch.float64, device="cpu")
    states: list[list[Tensor]] = []
    start = 0
    for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        stop = start + int(length)
        if slot == -1:
            states.append([])
        else:
            old = _exact(pool[int(slot)])
            if has_initial is not None and not has_initial[row]:
                old = torch.zeros_like(old)
            out[start:stop], after = row_delta(
                q[start:stop],
                k[start:stop],
                v[start:stop],
                gate[start:stop],
                beta[start:stop],
                old,
                A_log=A_log,
                dt_bias=dt_bias,
                scale=scale,
                lower_bound=lower_bound,
                normalize_qk=normalize_qk,
                parents=None if parents is None else parents[row],
            )
            states.append([old, *after])
        start = stop
    return out, states


def _exact(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().to(torch.float64)
