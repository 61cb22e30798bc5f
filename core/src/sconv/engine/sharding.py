"""Cutting and joining channels for tensor parallelism, part by part.

The channels of one tensor are often several projections side by side (q | k | v), each of which is
sharded on its own. Cutting the whole range into equal pieces gives a rank channels of the wrong
part without changing a single shape, so a tensor is cut along its declared parts, here and nowhere
else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import SpecError

__all__ = ["Part", "check_rank", "shard_streams"]


@dataclass(frozen=True, slots=True)
class Part:
    """One projection among the channels of an unsharded tensor.

    Attributes:
        channels: Its channels, over all ranks.
        groups: Its units that stay whole, such as heads; None = every channel is one.
    """

    channels: int
    groups: int | None = None

    def __post_init__(self) -> None:
        if self.channels < 1:
            raise SpecError(f"channels={self.channels}: a part has at least one")
        if self.groups is not None and (self.groups < 1 or self.channels % self.groups):
            raise SpecError(
                f"{self.channels} channels do not divide into {self.groups} groups of one size"
            )

    def local_channels(self, tp_size: int) -> int:
        """Channels of this part on each rank.

        Ranks divide the groups among them, or hold one single group each. Anything else would leave
        a group split or dropped.

        Raises:
            SpecError: Neither holds.
        """
        groups = self.channels if self.groups is None else self.groups
        if groups == 1:
            return self.channels
        if tp_size < 1 or groups % tp_size:
            raise SpecError(
                f"{groups} groups cannot be shared by tp_size={tp_size} ranks: tp_size must divide "
                "the groups, or the part must have one group, which every rank then holds"
            )
        return self.channels // tp_size


def check_rank(tp_rank: int, tp_size: int) -> None:
    """Raise :class:`SpecError` unless ``tp_rank`` is one of ``tp_size`` ranks."""
    for name, value in (("tp_rank", tp_rank), ("tp_size", tp_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise SpecError(f"{name}={value!r}: expected an int")
    if not 0 <= tp_rank < tp_size:
        raise SpecError(f"tp_rank={tp_rank} is outside 0..{tp_size - 1} (tp_size={tp_size})")


def shard_streams(
    full: Tensor, parts: Sequence[Part], *, tp_rank: int, tp_size: int, dim: int = 0
) -> Tensor:
    """Return one rank's channels of an unsharded tensor: its piece of every part, in order.

    Works on anything that has channels: a weight ``[D, 1, K]``, a bias ``[D]``, a window.

    Args:
        full: Any tensor with the channels of all parts on ``dim``.
        parts: What lies side by side there.
        tp_rank: The rank, 0 to ``tp_size - 1``.
        tp_size: Ranks.
        dim: The channel dimension.

    Returns:
        The rank's channels; it may share memory with ``full``.

    Raises:
        SpecError: The parts do not cover the dimension, cannot be shared, or there is no such rank.
    """
    check_rank(tp_rank, tp_size)
    _check_width(full, dim, [part.channels for part in parts])
    pieces = []
    start = 0
    for part in parts:
        local = part.local_channels(tp_size)
        replicated = local == part.channels
        pieces.append(full.narrow(dim, start + (0 if replicated else tp_rank * local), local))
        start += part.channels
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _check_width(tensor: Tensor, dim: int, channels: Sequence[int]) -> None:
    if not channels or tensor.shape[dim] != sum(channels):
        raise SpecError(
            f"the tensor has {tensor.shape[dim]} channels on dimension {dim}, the parts have "
            f"{' + '.join(map(str, channels)) or 'none'} = {sum(channels)}"
        )
