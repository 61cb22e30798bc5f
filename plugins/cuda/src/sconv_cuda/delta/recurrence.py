"""Decode, extend and draft-extend: the state is read once, and written once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton.language as tl
from torch import Tensor

from ..arithmetic import rounded
from ..launch import ALIGNMENT, Launcher, kernel
from ..layer import VECTOR
from ..overlap import wait
from .gates import inverse_norm, log_decay, sigmoid
from .inputs import Heads, Inputs
from .named_launch import launch

__all__ = ["RecurrenceTile", "Rows", "recur"]


@dataclass(frozen=True, slots=True)
class RecurrenceTile:
    """The shape of a program.

    Attributes:
        values: Value channels of a head that it owns.
        warps: Its warps.
    """

    values: int
    warps: int


RECURRENCE_TILE: Final = RecurrenceTile(values=8, warps=1)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step, as its metadata has them.

    Attributes:
        slots: ``[B]`` int32; negative = none.
        starts: ``[B + 1]`` int32: first token of each row; None = one token each (decode).
        resumes: ``[B]`` bool: whether a row continues its slot's state, or starts from zeros.
        kept: ``[B]`` int32 tokens after which the state is written; None = all.
        targets: ``[B]`` int64 slots that get a snapshot, negative = none; None = nobody.
        last: ``[B]`` int64, any stride: packed index of a snapshot's last token; negative = the
            state before the step. Not read where one token each.
    """

    slots: Tensor
    starts: Tensor | None
    resumes: Tensor
    kept: Tensor | None = None
    targets: Tensor | None = None
    last: Tensor | None = None


