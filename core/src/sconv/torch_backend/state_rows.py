"""One stream's state, read, advanced and written by row, whatever the axis of its windows."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ..state.indexing import select_nodes
from ..step.metadata import ShortConvMetadata

__all__ = ["StateRows", "gather_windows"]

#: Elements up to which one copy of elements is faster than two of words.
_FEW: Final = 1 << 14

#: What elements travel as, widest first: 16 and 8 bytes.
_WORDS: Final = (torch.complex128, torch.int64)


class StateRows:
    """Gathers, advances and scatters windows of one stream of one layer; pure moves, in graph.

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

    def append(self, x: Tensor, old: Tensor, fresh: Tensor, meta: ShortConvMetadata) -> None:
        """Advance windows by one token per row, and take the snapshots that are due.

        Args:
            x: ``[B, D]`` tokens.
            old: ``[B, K-1, D]``, what the rows hold.
            fresh: The same, zero where a row starts afresh.
            meta: The step.
        """
        if not meta.tracks and not meta.padded:
            self._shift(meta.safe_idx, fresh, x.to(old.dtype))
            return
        new = torch.cat([fresh[:, 1:], x.to(old.dtype)[:, None]], dim=1)
        if meta.tracks:
            self._snapshot(meta, new)
        self.write(meta.safe_idx, torch.where(meta.writes[:, None, None], new, old))

    def advance(
        self, x: Tensor, source: Tensor, old: Tensor, fresh: Tensor, meta: ShortConvMetadata
    ) -> None:
        """Write the rows' windows after a step of any lengths, and take the snapshots that are due.

        Args:
            x: ``[T, D]`` packed tokens.
            source: ``[B, K-1]`` int64, where the window after the step comes from, as for
                :func:`gather_windows`.
            old: ``[B, K-1, D]``, what the rows hold.
            fresh: The same, zero where a row starts afresh.
            meta: The step.
        """
        if meta.tracks:
            self._snapshot(meta, gather_windows(meta.track_conv_indices, fresh, x))
        new = gather_windows(source, fresh, x)
        self.write(meta.safe_idx, torch.where(meta.writes[:, None, None], new, old))

    def _snapshot(self, meta: ShortConvMetadata, windows: Tensor) -> None:
        target = meta.track_cache_indices.clamp(min=0)
        # Several snapshots could be due in the dummy, whose content is undefined.
        due = (meta.track_cache_indices > 0)[:, None, None]
        self.write(target, torch.where(due, windows, self.read(target)))

    def _shift(self, rows: Tensor, old: Tensor, x: Tensor) -> None:
        """Drop the oldest token of ``old`` and append ``x``, ``[B, D]`` in the same dtype."""
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


def gather_windows(source: Tensor, old: Tensor, x: Tensor) -> Tensor:
    """Assemble windows from packed tokens and old windows; a pure selection. In graph.

    Args:
        source: ``[B, K-1]`` int64: a packed token, or -1 to -(K-1) for the newest to the oldest
            column of the row's old window.
        old: ``[B, K-1, D]`` old windows, zero where a row starts afresh.
        x: ``[T, D]`` packed tokens, T >= 1.

    Returns:
        ``[B, K-1, D]`` in old's dtype.
    """
    window = old.shape[1]
    tokens = x.index_select(0, source.clamp(min=0).view(-1)).view(old.shape).to(old.dtype)
    columns = (source + window).clamp(0, window - 1)
    return torch.where((source >= 0)[:, :, None], tokens, select_nodes(old, columns))


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
