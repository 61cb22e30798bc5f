"""The gated delta rule of every mode in plain torch, vectorised over rows and heads.

A few tokens of a row are one small problem: with ``E_t`` the decay along the path to token ``t``
and ``D_ts`` that after ``s`` up to ``t``, their corrections and outputs are ::

    u_t = beta_t (v_t - S (E_t k_t) - sum over s before t of  (k_t D_ts k_s) u_s)
    o_t =               S (E_t q_t) + sum over s up to t  of  (q_t D_ts k_s) u_s

so ``S`` is read once, by one matrix product for all tokens, and what is left is a triangular system
as wide as there are tokens (:func:`solve`). The state after any path is then
:func:`sconv.state.recurrent.fold`. Decode is one token, a verify step its drafts, an extend a loop
over blocks of :data:`BLOCK` tokens that all rows go through at once.

Rows are batches of matrix products of fixed sizes, so that no row's result depends on the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..state.recurrent import RecurrentState, all_true, fold
from ..step.metadata import ShortConvMetadata

__all__ = ["BLOCK", "DeltaInputs", "activate", "commit", "draft", "extend", "solve"]

#: Tokens of a row that an extend takes at once.
BLOCK: Final = 16

_EPS: Final = 1e-6


class DeltaInputs(NamedTuple):
    """Tokens of a step, float32 but for ``keys``; the first axes are ``[T]`` or ``[B, n]``.

    Attributes:
        q: ``[..., H, dk]`` normalised and scaled.
        k: ``[..., H, dk]`` normalised.
        v: ``[..., HV, dv]``.
        g: ``[..., HV]`` or ``[..., HV, dk]`` log-decays.
        beta: ``[..., HV]`` in 0 to 1.
        keys: ``[..., H, dk]`` as the model gave them.
        norm: ``[..., H, 1]``: ``k`` is ``keys`` times it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    keys: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class _Solved:
    """What :func:`solve` gives for ``[B, n]`` tokens.

    Attributes:
        out: ``[B, HV, n, dv]``.
        u: ``[B, HV, n, dv]``.
        k: ``[B, H, n, dk]`` normalised.
        g: ``[B, HV, n]`` or ``[B, HV, n, dk]``.
    """

    out: Tensor
    u: Tensor
    k: Tensor
    g: Tensor


def activate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    *,
    scale: float,
    lower_bound: float | None,
    normalize_qk: bool,
) -> DeltaInputs:
    """Turn what the hook gets into what the arithmetic works on."""
    x = gate.to(torch.float32)
    if dt_bias is not None:
        x = x + dt_bias.to(torch.float32)
    rate = A_log.to(torch.float32).exp()
    rate = rate if gate.dim() == 2 else rate[:, None]
    if lower_bound is None:
        softplus = torch.where(x > 20, x, x.clamp(max=20).exp_().log1p_())
        g = softplus.mul_(rate).neg_()
    else:
        g = _sigmoid(rate * x).mul_(lower_bound)
    query, key = q.to(torch.float32), k.to(torch.float32)
    if normalize_qk:
        query = query * _norm(query)
        norm = _norm(key)
    else:
        norm = torch.ones_like(key[..., :1])
    return DeltaInputs(
        query * scale,
        key * norm,
        v.to(torch.float32),
        g,
        _sigmoid(beta.to(torch.float32)),
        k,
        norm,
    )


def _norm(x: Tensor) -> Tensor:
    return (x * x).sum(-1, keepdim=True).add_(_EPS).rsqrt_()


def _sigmoid(x: Tensor) -> Tensor:
    # torch's own, like its softplus, rounds differently in a vector lane and in the rest behind it,
    # so that a row's gate would depend on its neighbours. Its exp and its arithmetic do not.
    return x.neg().exp_().add_(1).reciprocal_()


