"""Operators of vendors, with a reference in place of their kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from .errors import SimulationError
from .kernels import Kernel
from .state import settings

__all__ = ["custom_op"]

#: A registration lasts as long as its library.
_libraries: Final[list[Any]] = []


def custom_op(schema: str, reference: Callable[..., Any]) -> Any:
    """Define an operator of a vendor for this process, so that code which calls it runs here.

    What is checked is the call: its arguments, where they lie, what is written, and that it can be
    captured. The vendor's kernel is not.

    Args:
        schema: Such as ``npu::causal_conv1d(Tensor(a!) state, Tensor x) -> Tensor``; what is
            written has to be marked so.
        reference: The operator in plain torch, of the same parameters. It is given tensors of the
            host, and in a capture tensors of the device ``meta``, which have no values.

    Returns:
        ``torch.ops.npu.causal_conv1d``.

    Raises:
        SimulationError: The device is not installed, or the operator exists.
    """
    if not settings.devices:
        raise SimulationError("simulated_npu.install() comes first")
    namespace, _, rest = schema.partition("::")
    name, _, overload = rest.partition("(")[0].strip().partition(".")
    if not (namespace and name):
        raise SimulationError(f"a schema begins with NAMESPACE::NAME(, and this is {schema!r}")
    try:
        library: Any = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
        library.define(rest)
    except RuntimeError as exc:
        raise SimulationError(f"{namespace}::{name} cannot be defined: {exc}") from exc
    operator = getattr(getattr(torch.ops, namespace), name)
    kernel = Kernel(getattr(operator, overload or "default"))
    for key, function in (("CPU", reference), ("Meta", reference), ("PrivateUse1", kernel)):
        library.impl(f"{name}.{overload}" if overload else name, function, key)
    _libraries.append(library)
    return operator
