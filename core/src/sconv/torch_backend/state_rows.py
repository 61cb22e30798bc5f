"""One stream's state, read and written by row, whatever axis its windows lie along."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["StateRows"]

#: Elements up to which one copy of elements is faster than two of words.
_FEW: Final = 1 << 14

#: What elements travel as, widest first: 16 and 8 bytes.
_WORDS: Final = (torch.complex128, torch.int64)


class StateRows:
    """Gathers and scatters windows of one stream of one layer; pure moves, in graph.

    Callers see time-major windows, ``[B, K-1, D]`` with the oldest input first.

    Moving elements one at a time is what torch's scatter does on a CPU. There, where the layout
    allows it, they travel as words of 16 or 8 bytes: 2 to 4 times as fast for 256 rows of 3 x 6144.
    """

    __slots__ = ("_flat", "_newest", "_older", "_state", "_time_major", "_word", "_words")

    def __init__(self, state: Tensor, *, time_major: bool) -> None:
        """Wrap ``[S, K-1, D]`` or ``[S, D, K-1]``; views are made here, once."""
        self._state = state
        self._time_major = time_major
        #: A channel-major window is one run of memory; only as such can words span its columns.
        self._flat = not time_major and state[0].is_contiguous()
        self._older = self._newest = self._words = None
        target = state.flatten(1) if self._flat else state
        self._word = next((word for word in _WORDS if _fits(target, word)), None)
        if self._word is None or state.device.type != "cpu":
            return
        # A view as another dtype that is made under inference mode cannot be written outside of it.
        with torch.inference_mode(False):
            self._words = target.view(self._word)
            if time_major:
                self._older, self._newest = self._words[:, :-1], self._words[:, -1]

    @property
    def dim(self) -> int:
        """Channels of the stream."""
        return self._state.shape[2 if self._time_major else 1]

    def read(self, rows: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return a copy of the windows of ``rows`` (``[B]`` int64), in ``out`` if it is given."""
        if self._time_major:
            if out is None:
                return self._state.index_select(0, rows)
            return torch.index_select(self._state, 0, rows, out=out)
        windows = self._state.index_select(0, rows).transpose(1, 2)
        return windows if out is None else out.copy_(windows)

    def window(self, row: int) -> Tensor:
        """Return a view of one window, ``[K-1, D]``; writing to it writes the state."""
        window = self._state.select(0, row)
        return window if self._time_major else window.t()

    def write(self, rows: Tensor, windows: Tensor) -> None:
        """Write windows ``[B, K-1, D]`` in the state's dtype.

        Rows that are named twice hold equal values, or, on a host, are the dummy row 0.
        """
        values = windows if self._time_major else windows.transpose(1, 2)
        if self._flat:
            values = values.flatten(1)
        if self._words is None:
            target = self._state.flatten(1) if self._flat else self._state
            target.index_copy_(0, rows, values)
            return
        self._words.index_copy_(0, rows, self._as_words(values))

    def append(self, rows: Tensor, old: Tensor, x: Tensor) -> None:
        """Move windows on by one token: drop the oldest of ``old``, append ``x`` (``[B, D]``)."""
        x = x.to(old.dtype)
        if self._older is None or self._newest is None:
            self.write(rows, torch.cat([old[:, 1:], x[:, None]], dim=1))
            return
        if old.numel() <= _FEW:
            self._state.index_copy_(0, rows, torch.cat([old[:, 1:], x[:, None]], dim=1))
            return
        if old.shape[1] > 1:
            self._older.index_copy_(0, rows, self._as_words(old[:, 1:]))
        self._newest.index_copy_(0, rows, self._as_words(x))

    def _as_words(self, values: Tensor) -> Tensor:
        """View what has the state's width as the state's words, a copy if its strides forbid it."""
        assert self._word is not None
        if not _fits(values, self._word):
            # contiguous() would keep what it calls so, such as one row with a stride of its own.
            values = values.clone(memory_format=torch.contiguous_format)
        return values.view(self._word)


def _fits(tensor: Tensor, word: torch.dtype) -> bool:
    """Whether a tensor can be viewed as words along its last axis."""
    per_word = word.itemsize // tensor.element_size()
    *strides, last = tensor.stride()
    return (
        last == 1
        and tensor.shape[-1] % per_word == 0
        and tensor.storage_offset() % per_word == 0
        and not any(stride % per_word for stride in strides)
    )