def recur(
    launcher: Launcher,
    heads: Heads,
    inputs: Inputs,
    state: Tensor,
    rows: Rows,
    tile: RecurrenceTile = RECURRENCE_TILE,
) -> Tensor:
    """Return the outputs of all tokens, ``[T, HV, dv]``, and write the states. In graph.

    Outputs of rows without a slot are zero, as are those of tokens that belong to no row.

    Args:
        launcher: Of the device.
        heads: The layer's.
        inputs: Tokens packed by rows.
        state: ``[S, HV, dv, dk]`` of the layer, any slot stride.
        rows: Of the step.
        tile: The shape of a program.
    """
    tokens, size = inputs.v.shape[0], rows.slots.shape[0]
    shape = (tokens, heads.values, heads.value_dim)
    out = torch.empty(shape, dtype=inputs.v.dtype, device=state.device)
    if rows.starts is not None:
        out.zero_()
    if size == 0:
        return out
    values = min(tile.values, heads.value_dim)
    vec = inputs.vector(state.stride(0))
    aligned = vec > 1 and state.data_ptr() % ALIGNMENT == 0
    vec = VECTOR if aligned else 1
    unused = rows.slots
    launch(
        launcher,
        recurrence,
        size * heads.values * (heads.value_dim // values),
        {**inputs.arguments(vec), **inputs.constants, **heads.constants},
        {
            "slots_index": rows.slots,
            "starts_index": unused if rows.starts is None else rows.starts,
            "resumes_index": rows.resumes,
            "kept_index": unused if rows.kept is None else rows.kept,
            "targets_index": unused if rows.targets is None else rows.targets,
            "last_index": unused if rows.last is None else rows.last,
            "last_step": 0 if rows.last is None else rows.last.stride(0),
            "state": state,
            "slot_step": state.stride(0) // vec,
            "out": out,
            "ONE": rows.starts is None,
            "KEEPS": rows.kept is not None,
            "TRACKS": rows.targets is not None,
            "VALUES": values,
            "VEC": vec,
            "PDL": launcher.pdl,
        },
        warps=tile.warps,
        aligned=aligned,
    )
    return out


@kernel
def recurrence(
    q,  # [T, H, DK], strides in units of VEC
    q_step,
    q_head,
    k,  # likewise
    k_step,
    k_head,
    v,  # [T, HV, DV], likewise
    v_step,
    v_head,
    gate,  # [T, HV] or [T, HV, DK]
    gate_step,
    gate_head,
    beta_index,  # [T, HV]
    beta_step,
    beta_head,
    rate_log_index,  # [HV]
    bias_index,  # [HV] or [HV, DK]; read if has_bias
    has_bias,
    slots_index,
    starts_index,
    resumes_index,
    kept_index,
    targets_index,
    last_index,
    last_step,
    state,
    slot_step,
    out,
    H: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHANNEL: tl.constexpr,
    SCALE: tl.constexpr,
    SAFE: tl.constexpr,
    BOUND: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ONE: tl.constexpr,
    KEEPS: tl.constexpr,
    TRACKS: tl.constexpr,
    VALUES: tl.constexpr,
    VEC: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program owns VALUES channels of a row and a head, and holds their state in registers."""
    wait(PDL)
    block = tl.program_id(0) % (DV // VALUES)
    head = tl.program_id(0) // (DV // VALUES) % HV
    row = (tl.program_id(0) // (DV // VALUES * HV)).to(tl.int64)
    slot = tl.load(slots_index + row).to(tl.int64)
    value = block * VALUES + tl.arange(0, VALUES)
    if ONE:
        begin = row
        length = 1
        kept = 1
    else:
        begin = tl.load(starts_index + row).to(tl.int64)
        length = (tl.load(starts_index + row + 1) - begin).to(tl.int32)
        kept = length
    if slot < 0:
        if ONE:
            tl.store(
                out + (begin * HV + head) * DV + value, tl.zeros([VALUES], out.dtype.element_ty)
            )
    else:
        channel = tl.arange(0, DK)
        key_head = head // (HV // H)
        resumes = tl.load(resumes_index + row).to(tl.int1)
        if KEEPS:
            kept = tl.load(kept_index + row).to(tl.int32)
        target = tl.full([], -1, tl.int64)
        snapped = 1
        if TRACKS:
            target = tl.load(targets_index + row).to(tl.int64)
            if not ONE:
                last = tl.load(last_index + row * last_step).to(tl.int64)
                snapped = tl.where(last >= 0, last - begin + 1, 0).to(tl.int32)
        within = head * DV * DK + value[:, None] * DK + channel[None, :]
        place = state + slot * slot_step * VEC + within
        snapshot = state + target * slot_step * VEC + within
        inside = (value < DV)[:, None] & (channel < DK)[None, :]
        s = tl.load(place, mask=inside & resumes, other=0.0).to(tl.float32)
        if not ONE:
            if TRACKS:
                if (target >= 0) & (snapped == 0):
                    tl.store(snapshot, rounded(s, state.dtype.element_ty))
            if (kept == 0) & (resumes == 0) & (length > 0):
                tl.store(place, rounded(s, state.dtype.element_ty))
        rate_log = tl.load(rate_log_index + head).to(tl.float32)
        if CHANNEL:
            bias = tl.load(
                bias_index + head * DK + channel, mask=(channel < DK) & (has_bias != 0), other=0.0
            )
        else:
            bias = tl.load(bias_index + head, mask=has_bias != 0, other=0.0)
        for i in range(length):
            token = begin + i
            key = tl.load(k + (token * k_step + key_head * k_head) * VEC + channel)
            query = tl.load(q + (token * q_step + key_head * q_head) * VEC + channel)
            x = tl.load(v + (token * v_step + head * v_head) * VEC + value).to(tl.float32)
            beta = tl.load(beta_index + token * beta_step + head * beta_head).to(tl.float32)
            if CHANNEL:
                raw = tl.load(gate + (token * gate_step + head * gate_head) * VEC + channel)
            else:
                raw = tl.load(gate + token * gate_step + head * gate_head)
            decay = tl.exp(
                log_decay(raw.to(tl.float32) + bias.to(tl.float32), rate_log, SAFE, BOUND)
            )
            key = key.to(tl.float32)
            query = query.to(tl.float32)
            key = key * inverse_norm(tl.sum(key * key, 0), NORMALIZE)
            query = query * (inverse_norm(tl.sum(query * query, 0), NORMALIZE) * SCALE)
            s = s * decay[None, :] if CHANNEL else s * decay
            u = sigmoid(beta) * (x - tl.sum(s * key[None, :], 1))
            s += u[:, None] * key[None, :]
            tl.store(
                out + (token * HV + head) * DV + value,
                rounded(tl.sum(s * query[None, :], 1), out.dtype.element_ty),
            )
            if i + 1 == kept:
                tl.store(place, rounded(s, state.dtype.element_ty))
            if TRACKS:
                if (target >= 0) & (i + 1 == snapped):
                    tl.store(snapshot, rounded(s, state.dtype.element_ty))
