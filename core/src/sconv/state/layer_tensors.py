"""The state tensors of all layers: allocated here, or adopted from an engine and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import SpecError
from ..messages import kind_of
from .overlap import first_overlap, overlaps_itself
from .spec import StateSpec
from .tensor_memory import memory_fault

__all__ = ["LayerTensors"]


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One window tensor per layer.

    Attributes:
        tensors: ``[rows, K-1, D]`` or ``[rows, D, K-1]`` per layer, by the spec's window axis.
        stacked: The same as one tensor ``[L, rows, ...]``, where they lie in one.
        nbytes: Physical bytes, columns of wider slots included.
    """

    tensors: tuple[Tensor, ...]
    stacked: Tensor | None
    nbytes: int

    @classmethod
    def allocate(cls, spec: StateSpec, device: torch.device) -> LayerTensors:
        """Allocate zeroed state: one stacked tensor where all layers have one width."""
        rows = spec.num_slots + 1
        if spec.uniform:
            shape = (spec.num_layers, rows, *spec.window_shape(0))
            stacked = torch.zeros(shape, dtype=spec.dtype, device=device)
            return cls(tuple(stacked.unbind(0)), stacked, _nbytes([stacked]))
        tensors = tuple(
            torch.zeros((rows, *spec.window_shape(layer)), dtype=spec.dtype, device=device)
            for layer in range(spec.num_layers)
        )
        return cls(tensors, None, _nbytes(tensors))

    @classmethod
    def adopt(
        cls,
        spec: StateSpec,
        layers: Tensor | Sequence[Tensor],
        *,
        device: torch.device | None = None,
    ) -> LayerTensors:
        """Check an engine's tensors; a slot wider than K-1 keeps its window at the end.

        Raises:
            SpecError: The message says which tensor differs, and in what.
        """
        if not isinstance(layers, Sequence) and not (
            isinstance(layers, Tensor) and (memory_fault(layers) or layers.dim())
        ):
            raise SpecError(f"adopt: layers is {layers!r}: expected one tensor, or one per layer")
        if isinstance(layers, Tensor) and (fault := memory_fault(layers)):
            raise SpecError(f"adopt: layers {fault}")
        stacked = layers if isinstance(layers, Tensor) else None
        tensors = list(layers.unbind(0)) if isinstance(layers, Tensor) else list(layers)
        if len(tensors) != spec.num_layers:
            raise SpecError(f"adopt: {len(tensors)} layers, the spec has {spec.num_layers}")
        if device is None and isinstance(tensors[0], Tensor):
            device = tensors[0].device
        axis = 1 if spec.window_axis == "time" else 2
        for number, tensor in enumerate(tensors):
            _check(spec, number, tensor, axis, device)
            if tensor.shape[0] != tensors[0].shape[0]:
                raise SpecError(
                    f"adopt: layer {number} has {tensor.shape[0]} rows, layer 0 has "
                    f"{tensors[0].shape[0]}: a slot is one row of every layer"
                )
        windows = tuple(_end(tensor, axis, spec.window_size) for tensor in tensors)
        for number, window in enumerate(windows):
            if overlaps_itself(window.shape, window.stride()):
                raise SpecError(
                    f"adopt: layer {number} has shape {list(window.shape)} and strides "
                    f"{list(window.stride())}, so that slots share memory: a step of one would "
                    "change another"
                )
        if shared := first_overlap(windows):
            raise SpecError(
                f"adopt: layers {shared[0]} and {shared[1]} share memory: a step of one layer "
                "would change the other"
            )
        if stacked is not None:
            stacked = _end(stacked, axis + 1, spec.window_size)
        return cls(windows, stacked, _nbytes(tensors))


def _check(spec: StateSpec, number: int, tensor: Tensor, axis: int, device: torch.device) -> None:
    where = f"adopt: layer {number}"
    if not isinstance(tensor, Tensor):
        raise SpecError(f"{where} is {kind_of(tensor)}: expected a tensor")
    if fault := memory_fault(tensor):
        raise SpecError(f"{where} {fault}")
    if tensor.requires_grad:
        raise SpecError(f"{where} requires grad: the state changes in place, so detach it")
    if tensor.dtype != spec.dtype:
        raise SpecError(f"{where} is {tensor.dtype}, the spec says {spec.dtype}")
    if tensor.device != device:
        raise SpecError(f"{where} is on {tensor.device}, the others on {device}")
    if tensor.dim() != 3:
        raise SpecError(
            f"{where} has shape {list(tensor.shape)}: expected [rows, ...] in 3 dimensions"
        )
    dim = tensor.shape[3 - axis]
    if dim != spec.layer_dim(number) or tensor.shape[axis] < spec.window_size:
        order = "[rows, K-1, D]" if axis == 1 else "[rows, D, K-1]"
        raise SpecError(
            f"{where} has shape {list(tensor.shape)}: expected {order} with "
            f"D={spec.layer_dim(number)} and a window of at least K-1={spec.window_size} "
            f"(window_axis={spec.window_axis!r} is declared, never guessed from sizes)"
        )
    if tensor.shape[0] < 2:
        raise SpecError(f"{where} has {tensor.shape[0]} rows: expected the dummy row 0 and a slot")
    if tensor.stride(2) != 1:
        raise SpecError(f"{where} has strides {list(tensor.stride())}: the last one must be 1")


def _end(tensor: Tensor, axis: int, size: int) -> Tensor:
    return tensor.narrow(axis, tensor.shape[axis] - size, size)


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