def solve(state: Tensor, tokens: DeltaInputs, ancestors: Tensor | None) -> _Solved:
    """Compute ``n`` tokens of each row from one read of its state. In graph.

    Args:
        state: ``[B, HV, dv, dk]`` float32.
        tokens: ``[B, n, ...]``.
        ancestors: ``[B, n, n]`` bool of a tree, see
            :attr:`sconv.state.recurrent.DeltaRecords.ancestors`; None = chains.
    """
    rows, heads, dv, dk = state.shape
    count = tokens.q.shape[1]
    group = heads // tokens.q.shape[2]
    k = tokens.k.transpose(1, 2)  # [B, H, n, dk]
    g = tokens.g.transpose(1, 2)  # [B, HV, n] or [B, HV, n, dk]
    pair = torch.cat([k, tokens.q.transpose(1, 2)], dim=2)
    pair = pair.repeat_interleave(group, dim=1)  # [B, HV, 2n, dk]
    decay = g if g.dim() == 4 else g[..., None]
    from_root, between = _decays(decay, ancestors)
    # [B, HV, 2n, n], over s: what the key and the query of each token read of those before it.
    wide = k.repeat_interleave(group, dim=1)
    if g.dim() == 4:
        decayed = between * wide[:, :, None]  # [B, HV, t, s, dk]
        both = pair.view(rows, heads, 2, count, dk).permute(0, 1, 3, 4, 2)
        reads = torch.matmul(decayed, both).permute(0, 1, 4, 2, 3)
    else:
        reads = torch.bmm(pair.flatten(0, 1), wide.flatten(0, 1).transpose(1, 2))
        reads = reads.view(rows, heads, 2, count, count) * between[..., 0][:, :, None]
    along = torch.cat([from_root, from_root], dim=2) * pair
    read = torch.bmm(along.flatten(0, 1), state.flatten(0, 1).transpose(1, 2))
    read = read.view(rows, heads, 2, count, dv)
    beta = tokens.beta.transpose(1, 2)[..., None]  # [B, HV, n, 1]
    v = tokens.v.transpose(1, 2)
    u, out = torch.empty_like(read[:, :, 0]), torch.empty_like(read[:, :, 1])
    for t in range(count):
        # Selected, not multiplied by zero: what other branches hold, NaN included, does not show.
        u[:, :, t] = v[:, :, t] - read[:, :, 0, t]
        if t:
            u[:, :, t] -= _combine(reads[:, :, 0, t, :t], u[:, :, :t], _branch(ancestors, t, t))
        u[:, :, t] *= beta[:, :, t]
        path = _branch(ancestors, t, t + 1)
        out[:, :, t] = read[:, :, 1, t]
        out[:, :, t] += _combine(reads[:, :, 1, t, : t + 1], u[:, :, : t + 1], path)
    return _Solved(out, u, k, g)


def _branch(ancestors: Tensor | None, node: int, count: int) -> Tensor | None:
    return None if ancestors is None else ancestors[:, None, node, :count]


def _combine(weights: Tensor, u: Tensor, path: Tensor | None) -> Tensor:
    """``[B, HV, s]`` by ``[B, HV, s, dv]``, over what is on the path: ``[B, HV, dv]``."""
    if path is not None:
        weights = torch.where(path, weights, 0)
        u = torch.where(path[..., None], u, 0)
    return torch.matmul(weights[:, :, None], u)[:, :, 0]


