"""Verify drafts from one read of the state, and record what a commit needs.

With the state ``S`` before the step and the decay ``e^G`` along a token's path,

    u_t = beta_t (v_t - S (e^{G_t} k_t) - sum_s u_s (k_s . e^{G_t - G_s} k_t))
    o_t = S (e^{G_t} q_t) + sum_s u_s (k_s . e^{G_t - G_s} q_t)

with s over the ancestors of t (the output counts t itself). So all products with S are one small
matrix product, and the rest is a triangular solve among the drafts. One launch prepares rows and
coefficients, the other reads S.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from sconv import BatchError

from ..arithmetic import rounded
from ..launch import ALIGNMENT, Launcher, kernel
from ..layer import VECTOR
from ..overlap import wait
from .inputs import Heads, Inputs, Records
from .named_launch import launch
from .paths import has, paths
from .verify_prepare import verify_prepare

__all__ = ["MOST_DRAFTS", "VerifyTile", "verify"]

#: Tokens of a row that one tile of the kernels holds.
MOST_DRAFTS: Final = 32


@dataclass(frozen=True, slots=True)
class VerifyTile:
    """The shape of a program; no choice changes a bit of a result but ``keys``.

    Attributes:
        values: Value channels that it owns.
        keys: Key channels of a pass of its loop.
        warps: Its warps.
        stages: Passes whose loads are under way at once.
    """

    values: int
    keys: int
    warps: int
    stages: int


#: (most value heads of all rows, shape): what was fastest on one NVIDIA H200. All have one
#: ``keys``, so that results do not depend on the other rows.
VERIFY_TILES: Final = (
    (128, VerifyTile(values=16, keys=32, warps=1, stages=4)),
    (1024, VerifyTile(values=32, keys=32, warps=1, stages=3)),
    (1 << 31, VerifyTile(values=64, keys=32, warps=2, stages=3)),
)


def verify(
    launcher: Launcher,
    heads: Heads,
    inputs: Inputs,
    state: Tensor,
    slots: Tensor,
    resumes: Tensor,
    records: Records,
    *,
    drafts: int,
    tree: Tensor | None,
    tile: VerifyTile | None = None,
) -> Tensor:
    """Return the outputs of all tokens, ``[T, HV, dv]``; the state is only read. In graph.

    Args:
        launcher: Of the device.
        heads: The layer's.
        inputs: Token t of row b at ``b * drafts + t``.
        state: ``[S, HV, dv, dk]`` of the layer, any slot stride.
        slots: ``[B]`` int32; negative = none: zero outputs, no record.
        resumes: ``[B]`` bool: whether a row continues its slot's state, or starts from zeros.
        records: Of the layer, by position in the batch.
        drafts: Tokens of a row.
        tree: ``[B, drafts]`` int32 contiguous, :func:`.paths.paths_of` of trees; None = chains.
        tile: Instead of the table's.

    Raises:
        BatchError: More drafts than a tile holds.
    """
    if not 1 <= drafts <= MOST_DRAFTS:
        raise BatchError(f"{drafts} draft tokens a row; the kernels take 1 to {MOST_DRAFTS}")
    rows = slots.shape[0]
    shape = (inputs.v.shape[0], heads.values, heads.value_dim)
    out = torch.empty(shape, dtype=inputs.v.dtype, device=state.device)
    out[rows * drafts :].zero_()
    if rows == 0:
        return out
    if tile is None:
        tile = next(tile for most, tile in VERIFY_TILES if rows * heads.values <= most)
    values = min(tile.values, heads.value_dim)
    vec = inputs.vector(state.stride(0))
    aligned = vec > 1 and state.data_ptr() % ALIGNMENT == 0
    vec = VECTOR if aligned else 1
    m = max(16, triton.next_power_of_2(2 * drafts))
    units = rows * heads.values
    wide = units * 2 * drafts * heads.key_dim if heads.channel else 1
    prepared = torch.empty(wide, dtype=torch.float32, device=state.device)
    factors = torch.empty(units * (drafts + 3) * m, dtype=torch.float32, device=state.device)
    shared = {
        **inputs.arguments(vec),
        **inputs.constants,
        **heads.constants,
        "slots_index": slots,
        "paths_index": slots if tree is None else tree,
        "prepared": prepared,
        "factors": factors,
        "places": records.places,
        "DRAFTS": drafts,
        "M": m,
        "TREE": tree is not None,
        "VEC": vec,
        "PDL": launcher.pdl,
    }
    launch(
        launcher,
        verify_prepare,
        units,
        shared,
        {"key_records": records.k, "gate_records": records.g},
        warps=1 if m == 16 else 4,
        aligned=aligned,
    )
    launch(
        launcher,
        verify_states,
        units * (heads.value_dim // values),
        shared,
        {
            "state": state,
            "slot_step": state.stride(0) // vec,
            "out": out,
            "resumes_index": resumes,
            "correction_records": records.u,
            "SHORT": inputs.v.dtype != torch.float32,
            "VALUES": values,
            "KEYS": min(tile.keys, heads.key_dim),
            "STAGES": tile.stages,
        },
        warps=tile.warps,
        aligned=aligned,
    )
    return out


@kernel
def verify_states(
    q,
    q_step,
    q_head,
    k,
    k_step,
    k_head,
    v,  # [T, HV, DV]
    v_step,
    v_head,
    slots_index,  # [B] int32
    paths_index,  # [B, DRAFTS] int32, of trees
    prepared,  # by verify_prepare, as factors
    factors,
    state,  # [S, HV, DV, DK]
    slot_step,
    resumes_index,  # [B] bool
    out,  # [T, HV, DV]
    correction_records,  # [R, HV, P, DV]
    places,  # P
    H: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHANNEL: tl.constexpr,
    DRAFTS: tl.constexpr,
    M: tl.constexpr,
    TREE: tl.constexpr,
    SHORT: tl.constexpr,
    VALUES: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    VEC: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program owns VALUES channels of a row and a value head.

    verify_prepare has waited for all kernels in front of it before this one may start, so inputs
    and state are read before the wait; what verify_prepare writes is read after it.
    """
    block = tl.program_id(0) % (DV // VALUES)
    head = tl.program_id(0) // (DV // VALUES) % HV
    row = (tl.program_id(0) // (DV // VALUES * HV)).to(tl.int64)
    slot = tl.load(slots_index + row).to(tl.int64)
    value = block * VALUES + tl.arange(0, VALUES)
    r = tl.arange(0, M)
    token = r % DRAFTS
    is_key = r < DRAFTS
    is_query = (r >= DRAFTS) & (r < 2 * DRAFTS)
    first = row * DRAFTS
    outputs = out + (((first + token) * HV + head) * DV)[:, None] + value[None, :]
    if slot < 0:
        tl.store(outputs, tl.zeros([M, VALUES], out.dtype.element_ty), mask=is_query[:, None])
    else:
        unit = row * HV + head
        key_head = head // (HV // H)
        channel = tl.arange(0, KEYS)
        keys = k + (first * k_step + key_head * k_head) * VEC
        queries = q + (first * q_step + key_head * q_head) * VEC
        values = tl.load(
            v + ((first + token) * v_step * VEC)[:, None] + head * v_head * VEC + value[None, :],
            mask=is_key[:, None],
            other=0.0,
        ).to(tl.float32)
        path = paths(paths_index, row, token, DRAFTS, TREE)
        # [KEYS, VALUES], keys side by side: the order that a matrix product wants.
        own = state + slot * slot_step * VEC + (head * DV + block * VALUES) * DK
        states = own + tl.arange(0, VALUES)[None, :] * DK + channel[:, None]
        resumes = tl.load(resumes_index + row).to(tl.int1)
        total = tl.zeros([M, VALUES], tl.float32)
        if CHANNEL:
            wait(PDL)
        for at in tl.range(0, DK, KEYS, num_stages=STAGES):
            s = tl.load(states + at).to(tl.float32)
            if CHANNEL:
                x = tl.load(
                    prepared + ((unit * 2 * DRAFTS + r) * DK + at)[:, None] + channel[None, :],
                    mask=(r < 2 * DRAFTS)[:, None],
                    other=0.0,
                )
            else:
                x = tl.load(
                    keys + (token * k_step * VEC + at)[:, None] + channel[None, :],
                    mask=is_key[:, None],
                    other=0.0,
                ).to(tl.float32)
                x += tl.load(
                    queries + (token * q_step * VEC + at)[:, None] + channel[None, :],
                    mask=is_query[:, None],
                    other=0.0,
                ).to(tl.float32)
            if SHORT and not CHANNEL:
                # 16-bit inputs are exact in tf32: two products give all digits of S.
                high = (s.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
                total = tl.dot(x, high, total, input_precision="tf32")
                total = tl.dot(x, s - high, total, input_precision="tf32")
            else:
                total = tl.dot(x, s, total, input_precision="tf32x3")
        # Here rather than at the loads, which a condition would slow down.
        total = tl.where(resumes, total, 0.0)
        if not CHANNEL:
            wait(PDL)
        row_factors = factors + unit * (DRAFTS + 3) * M + r
        norms = tl.load(row_factors + DRAFTS * M)
        beta = tl.load(row_factors + (DRAFTS + 1) * M)
        if not CHANNEL:
            total = total * tl.load(row_factors + (DRAFTS + 2) * M)[:, None]
        total = tl.where(is_key[:, None], beta[:, None] * (values - total), total)
        for i in tl.static_range(DRAFTS):
            correction = tl.sum(tl.where((r == i)[:, None], total, 0.0), 0)
            on = has(path, i)
            factor = tl.load(row_factors + i * M)
            # Named, so that all shapes of programs round alike.
            added = tl.fma(
                tl.broadcast_to(factor[:, None], [M, VALUES]),
                tl.broadcast_to(correction[None, :], [M, VALUES]),
                total,
            )
            total = tl.where(on[:, None], added, total)
        tl.store(outputs, rounded(total, out.dtype.element_ty), mask=is_query[:, None])
        kept = correction_records + ((unit * places + token) * DV)[:, None] + value[None, :]
        tl.store(kept, total * norms[:, None], mask=is_key[:, None])
