"""Argument checks, the same for every backend: shapes, dtypes, devices, and what goes with what.

These are host facts and are always checked; values are :mod:`sconv.value_checks`'s.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from .batch import ForwardBatch, ForwardMode
from .errors import BatchError, GraphBufferError, MetadataError
from .metadata import ShortConvMetadata
from .pool import ConvStatePool
from .spec import StateSpec
from .value_checks import check_values, checks_values

__all__ = ["check_batch", "check_commit", "check_conv"]

_INDEX: Final = (torch.int32, torch.int64)
_FLOAT: Final = (torch.bfloat16, torch.float16, torch.float32)
_ACTIVATIONS: Final = (None, "silu", "swish")


def check_batch(batch: ForwardBatch, spec: StateSpec, pool: ConvStatePool, max_rows: int) -> None:
    """Check a step against a backend. Out of graph.

    Raises:
        BatchError: The message says what is wrong, what was expected and what to do.
        GraphBufferError: An engine's verify windows have fewer rows than the batch.
    """
    rows = batch.batch_size
    if rows > max_rows:
        raise BatchError(
            f"the batch has {rows} rows, this backend takes {max_rows}: raise max_requests of the "
            "StateSpec, or max_bs of init_graph_state for padded batches"
        )
    if batch.num_tokens is not None and (
        isinstance(batch.num_tokens, bool) or not isinstance(batch.num_tokens, int)
    ):
        raise BatchError(f"num_tokens={batch.num_tokens!r}: expected an int")
    device = pool.device
    for name in (
        "req_pool_indices",
        "slots",
        "seq_lens",
        "extend_seq_lens",
        "extend_prefix_lens",
        "num_accept_tokens",
        "mamba_track_indices",
        "mamba_track_seqlens",
    ):
        _check_vector(name, getattr(batch, name), (rows,), _INDEX, device)
    _check_vector("mamba_track_mask", batch.mamba_track_mask, (rows,), (torch.bool,), device)
    if batch.mamba_track_indices is None and (
        batch.mamba_track_mask is not None or batch.mamba_track_seqlens is not None
    ):
        raise BatchError("mamba_track_indices is missing: the mask and the lengths need the slots")
    per_row = batch.tokens_per_row or 0
    for name in ("parents", "next_token", "next_sibling"):
        _check_vector(name, getattr(batch, name), (rows, per_row), _INDEX, device)
    if batch.forward_mode is ForwardMode.TARGET_VERIFY:
        _check_verify(batch, per_row, spec, pool)
    if checks_values(device):
        check_values(batch, spec, pool)


def check_commit(
    rows: int,
    pool: ConvStatePool,
    verify_tokens: int,
    verify_rows: int,
    *,
    last_correct_step_indices: Tensor,
    mamba_track_indices: Tensor | None,
    mamba_steps_to_track: Tensor | None,
    req_pool_indices: Tensor,
) -> None:
    """Check a commit against the last verify step. Host facts only; in or out of graph.

    Raises:
        BatchError: An argument has the wrong shape, dtype or device.
        MetadataError: No verify step was prepared.
    """
    if verify_tokens == 0:
        raise MetadataError("nothing to commit: no verify step was prepared on this backend")
    for name, value in (
        ("last_correct_step_indices", last_correct_step_indices),
        ("mamba_track_indices", mamba_track_indices),
        ("mamba_steps_to_track", mamba_steps_to_track),
        ("req_pool_indices", req_pool_indices),
    ):
        _check_vector(name, value, (rows,), _INDEX, pool.device)
    if (mamba_track_indices is None) != (mamba_steps_to_track is None):
        raise BatchError(
            "mamba_track_indices and mamba_steps_to_track come together, or neither does"
        )
    if rows > verify_rows:
        raise BatchError(
            f"the commit has {rows} rows, the last verify step had {verify_rows}: give the rows of "
            "that step, in its order"
        )


def check_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *,
    layer_id: int,
    stream: str,
    spec: StateSpec,
    device: torch.device,
    meta: ShortConvMetadata,
    batch: ForwardBatch,
) -> None:
    """Check one convolution. Host facts only; in graph.

    Raises:
        BatchError: An argument has the wrong shape, dtype, device or strides.
        SpecError: The layer or the stream does not exist.
        MetadataError: The prepared step is not this batch's.
    """
    part = spec.stream_slice(layer_id, stream)
    dim, kernel_size = part.dim, spec.kernel_size
    if meta.forward_mode is not batch.forward_mode or meta.batch_size != batch.batch_size:
        raise MetadataError(
            f"the prepared step is {meta.forward_mode.value} with {meta.batch_size} rows, this "
            f"batch is {batch.forward_mode.value} with {batch.batch_size}: prepare it first"
        )
    if x.shape != (meta.num_tokens, dim):
        raise BatchError(
            f"x has shape {list(x.shape)}: expected packed [T, D] = [{meta.num_tokens}, {dim}] for "
            f"stream {stream!r} of layer {layer_id} in a {meta.forward_mode.value} step of "
            f"{meta.batch_size} rows"
        )
    if x.stride(1) != 1 and dim > 1 and meta.num_tokens > 0:
        raise BatchError(
            f"x has strides {list(x.stride())}: its channels must be contiguous (stride 1); rows "
            "may be strided, for example a slice of a wider projection"
        )
    if weight.shape != (dim, kernel_size) and weight.shape != (dim, 1, kernel_size):
        raise BatchError(
            f"weight has shape {list(weight.shape)}: expected [D, K] or [D, 1, K] with D={dim}, "
            f"K={kernel_size}"
        )
    if bias is not None and bias.shape != (dim,):
        raise BatchError(f"bias has shape {list(bias.shape)}: expected [{dim}]")
    if activation not in _ACTIVATIONS:
        raise BatchError(f"activation={activation!r}: expected None, 'silu' or 'swish'")
    _check_tensor("x", x, device)
    _check_tensor("weight", weight, device)
    if bias is not None:
        _check_tensor("bias", bias, device)


def _check_tensor(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.dtype not in _FLOAT:
        raise BatchError(f"{name} is {tensor.dtype}: expected bfloat16, float16 or float32")
    if tensor.device != device:
        raise BatchError(f"{name} is on {tensor.device}, the state is on {device}")


def _check_vector(
    name: str,
    value: Tensor | None,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    if value is None:
        return
    if not isinstance(value, Tensor):
        raise BatchError(f"{name} is a {type(value).__name__}: expected a tensor on {device}")
    if tuple(value.shape) != shape:
        raise BatchError(f"{name} has shape {list(value.shape)}: expected {list(shape)}")
    if value.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise BatchError(f"{name} is {value.dtype}: expected {expected}")
    if value.device != device:
        raise BatchError(f"{name} is on {value.device}, the state is on {device}")


def _check_verify(batch: ForwardBatch, per_row: int, spec: StateSpec, pool: ConvStatePool) -> None:
    rows = batch.batch_size
    if spec.max_draft_tokens == 1:
        raise BatchError(
            "target_verify needs verify windows, and max_draft_tokens=1 means no speculation: "
            "raise it in the StateSpec"
        )
    if per_row > spec.max_draft_tokens:
        raise BatchError(
            f"draft_token_num={per_row}, but the backend keeps windows for "
            f"max_draft_tokens={spec.max_draft_tokens}: raise it in the StateSpec"
        )
    if batch.is_tree and not pool.windows.takes_trees:
        raise BatchError(
            f"the batch has a tree, and verify windows in the layout {pool.window_layout!r} hold "
            "chains alone: give no parents or links, or build the backend with draft_topk=2 or more"
        )
    if rows > pool.windows.rows:
        raise GraphBufferError(
            "the verify windows are too few", have={"rows": pool.windows.rows}, need={"rows": rows}
        )
