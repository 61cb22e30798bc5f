"""Writes of different values to one place: an NPU does not order them, so neither may win."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import WriteRace

__all__ = ["refuse_race"]


def refuse_race(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Compare what an indexed write is about to write where indices repeat.

    ``aclnnIndexCopy`` does not order writes of one index, and ``aclnnIndexPutImpl`` is not
    deterministic by default (their operator documents). Equal values are no race: whichever comes
    last, the memory holds the same.

    Args:
        name: The operator's.
        args: Its positional arguments, on the host.
        kwargs: Its other arguments.

    Raises:
        WriteRace: Two values differ.
    """
    match name:
        case "aten::index_copy_" | "aten::index_copy":
            target, dim, index, source = args[:4]
            if index.numel() < 2 or index.unique().numel() == index.numel():
                return
            places = _places(target).index_select(dim, index) if target.dim() else None
        case "aten::index_put_" | "aten::_index_put_impl_" | "aten::index_put":
            target, index, source = args[:3]
            if args[3] if len(args) > 3 else kwargs.get("accumulate", False):
                return
            places = _places(target)[tuple(slice(None) if i is None else i for i in index)]
        case "aten::scatter_" | "aten::scatter":
            target, dim, index, source = args[:4]
            if not isinstance(source, Tensor) or len(args) > 4 or "reduce" in kwargs:
                return
            places = _places(target).gather(dim, index)
            source = source[tuple(slice(size) for size in index.size())]
        case _:
            return
    if places is not None and places.numel():
        _compare(name, target, places, source.to(target.dtype).expand_as(places))


def _places(target: Tensor) -> Tensor:
    return torch.arange(target.numel(), device="cpu").view(target.size())


def _compare(name: str, target: Tensor, places: Tensor, values: Tensor) -> None:
    order = places.flatten().argsort(stable=True)
    places, values = places.flatten()[order], _bits(values.flatten()[order])
    races = (places[1:] == places[:-1]) & (values[1:] != values[:-1])
    if races.any():
        place = int(places[1:][races][0])
        where = _unravel(place, target.size())
        raise WriteRace(
            f"{name} writes different values to element {where} of a tensor of"
            f" {list(target.size())}: an index occurs more than once, and an NPU does not order"
            " such writes"
        )


def _unravel(place: int, size: Sequence[int]) -> list[int]:
    found = []
    for extent in reversed(size):
        place, index = divmod(place, extent)
        found.append(index)
    return found[::-1]


def _bits(values: Tensor) -> Tensor:
    """So that equal NaNs are equal."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    dtype = width.get(values.element_size())
    return values if dtype is None else values.contiguous().view(dtype)
