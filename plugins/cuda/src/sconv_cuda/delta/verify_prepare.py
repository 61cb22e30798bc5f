"""The part of a verify step that does not need the state: decayed rows, and who corrects whom."""

from __future__ import annotations

import triton.language as tl

from ..launch import kernel
from ..overlap import wait
from .gates import decayed, inverse_norm, log_decay, sigmoid
from .paths import has, paths

__all__ = ["verify_prepare"]


@kernel
def verify_prepare(
    q,  # [T, H, DK], strides in units of VEC
    q_step,
    q_head,
    k,  # likewise
    k_step,
    k_head,
    gate,  # [T, HV] or [T, HV, DK]
    gate_step,
    gate_head,
    beta_index,  # [T, HV]
    beta_step,
    beta_head,
    rate_log_index,  # [HV]
    bias_index,  # [HV] or [HV, DK]; read if has_bias
    has_bias,
    slots_index,  # [B] int32
    paths_index,  # [B, DRAFTS] int32, of trees
    prepared,  # [B, HV, 2 DRAFTS, DK] keys, then queries, of unit length and decayed; if CHANNEL
    factors,  # [B, HV, DRAFTS + 3, M]: what each correction adds to row r, norms, betas, scales
    key_records,  # [R, H, P, DK]
    gate_records,  # [R, HV, P] or [R, HV, P, DK]
    places,  # P
    H: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    CHANNEL: tl.constexpr,
    SCALE: tl.constexpr,
    SAFE: tl.constexpr,
    BOUND: tl.constexpr,
    NORMALIZE: tl.constexpr,
    DRAFTS: tl.constexpr,
    M: tl.constexpr,
    TREE: tl.constexpr,
    VEC: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program owns a row and a value head.

    Rows r of its tile are the keys of the row's tokens, then the queries. The decay from token s to
    row r is a product of gates between them, never a quotient, so nothing overflows.
    """
    wait(PDL)
    head = tl.program_id(0) % HV
    row = (tl.program_id(0) // HV).to(tl.int64)
    slot = tl.load(slots_index + row)
    if slot >= 0:
        key_head = head // (HV // H)
        unit = row * HV + head
        channel = tl.arange(0, DK)
        r = tl.arange(0, M)
        token = r % DRAFTS
        is_key = r < DRAFTS
        is_query = (r >= DRAFTS) & (r < 2 * DRAFTS)
        path = paths(paths_index, row, token, DRAFTS, TREE)
        first = row * DRAFTS
        keys = k + (first * k_step + key_head * k_head) * VEC
        queries = q + (first * q_step + key_head * q_head) * VEC
        own_keys = tl.load(
            keys + (token * k_step * VEC)[:, None] + channel[None, :],
            mask=is_key[:, None],
            other=0.0,
        )
        y = tl.load(
            queries + (token * q_step * VEC)[:, None] + channel[None, :],
            mask=is_query[:, None],
            other=0.0,
        )
        x = own_keys.to(tl.float32) + y.to(tl.float32)
        norms = inverse_norm(tl.sum(x * x, 1), NORMALIZE)
        scales = tl.where(is_query, norms * SCALE, norms)
        x = x * scales[:, None]
        beta = sigmoid(
            tl.load(beta_index + (first + token) * beta_step + head * beta_head).to(tl.float32)
        )
        rate_log = tl.load(rate_log_index + head).to(tl.float32)
        if CHANNEL:
            bias = tl.load(
                bias_index + head * DK + channel, mask=(channel < DK) & (has_bias != 0), other=0.0
            ).to(tl.float32)
        else:
            bias = tl.load(bias_index + head, mask=has_bias != 0, other=0.0).to(tl.float32)
        # All loads come before the first store, which none of them could overtake.
        each_key = ()
        each_gate = ()
        for s in tl.static_range(DRAFTS):
            each_key = each_key + (tl.load(keys + s * k_step * VEC + channel),)
            if CHANNEL:
                raw = tl.load(gate + ((first + s) * gate_step + head * gate_head) * VEC + channel)
            else:
                raw = tl.load(gate + (first + s) * gate_step + head * gate_head)
            each_gate = each_gate + (raw,)
        if head % (HV // H) == 0:
            tl.store(
                key_records
                + (((row * H + key_head) * places + token) * DK)[:, None]
                + channel[None, :],
                own_keys.to(key_records.dtype.element_ty),
                mask=is_key[:, None],
            )
        decay = tl.full([M], 1.0, tl.float32)
        row_factors = factors + unit * (DRAFTS + 3) * M + r
        for i in tl.static_range(DRAFTS):
            s = DRAFTS - 1 - i
            norm = tl.sum(tl.where(r == s, norms, 0.0), 0)
            shared = tl.sum(x * each_key[DRAFTS - 1 - i].to(tl.float32)[None, :], 1) * norm
            log_gate = log_decay(
                each_gate[DRAFTS - 1 - i].to(tl.float32) + bias, rate_log, SAFE, BOUND
            )
            on = has(path, s)
            if CHANNEL:
                tl.store(gate_records + (unit * places + s) * DK + channel, log_gate)
                x = decayed(x, log_gate[None, :], on[:, None])
            else:
                tl.store(gate_records + unit * places + s, log_gate)
                shared = shared * decay
                decay = decayed(decay, log_gate, on)
            # A token does not correct its own key, but its own query.
            shared = tl.where(on & (r != s), shared, 0.0)
            tl.store(row_factors + s * M, tl.where(is_query, shared, -beta * shared))
        tl.store(row_factors + DRAFTS * M, norms)
        tl.store(row_factors + (DRAFTS + 1) * M, beta)
        if CHANNEL:
            tl.store(
                prepared + (unit * 2 * DRAFTS + r)[:, None] * DK + channel[None, :],
                x,
                mask=(r < 2 * DRAFTS)[:, None],
            )
        else:
            tl.store(row_factors + (DRAFTS + 2) * M, scales * decay)