def _decays(g: Tensor, ancestors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return decays from the root to each token, and between any two tokens.

    Args:
        g: ``[B, HV, n, dk]`` or ``[B, HV, n, 1]``.
        ancestors: ``[B, n, n]`` bool, or None.

    Returns:
        ``[B, HV, n, dk or 1]``, and ``[B, HV, t, s, dk or 1]``: 1 on the diagonal, and 0 where
        ``s`` is not on the path to ``t``.
    """
    count = g.shape[2]
    if ancestors is None:
        node = torch.arange(count, dtype=torch.int64, device=g.device)
        later = (node[:, None] > node)[:, :, None]  # [j, s, 1]
        sums = torch.where(later, g[:, :, :, None], 0).cumsum(2)
        on_path = (node[:, None] >= node)[:, :, None]
        return g.cumsum(2).exp(), torch.where(on_path, sums.exp(), 0)
    on_path = ancestors[:, None, :, :, None]  # [B, 1, t, s, 1]
    steps = torch.where(on_path, g[:, :, None], 0)  # [B, HV, t, s, dk]
    # In the order of the tokens, which is that of the path: what follows s, s left out.
    from_here = steps.flip(3).cumsum(3).flip(3)
    after = torch.cat([from_here[:, :, :, 1:], torch.zeros_like(steps[:, :, :, :1])], dim=3)
    return from_here[:, :, :, 0].exp(), torch.where(on_path, after.exp(), 0)


def _rows(tokens: DeltaInputs, rows: int) -> DeltaInputs:
    """View the tokens of a step of equal rows as ``[B, n, ...]``."""
    return DeltaInputs(*(each.reshape(rows, -1, *each.shape[1:]) for each in tokens))


def _resumed(recurrent: RecurrentState, layer_id: int, meta: ShortConvMetadata) -> Tensor:
    """Return the rows' states, zero where a row starts afresh, whatever its slot holds."""
    state = recurrent.read(layer_id, meta.safe_idx)
    if all_true(meta.cache_mask):
        return state
    return torch.where(meta.cache_mask[..., None], state, 0)


def _packed(out: Tensor) -> Tensor:
    """Turn ``[B, HV, n, dv]`` into ``[T, HV, dv]``."""
    return out.transpose(1, 2).flatten(0, 1)


def decode(
    recurrent: RecurrentState, layer_id: int, tokens: DeltaInputs, meta: ShortConvMetadata
) -> Tensor:
    """One token per row."""
    state = _resumed(recurrent, layer_id, meta)
    row = _rows(tokens, meta.batch_size)
    solved = solve(state, row, None)
    group = state.shape[1] // row.k.shape[2]
    decay = solved.g if solved.g.dim() == 4 else solved.g[..., None]
    key = solved.k.repeat_interleave(group, dim=1)  # [B, HV, 1, dk]
    state.mul_(decay.exp()).addcmul_(solved.u.transpose(2, 3), key)
    if meta.tracks:
        snapshot(recurrent, layer_id, meta, state)
    recurrent.write(layer_id, meta.safe_idx, state, meta.writes)
    return _packed(solved.out)


def draft(
    recurrent: RecurrentState,
    layer_id: int,
    tokens: DeltaInputs,
    meta: ShortConvMetadata,
    *,
    verify: bool,
) -> Tensor:
    """Verify, which writes records, and draft-extend, which advances by what was accepted."""
    state = _resumed(recurrent, layer_id, meta)
    row = _rows(tokens, meta.batch_size)
    ancestors = None
    count = row.q.shape[1]
    if meta.tree_taps is not None:
        assert recurrent.records is not None
        ancestors = recurrent.records.ancestors[: meta.batch_size, :count, :count]
    solved = solve(state, row, ancestors)
    if verify:
        _store(recurrent, layer_id, row, solved, state, ancestors, meta)
        return _packed(solved.out)
    assert meta.num_accept_tokens is not None
    place = torch.arange(count, dtype=torch.int64, device=state.device)
    kept = meta.num_accept_tokens
    if meta.tracks:
        taken = fold(state, solved.u, solved.k, solved.g, place < _track_tokens(meta)[:, None])
        snapshot(recurrent, layer_id, meta, taken)
    new = fold(state, solved.u, solved.k, solved.g, place < kept[:, None])
    recurrent.write(layer_id, meta.safe_idx, new, meta.writes)
    return _packed(solved.out)


def _store(
    recurrent: RecurrentState,
    layer_id: int,
    row: DeltaInputs,
    solved: _Solved,
    state: Tensor,
    ancestors: Tensor | None,
    meta: ShortConvMetadata,
) -> None:
    records = recurrent.records
    assert records is not None
    rows, count = meta.batch_size, row.q.shape[1]
    if records.takes_snapshots:
        kept = records.states[layer_id]
        place = torch.arange(count, dtype=torch.int64, device=state.device)
        for node in range(count):
            path = (place <= node).expand(rows, -1) if ancestors is None else ancestors[:, node]
            kept[:rows, node].copy_(fold(state, solved.u, solved.k, solved.g, path))
        return
    group = solved.u.shape[1] // row.norm.shape[2]
    u = solved.u * row.norm.transpose(1, 2).repeat_interleave(group, dim=1)
    keys = row.keys.transpose(1, 2)  # [B, H, n, dk]
    fields = ((records.u, u), (records.k, keys), (records.g, solved.g))
    if not records.by_slot:
        for held, new in fields:
            held[layer_id, :rows, :, :count].copy_(new)
        return
    slots = meta.safe_idx
    place = records.pending[layer_id].index_select(0, slots)[:, None] + torch.arange(
        count, dtype=torch.int64, device=slots.device
    )
    for held, new in fields:
        held[layer_id][slots[:, None], :, place] = new.transpose(1, 2).to(held.dtype)


def extend(
    recurrent: RecurrentState,
    layer_id: int,
    tokens: DeltaInputs,
    meta: ShortConvMetadata,
    *,
    longest: int,
    on_host: bool,
) -> Tensor:
    """Rows of any length, in blocks.

    Args:
        recurrent: The state.
        layer_id: The layer.
        tokens: ``[T, ...]`` packed.
        meta: The step.
        longest: Tokens that no row has more of.
        on_host: Values can be read, so that rows which are through are left out.
    """
    total = meta.num_tokens
    start, length = meta.cu[:-1], meta.cu[1:] - meta.cu[:-1]
    state = _resumed(recurrent, layer_id, meta)
    heads, dv = state.shape[1:3]
    out = torch.zeros((total + 1, heads, dv), dtype=torch.float32, device=state.device)
    taken = state.clone() if meta.tracks else None
    column = torch.arange(BLOCK, dtype=torch.int64, device=state.device)
    order = length.argsort(descending=True, stable=True) if on_host else None
    lengths = sorted(length.tolist(), reverse=True) if on_host else []
    for first in range(0, longest, BLOCK):
        rows: Tensor | slice = slice(None)
        if order is not None:
            active = sum(each > first for each in lengths)
            if active < order.shape[0]:
                rows = order[:active]
        left = length[rows] - first
        valid = column < left[:, None]  # [B, n]
        place = torch.where(valid, start[rows, None] + first + column, total)
        at = place.clamp(max=total - 1)
        block = DeltaInputs(
            *(
                torch.where(
                    valid.view(*valid.shape, *[1] * (each.dim() - 1)),
                    each.index_select(0, at.view(-1)).view(*at.shape, *each.shape[1:]),
                    0,
                )
                for each in tokens
            )
        )
        before = state[rows]
        solved = solve(before, block, None)
        out.index_copy_(0, place.view(-1), _packed(solved.out))
        if taken is not None:
            wanted = _track_tokens(meta)[rows] - first
            here = (wanted > 0) & (wanted <= BLOCK)
            passed = fold(before, solved.u, solved.k, solved.g, column < wanted[:, None])
            taken[rows] = torch.where(here[:, None, None, None], passed, taken[rows])
        state[rows] = fold(before, solved.u, solved.k, solved.g, valid)
    if taken is not None:
        snapshot(recurrent, layer_id, meta, taken)
    recurrent.write(layer_id, meta.safe_idx, state, meta.writes)
    return out[:total]


def _track_tokens(meta: ShortConvMetadata) -> Tensor:
    """Return ``[B]``, tokens of each row that its snapshot has taken in; 0 = the old state."""
    newest = meta.track_conv_indices[:, -1]
    return torch.where(newest >= 0, newest - meta.cu[:-1] + 1, 0)


def snapshot(
    recurrent: RecurrentState, layer_id: int, meta: ShortConvMetadata, states: Tensor
) -> None:
    """Write the snapshots that are due; those into the dummy are left out."""
    target = meta.track_cache_indices.clamp(min=0)
    recurrent.write(layer_id, target, states, meta.track_cache_indices > 0)


def commit(
    recurrent: RecurrentState,
    nodes: Tensor,
    slots: Tensor,
    live: Tensor,
    taken: tuple[Tensor, Tensor, Tensor] | None,
    *,
    tree: bool,
    on_host: bool,
) -> None:
    """Keep what a verify step accepted, and take snapshots, in all layers. In graph.

    Args:
        recurrent: The state.
        nodes: ``[B]`` int64 node of each row.
        slots: ``[B]`` int64 rows of the pool, 0 where a row is not live.
        live: ``[B]`` bool, rows that change.
        taken: The same three for the snapshots, or None.
        tree: Whether the step was a tree.
        on_host: Values can be read, so that a fold which no row needs is left out.
    """
    records = recurrent.records
    assert records is not None
    rows = nodes.shape[0]
    snapshot_path = None if taken is None else records.paths(taken[0], tree=tree)
    path = records.paths(nodes, tree=tree)
    row = torch.arange(rows, dtype=torch.int64, device=nodes.device)
    resumes = records.resumes[:rows]
    for layer_id in range(len(recurrent.layers)):
        if records.takes_snapshots:
            kept = records.states[layer_id]
            new = kept[row, nodes].to(torch.float32)
            passed = None if taken is None else kept[row, taken[0]].to(torch.float32)
            recurrent.write(layer_id, slots, new, live)
        else:
            index = slots if records.by_slot else row
            u, k, g = (each[layer_id].index_select(0, index) for each in _fields(recurrent))
            base = recurrent.layers[layer_id].index_select(0, slots)
            if not all_true(resumes):
                base = torch.where(resumes[:, None, None, None], base, 0)
            pending = records.pending[layer_id].index_select(0, slots) if records.by_slot else None
            passed = None
            if snapshot_path is not None:
                passed = fold(base, u, k, g, _with_log(snapshot_path, pending, resumes, u.shape[2]))
            full = live
            if pending is not None:
                # What is pending in a slot is not of a row that started afresh.
                full = live & (~resumes | (pending + path.sum(1) > records.delta.log))
            if not on_host or pending is None or bool(full.any()):
                new = fold(base, u, k, g, _with_log(path, pending, resumes, u.shape[2]))
                recurrent.write(layer_id, slots, new, full)
            if pending is not None:
                _append(recurrent, layer_id, slots, live & ~full, path, pending, tree=tree)
        if taken is not None and passed is not None:
            recurrent.write(layer_id, taken[1], passed, taken[2])


def _fields(recurrent: RecurrentState) -> tuple[Tensor, Tensor, Tensor]:
    assert recurrent.records is not None
    return recurrent.records.u, recurrent.records.k, recurrent.records.g


def _with_log(path: Tensor, pending: Tensor | None, resumes: Tensor, places: int) -> Tensor:
    """Return ``[B, P]`` bool: what is pending of rows that resume, and the path behind it."""
    if pending is None:
        return path
    place = torch.arange(places, dtype=torch.int64, device=path.device) - pending[:, None]  # [B, P]
    drafts = path.shape[1]
    on_path = path.gather(1, place.clamp(0, drafts - 1).to(torch.int64))
    return torch.where(place < 0, resumes[:, None], (place < drafts) & on_path)


def _append(
    recurrent: RecurrentState,
    layer_id: int,
    slots: Tensor,
    grows: Tensor,
    path: Tensor,
    pending: Tensor,
    *,
    tree: bool,
) -> None:
    """Let a path's records join the log of their slot."""
    assert recurrent.records is not None
    if tree:
        # A path's nodes move together; what is left behind them means nothing.
        column = torch.arange(path.shape[1], dtype=torch.int64, device=path.device)
        order = (~path).to(torch.int32).argsort(dim=1, stable=True)
        origin, target = pending[:, None] + order, pending[:, None] + column
        for held in _fields(recurrent):
            layer = held[layer_id]
            layer[slots[:, None], :, target] = layer[slots[:, None], :, origin]
    counts = recurrent.records.pending[layer_id]
    added = torch.where(grows, path.sum(1), 0).to(counts.dtype)
    counts.index_copy_(0, slots, counts.index_select(0, slots) + added)
