"""The tokens that a rollback may still take back, per convolution.

A verify step keeps what its own commit needs inside the backend. transformers asks for more: a
draft model runs several forwards and then takes back more tokens than the last one had. So the
inputs since the last commit are kept here, at most ``max_rollback`` of them, and every forward
verifies all of them again from the committed window: a convolution of K taps, so the cost is that
of a few more tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .conv_modules import ConvModule

__all__ = ["History"]


class History:
    """Inputs behind the committed window. Tensors are never written, so copies may share them.

    Attributes:
        length: Tokens of every row, the same for all convolutions.
    """

    __slots__ = ("_inputs", "length")

    def __init__(self) -> None:
        self.length = 0
        self._inputs: dict[tuple[int, str], Tensor] = {}

    def chain(self, conv: ConvModule, x: Tensor) -> Tensor:
        """Return the kept inputs, then ``x`` (``[B, T, D]``), as ``[B, h + T, D]``."""
        kept = self.get(conv)
        return x if kept is None else torch.cat([kept.to(x.dtype), x], dim=1)

    def keep(self, conv: ConvModule, chain: Tensor, dropped: int) -> None:
        """Keep a chain but for its first ``dropped`` tokens, which are certain now."""
        # A slice would hold on to the whole prompt.
        kept = chain[:, dropped:].clone() if dropped else chain
        self._inputs[conv.layer_id, conv.stream] = kept

    def get(self, conv: ConvModule) -> Tensor | None:
        """Return the inputs of one convolution, ``[B, h, D]``."""
        return self._inputs.get((conv.layer_id, conv.stream))

    def items(self) -> Iterator[tuple[tuple[int, str], Tensor]]:
        """Iterate over ``(layer_id, stream)`` and its inputs ``[B, h, D]``."""
        return iter(self._inputs.items())

    def clear(self) -> None:
        """Forget everything."""
        self.length = 0
        self._inputs = {}

    def copy(self) -> History:
        """Return a history of its own with the same inputs."""
        other = History()
        other.length = self.length
        other._inputs = dict(self._inputs)
        return other

    def select_rows(self, rows: Tensor) -> None:
        """Make row i what row ``rows[i]`` was; ``rows`` is ``[B']`` int64."""
        self._inputs = {
            key: value.index_select(0, rows.to(value.device)) for key, value in self._inputs.items()
        }
