"""What a tensor lies in: plain memory that every operator and every kernel can read, or not.

A sparse or an opaque tensor has the shape, dtype and device of a plain one, and a subclass may
refuse any operator. Both would fail in the middle of a step, when a part of the state is written.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

__all__ = ["PLAIN_TYPES", "memory_fault"]

#: Types whose operators are torch's own; grows by subclasses that were seen to work.
PLAIN_TYPES: Final[set[type]] = {Tensor, nn.Parameter}

_FUNCTIONS: Final = getattr(Tensor.__torch_function__, "__func__", None)


def memory_fault(tensor: Tensor) -> str | None:
    """Return why no step could read a tensor, as a predicate, or None. Host facts; in graph.

    Its device is not looked at: a meta tensor has no fault but the device.
    """
    try:
        if not _is_plain_type(tensor) and (fault := _fault_of_subclass(tensor)):
            return fault
        if tensor.layout is not torch.strided:
            name = str(tensor.layout).removeprefix("torch.").lstrip("_")
            return f"has the layout {name}: expected plain memory, see Tensor.to_dense()"
        if tensor.is_nested:
            return "is nested: expected one tensor with the rows packed"
        if getattr(tensor, "is_quantized", False):
            return "is quantised: expected plain numbers, see Tensor.dequantize()"
    except Exception as exc:
        # Of a subclass any attribute may raise anything.
        return _refusing(tensor, exc)
    return None


def _is_plain_type(tensor: Tensor) -> bool:
    """Whether the type of a tensor leaves torch's operators as they are."""
    kind = type(tensor)
    if kind in PLAIN_TYPES:
        return True
    functions = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    if functions is not _FUNCTIONS or _dispatches(kind):
        return False
    PLAIN_TYPES.add(kind)
    return True


def _dispatches(kind: type[Tensor]) -> bool:
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def _fault_of_subclass(tensor: Tensor) -> str | None:
    """Try the tensor beside a plain one, as a step would read it."""
    try:
        plain = torch.zeros(1, dtype=torch.float32, device=tensor.device)
        torch.cat([tensor.detach().reshape(-1)[:1].to(torch.float32), plain])
    except Exception as exc:
        return _refusing(tensor, exc)
    if not _dispatches(type(tensor)):
        # An engine's own kind of parameter: once is enough, since a step is recorded later.
        PLAIN_TYPES.add(type(tensor))
    return None


def _refusing(tensor: Tensor, exc: Exception) -> str:
    return (
        f"is a {type(tensor).__name__}, which refuses torch's operators here "
        f"({type(exc).__name__}): expected a plain tensor"
    )
