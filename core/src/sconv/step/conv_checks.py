"""The check of one convolution. It runs in every layer of every step, so the valid path is fast.

Host facts only: shapes, dtypes, devices, and whether the step was prepared for this batch.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ..errors import BatchError, MetadataError
from ..messages import kind_of
from ..state.spec import StateSpec
from ..state.tensor_memory import PLAIN_TYPES, memory_fault
from .batch import ForwardBatch, check_is_batch
from .metadata import ShortConvMetadata
from .value_checks import values_are_checked

__all__ = ["check_conv", "check_same_rows", "is_prepared", "unprepared"]

_STRIDED: Final = torch.strided
_FLOAT: Final = frozenset((torch.bfloat16, torch.float16, torch.float32))
_ACTIVATIONS: Final = (None, "silu", "swish")


def check_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: bool,
    layer_id: int,
    stream: str,
    batch: ForwardBatch,
    meta: ShortConvMetadata,
    spec: StateSpec,
    device: torch.device,
) -> None:
    """Check one convolution. Host facts only; in graph. Positional arguments: 10 % faster.

    Raises:
        BatchError: An argument is of the wrong type, shape, dtype or device, or has wrong strides.
        SpecError: The layer or the stream does not exist.
        MetadataError: The prepared step is not this batch's.
    """
    kernel_size, tokens = spec.kernel_size, meta.num_tokens
    try:
        # Of other integer types, True among them, some would be found as well.
        dim = spec.stream_dims[layer_id, stream] if type(layer_id) is int else 0
    except (KeyError, TypeError):
        dim = 0
    dim = dim or spec.stream_slice(layer_id, stream).dim
    try:
        # One expression for the valid path; the failing condition is looked for afterwards.
        if (
            (type(x) is Tensor or type(x) in PLAIN_TYPES)
            and type(weight) in PLAIN_TYPES
            and (meta.batch is batch or is_prepared(meta, batch, device))
            and x.shape == (tokens, dim)
            and x.layout is _STRIDED
            and (x.is_contiguous() or x.stride(1) == 1 or dim == 1)
            and weight.layout is _STRIDED
            and (weight.shape == (dim, kernel_size) or weight.shape == (dim, 1, kernel_size))
            and (
                bias is None
                or (type(bias) in PLAIN_TYPES and bias.shape == (dim,) and bias.layout is _STRIDED)
            )
            and activation in _ACTIVATIONS
            and (residual is True or residual is False)
            and x.dtype in _FLOAT
            and weight.dtype in _FLOAT
            and (bias is None or bias.dtype in _FLOAT)
            and x.device == device
            and weight.device == device
            and (bias is None or bias.device == device)
        ):
            return
    except Exception:
        # Something that is not a tensor, or not a batch, lacks these attributes or refuses them.
        _refuse_types(x, weight, bias, batch)
        raise
    _refuse_types(x, weight, bias, batch)
    if not (meta.batch is batch or is_prepared(meta, batch, device)):
        raise unprepared(meta, batch)
    if x.shape != (tokens, dim):
        raise BatchError(
            f"x has shape {list(x.shape)}: expected packed [T, D] = [{tokens}, {dim}] for stream "
            f"{stream!r} of layer {layer_id} in a {meta.forward_mode.value} step of "
            f"{meta.batch_size} rows"
        )
    if x.stride(1) != 1 and dim > 1 and tokens > 0:
        raise BatchError(
            f"x has strides {list(x.stride())}: its channels must be contiguous (stride 1); rows "
            "may be strided, for example a slice of a wider projection"
        )
    if weight.shape not in ((dim, kernel_size), (dim, 1, kernel_size)):
        raise BatchError(
            f"weight has shape {list(weight.shape)}: expected [D, K] or [D, 1, K] with D={dim}, "
            f"K={kernel_size}"
        )
    if bias is not None and bias.shape != (dim,):
        raise BatchError(f"bias has shape {list(bias.shape)}: expected [{dim}]")
    if activation not in _ACTIVATIONS:
        raise BatchError(f"activation={activation!r}: expected None, 'silu' or 'swish'")
    if not isinstance(residual, bool):
        raise BatchError(f"residual={residual!r}: expected True or False")
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype not in _FLOAT:
            raise BatchError(f"{name} is {tensor.dtype}: expected bfloat16, float16 or float32")
        if tensor.device != device:
            raise BatchError(f"{name} is on {tensor.device}, the state is on {device}")


def is_prepared(meta: ShortConvMetadata, batch: ForwardBatch, device: torch.device) -> bool:
    """Whether a step was prepared for a batch that is another object than the one given then.

    An engine may describe a step anew, for every replay or even for every layer. So mode and number
    of rows are compared, and on the CPU also which rows they are, by value. Elsewhere this runs
    inside captures, where nothing can be read; checked mode compares the memory there.
    """
    if meta.forward_mode is not batch.forward_mode or meta.batch_size != batch.batch_size:
        return False
    if meta.batch is None or not values_are_checked(device):
        return True
    return meta.batch.is_same_step(batch, values=True)


def check_same_rows(meta: ShortConvMetadata, batch: ForwardBatch) -> None:
    """Check that a batch of the prepared step's mode and size has its rows, by memory alone.

    Raises:
        MetadataError: It has others.
    """
    if meta.batch is None or meta.batch is batch:
        return
    if meta.forward_mode is not batch.forward_mode or meta.batch_size != batch.batch_size:
        return
    if not meta.batch.is_same_step(batch, values=False):
        raise unprepared(meta, batch)


def unprepared(meta: ShortConvMetadata, batch: ForwardBatch) -> MetadataError:
    """Say how a prepared step and a batch differ."""
    step = f"{meta.forward_mode.value} with {meta.batch_size} rows"
    if meta.forward_mode is batch.forward_mode and meta.batch_size == batch.batch_size:
        return MetadataError(
            f"the prepared step and this batch are {step} each, and differ in their rows or "
            "lengths: prepare this batch first, or give the one that was prepared"
        )
    return MetadataError(
        f"the prepared step is {step}, this batch is {batch.forward_mode.value} with "
        f"{batch.batch_size}: prepare it first"
    )


def _refuse_types(x: object, weight: object, bias: object, batch: object) -> None:
    check_is_batch(batch)
    for name, value, shape in (("x", x, "[T, D]"), ("weight", weight, "[D, K]")):
        if not isinstance(value, Tensor):
            raise BatchError(f"{name} is {kind_of(value)}: expected a tensor {shape}")
    if bias is not None and not isinstance(bias, Tensor):
        raise BatchError(f"bias is {kind_of(bias)}: expected a tensor [D], or None")
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if isinstance(tensor, Tensor) and (fault := memory_fault(tensor)):
            raise BatchError(f"{name} {fault}")
