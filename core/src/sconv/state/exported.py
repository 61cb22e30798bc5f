"""State on its way out of a pool: windows, and what they are windows of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["ExportedState"]


@dataclass(frozen=True, slots=True, eq=False)
class ExportedState:
    """What :meth:`sconv.ConvStatePool.export` returns and ``restore`` takes; iterable by layer.

    Shapes alone do not tell a ``[K-1, D]`` window from a ``[D, K-1]`` one where K-1 = D, nor the
    streams k and v of one width. So a state carries what it is. It can be pickled; to send the
    tensors by another way, send ``fingerprint`` too and build the state again from both.

    Attributes:
        fingerprint: :attr:`sconv.StateSpec.fingerprint` of the pool that it came from.
        layers: ``[n, K-1, D]`` or ``[n, D, K-1]`` per layer, n slots.
        recurrent: ``[n, HV, dv, dk]`` per layer where the spec has a recurrent state, whatever was
            pending folded in; else empty.
    """

    fingerprint: str
    layers: Sequence[Tensor]
    recurrent: Sequence[Tensor] = ()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer_id: int) -> Tensor:
        return self.layers[layer_id]
