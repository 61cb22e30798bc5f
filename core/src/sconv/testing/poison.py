"""New memory is NaN: what a backend forgets to write shows, instead of an old value that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["PoisonedMemory", "poison_"]

_ALLOCATIONS: Final = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)


def poison_(tensor: Tensor) -> Tensor:
    """Fill with NaN, or with a number that no index or count would be; True for bool."""
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    if tensor.dtype is torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(torch.iinfo(tensor.dtype).max - 7)


class PoisonedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, every uninitialised tensor that torch hands out is poisoned.

    A freshly mapped page is zero and a recycled one often holds the right answer of the call
    before, so a row that nobody writes passes most comparisons without this.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            poison_(out)
        return out
