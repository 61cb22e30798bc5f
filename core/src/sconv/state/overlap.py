"""Whether tensors share memory, from addresses, sizes and strides alone.

An engine may cut its layers out of pages, so that their address ranges interleave and no byte is
shared. So the ranges are not compared but the addresses: two elements are one place where
``a + sum(i_k * s_k) = b + sum(j_k * t_k)``, with each index below its size. With the signs turned
that is a sum of bounded multiples of positive strides, and is searched from the largest stride
down. In memory that was laid out for a purpose each stride is about the extent of all smaller ones,
which leaves one or two candidates per stride.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd
from typing import Final, TypeAlias

from torch import Tensor

__all__ = ["first_overlap", "overlaps_itself"]

#: (stride, most): any multiple of the stride from 0 to ``most`` times.
_Term: TypeAlias = tuple[int, int]

#: Candidates to try before two tensors count as sharing memory.
_PATIENCE: Final = 100_000


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two different indexes of a tensor are one place."""
    if 0 in shape:
        return False
    terms = sorted(
        ((stride, size - 1) for size, stride in zip(shape, strides, strict=True) if size > 1),
        reverse=True,
    )
    if _nested(terms):
        return False
    for place, (stride, most) in enumerate(terms):
        # The first index that differs does so by 1 to most; those after it by -most to most.
        rest = terms[place + 1 :]
        target = sum(smaller * many for smaller, many in rest) - stride
        doubled = [(smaller, 2 * many) for smaller, many in rest]
        if _reaches(target, [(stride, most - 1), *doubled]):
            return True
    return False


def first_overlap(tensors: Iterable[Tensor]) -> tuple[int, int] | None:
    """Return the numbers of two tensors that share memory, or None.

    Tensors without memory of their own, such as meta tensors, share none.
    """
    ranges = []
    for number, tensor in enumerate(tensors):
        start = 0 if tensor.device.type == "meta" else tensor.data_ptr()
        if start and tensor.numel():
            ranges.append((start, start + _extent(tensor), number, tensor))
    ranges.sort(key=lambda item: item[:3])
    reached: list[tuple[int, int, int, Tensor]] = []
    for start, stop, number, tensor in ranges:
        reached = [other for other in reached if other[1] > start]
        for _, _, earlier, other in reached:
            if _share(other, tensor):
                first, second = sorted((earlier, number))
                return first, second
        reached.append((start, stop, number, tensor))
    return None


def _share(one: Tensor, other: Tensor) -> bool:
    # An index of the second counts down, so that all strides have one sign.
    target = other.data_ptr() + _extent(other) - one.data_ptr() - 1
    return _reaches(target, [*_terms(one), *_terms(other)])


def _terms(tensor: Tensor) -> list[_Term]:
    """Bytes: a tensor's strides, and those within an element."""
    size = tensor.element_size()
    terms = [
        (stride * size, count - 1)
        for count, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if count > 1
    ]
    return [*terms, (1, size - 1)]


def _extent(tensor: Tensor) -> int:
    """Bytes from the first to the last of a tensor."""
    return 1 + sum(stride * most for stride, most in _terms(tensor))


def _nested(terms: Sequence[_Term]) -> bool:
    """Whether each stride, the largest first, is more than all smaller ones can add up to."""
    return all(stride > 0 for stride, _ in terms) and all(
        stride > sum(smaller * most for smaller, most in terms[place + 1 :])
        for place, (stride, _) in enumerate(terms)
    )


def _reaches(target: int, terms: Iterable[_Term]) -> bool:
    """Whether multiples of the strides within their bounds add up to ``target``."""
    merged: dict[int, int] = {}
    for stride, most in terms:
        if stride > 0 and most > 0:
            merged[stride] = merged.get(stride, 0) + most
    strides = sorted(merged, reverse=True)
    spans = [0]
    divisors = [0]
    for stride in reversed(strides):
        spans.append(spans[-1] + stride * merged[stride])
        divisors.append(gcd(divisors[-1], stride))
    spans.reverse()
    divisors.reverse()
    waiting = [(0, target)]
    for _ in range(_PATIENCE):
        if not waiting:
            return False
        depth, left = waiting.pop()
        if left == 0:
            return True
        if left < 0 or left > spans[depth] or left % divisors[depth]:
            continue
        stride = strides[depth]
        low = max(0, -((spans[depth + 1] - left) // stride))
        high = min(merged[stride], left // stride)
        waiting.extend((depth + 1, left - stride * many) for many in range(low, high + 1))
    return True
