"""The check of one call of the gated delta rule. Host facts only, like that of a convolution."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from ..errors import BatchError, SpecError
from ..messages import kind_of
from ..state.gated_delta import GatedDelta
from ..state.spec import StateSpec
from .batch import ForwardBatch, ForwardMode, check_is_batch
from .conv_checks import is_prepared, unprepared
from .metadata import ShortConvMetadata

__all__ = ["check_delta"]

_FLOAT: Final = (torch.bfloat16, torch.float16, torch.float32)


def check_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    layer_id: int,
    scale: object,
    lower_bound: object,
    normalize_qk: object,
    batch: ForwardBatch,
    meta: ShortConvMetadata,
    spec: StateSpec,
    device: torch.device,
) -> None:
    """Check one call. In graph.

    Raises:
        BatchError: An argument is of the wrong type, shape, dtype or device, or has wrong strides.
        SpecError: The layer does not exist, or the spec has no recurrent state.
        MetadataError: The prepared step is not this batch's.
    """
    delta = spec.recurrent
    if delta is None:
        raise SpecError("gated_delta: the spec has no recurrent state: give StateSpec recurrent=")
    spec.layer_streams(layer_id)
    check_is_batch(batch)
    if not (meta.batch is batch or is_prepared(meta, batch, device)):
        raise unprepared(meta, batch)
    tokens = meta.num_tokens
    expected: tuple[tuple[str, Tensor | None, tuple[int, ...]], ...] = (
        ("q", q, (tokens, delta.key_heads, delta.key_dim)),
        ("k", k, (tokens, delta.key_heads, delta.key_dim)),
        ("v", v, (tokens, delta.value_heads, delta.value_dim)),
        ("gate", gate, (tokens, *delta.gate_shape)),
        ("beta", beta, (tokens, delta.value_heads)),
        ("A_log", A_log, (delta.value_heads,)),
        ("dt_bias", dt_bias, delta.gate_shape),
    )
    for name, tensor, shape in expected:
        if tensor is None and name == "dt_bias":
            continue
        if not isinstance(tensor, Tensor):
            raise BatchError(f"{name} is {kind_of(tensor)}: expected a tensor {list(shape)}")
        if tuple(tensor.shape) != shape:
            raise BatchError(
                f"{name} has shape {list(tensor.shape)}: expected {list(shape)} in a "
                f"{meta.forward_mode.value} step of {meta.batch_size} rows"
            )
        if tensor.dtype not in _FLOAT:
            raise BatchError(f"{name} is {tensor.dtype}: expected bfloat16, float16 or float32")
        if tensor.device != device:
            raise BatchError(f"{name} is on {tensor.device}, the state is on {device}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.stride(2) != 1 and tensor.shape[2] > 1 and tokens > 0:
            raise BatchError(
                f"{name} has strides {list(tensor.stride())}: its channels must be contiguous "
                "(stride 1); tokens and heads may be strided, as in a view of a packed projection"
            )
        if tensor.dtype is not v.dtype:
            raise BatchError(f"{name} is {tensor.dtype} and v {v.dtype}: expected one dtype")
    _check_key_dtype(k, delta, meta)
    _check_numbers(scale, lower_bound, normalize_qk, delta)


def _check_key_dtype(k: Tensor, delta: GatedDelta, meta: ShortConvMetadata) -> None:
    if meta.forward_mode is not ForwardMode.TARGET_VERIFY or delta.records == "snapshots":
        return
    if delta.key_dtype not in (torch.float32, k.dtype):
        raise BatchError(
            f"k is {k.dtype}, and records keep keys as {delta.key_dtype}, which does not hold them "
            "exactly: give GatedDelta key_dtype=torch.float32, or the dtype of the model"
        )


def _check_numbers(
    scale: object, lower_bound: object, normalize_qk: object, delta: GatedDelta
) -> None:
    for name, value in (("scale", scale), ("lower_bound", lower_bound)):
        if value is None and name == "lower_bound":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise BatchError(f"{name} is {kind_of(value)}: expected a number")
        if not math.isfinite(value):
            raise BatchError(f"{name}={value}: expected a finite number")
    if isinstance(lower_bound, (int, float)):
        if lower_bound >= 0:
            raise BatchError(f"lower_bound={lower_bound}: a log-decay is negative")
        if delta.gate == "scalar":
            raise BatchError("lower_bound is of safe gates, which are per channel (gate='channel')")
    if not isinstance(normalize_qk, bool):
        raise BatchError(f"normalize_qk={normalize_qk!r}: expected True or False")
