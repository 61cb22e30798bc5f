"""The oracle: every mode in float64 and plain loops, written to be read and believed.

It is slow on purpose and shares no code with any backend. A sequence of inputs is a list, a window
is its last K-1 entries, a tap is an entry counted from its end; there is no index arithmetic to get
wrong. All functions take one stream, as one state tensor ``[S, K-1, D]`` on the time axis
(:func:`time_axis` turns a channel-axis tensor into that), read the tensors that they are given,
change none of them, and compute and answer on the CPU. Sequences of ints may be tensors.

Snapshots are named by a count of tokens here: ``windows[n]`` is the window after ``n`` tokens of
the row and ``windows[0]`` the old one. Only :func:`commit` takes node indexes, as its hook does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import BatchError
from ..step.batch import ForwardMode

__all__ = [
    "commit",
    "crossing_tokens",
    "decode",
    "draft_extend",
    "extend",
    "metadata",
    "row_conv",
    "time_axis",
    "verify",
]

Ints: TypeAlias = Sequence[int] | Tensor
Bools: TypeAlias = Sequence[bool] | Tensor

_ACTIVATIONS = (None, "silu", "swish")


def row_conv(
    x: Tensor,
    window: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: bool = True,
    parents: Ints | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve one row: ``y[t] = act(bias + sum_j tap_j * weight[:, j]) (+ x[t])``.

    Args:
        x: ``[n, D]`` inputs.
        window: ``[K-1, D]`` inputs before them, oldest first.
        weight: ``[D, K]`` or ``[D, 1, K]``; the last column multiplies the current input.
        bias: ``[D]`` or None.
        activation: None, ``"silu"`` or ``"swish"``; applied before the residual.
        residual: Add ``x``.
        parents: ``[n]``, the node before each node; outside of ``0..n-1`` = the window. None =
            chain.

    Returns:
        ``y`` ``[n, D]`` and the window after each node ``[n, K-1, D]``, both float64.

    Raises:
        BatchError: An activation that does not exist, or a shape that does not fit.
    """
    if activation not in _ACTIVATIONS:
        raise BatchError(f"activation={activation!r}: expected one of {_ACTIVATIONS}")
    x, window, weight = _exact(x), _exact(window), _exact(weight)
    count, dim = x.shape
    kernel_size = weight.shape[-1]
    if weight.shape not in ((dim, kernel_size), (dim, 1, kernel_size)):
        raise BatchError(f"weight is {tuple(weight.shape)}, expected [D, K] or [D, 1, K], D={dim}")
    if window.shape != (kernel_size - 1, dim):
        raise BatchError(f"window is {tuple(window.shape)}, expected {(kernel_size - 1, dim)}")
    weight = weight.reshape(dim, kernel_size)
    before = _chain(count) if parents is None else _ints(parents)

    y = torch.zeros(count, dim, dtype=torch.float64, device="cpu")
    windows = torch.zeros(count, kernel_size - 1, dim, dtype=torch.float64, device="cpu")
    for t in range(count):
        history = [*window, *(x[node] for node in _path(t, before, kernel_size))]
        taps = history[-kernel_size:]
        total = (
            torch.zeros(dim, dtype=torch.float64, device="cpu")
            if bias is None
            else _exact(bias).clone()
        )
        for j, tap in enumerate(taps):
            total += tap * weight[:, j]
        if activation is not None:
            total = total / (1 + torch.exp(-total))
        y[t] = total + x[t] if residual else total
        for column, value in enumerate(history[-(kernel_size - 1) :]):
            windows[t, column] = value
    return y, windows


def decode(
    *,
    x: Tensor,
    pool: Tensor,
    weight: Tensor,
    slots: Ints,
    has_initial: Bools | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: bool = True,
    track_slots: Ints | None = None,
) -> tuple[Tensor, Tensor]:
    """One token per row; the window is advanced by it.

    Args:
        x: ``[T, D]``, row b's token is ``x[b]``; rows past the last are padding.
        pool: ``[S, K-1, D]``.
        weight, bias, activation, residual: As for :func:`row_conv`.
        slots: ``[B]``, -1 = none: the output is zero and nothing is written.
        has_initial: ``[B]``, False = the row starts from zeros; None = all rows resume.
        track_slots: ``[B]`` slots that get the window after the step too, -1 = none.

    Returns:
        ``y`` ``[T, D]`` float64, zero past the last row, and the new pool in the pool's dtype.
    """
    rows = len(slots)
    return extend(
        x=x,
        pool=pool,
        weight=weight,
        slots=slots,
        lengths=[1] * rows,
        has_initial=[True] * rows if has_initial is None else has_initial,
        bias=bias,
        activation=activation,
        residual=residual,
        track_slots=track_slots,
        track_tokens=[1] * rows,
    )


def extend(
    *,
    x: Tensor,
    pool: Tensor,
    weight: Tensor,
    slots: Ints,
    lengths: Ints,
    has_initial: Bools,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: bool = True,
    track_slots: Ints | None = None,
    track_tokens: Ints | None = None,
) -> tuple[Tensor, Tensor]:
    """Any number of tokens per row. A row of length 0 changes nothing, its snapshot slot included.

    Args:
        x: ``[T, D]`` packed; tokens past the last row are padding.
        pool: ``[S, K-1, D]``.
        weight, bias, activation, residual: As for :func:`row_conv`.
        slots: ``[B]``, -1 = none: the outputs are zero and nothing is written.
        lengths: ``[B]`` tokens of each row.
        has_initial: ``[B]``, False = the row starts from zeros, whatever its slot holds.
        track_slots: ``[B]`` slots that get a snapshot, -1 = none.
        track_tokens: ``[B]``, tokens of this step that the snapshot has taken in: the length asked
            for minus the prefix. Outside of 0 to the row's length = none; None = all of them.

    Returns:
        ``y`` ``[T, D]`` float64, zero past the last row, and the new pool in the pool's dtype.
    """
    lengths = _ints(lengths)
    y, windows = _rows(
        x, pool, weight, slots, lengths, has_initial, None, bias, activation, residual
    )
    return y, _written(
        pool,
        slots,
        windows,
        lengths,
        track_slots,
        lengths if track_tokens is None else track_tokens,
    )


def verify(
    *,
    x: Tensor,
    pool: Tensor,
    weight: Tensor,
    slots: Ints,
    draft_token_num: int,
    has_initial: Bools | None = None,
    parents: Sequence[Ints] | Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: bool = True,
) -> tuple[Tensor, Tensor]:
    """``draft_token_num`` tokens per row, a chain or a tree. Writes nothing.

    Args:
        x: ``[T, D]`` packed; tokens past the last row are padding.
        pool: ``[S, K-1, D]``.
        weight, bias, activation, residual: As for :func:`row_conv`.
        slots: ``[B]``, -1 = none: the outputs are zero.
        draft_token_num: dtn.
        has_initial: ``[B]``, False = the row starts from zeros; None = all rows resume.
        parents: ``[B, dtn]``, -1 = root; None = chain.

    Returns:
        ``y`` ``[T, D]`` float64, and the window after each node ``[B, dtn, K-1, D]`` float64 for
        :func:`commit`, zero for a row without a slot.
    """
    rows = len(slots)
    y, after = _rows(
        x,
        pool,
        weight,
        slots,
        [draft_token_num] * rows,
        [True] * rows if has_initial is None else has_initial,
        parents,
        bias,
        activation,
        residual,
    )
    windows = torch.zeros(rows, draft_token_num, *pool.shape[1:], dtype=torch.float64, device="cpu")
    for row, slot in enumerate(_ints(slots)):
        if slot != -1:
            for node in range(draft_token_num):
                windows[row, node] = after[row][node + 1]
    return y, windows


def commit(
    *,
    pool: Tensor,
    windows: Tensor,
    slots: Ints,
    last_steps: Ints,
    track_slots: Ints | None = None,
    track_steps: Ints | None = None,
) -> Tensor:
    """Keep what was accepted of a verify step; a step is a node index.

    Args:
        pool: ``[S, K-1, D]``.
        windows: ``[B, dtn, K-1, D]`` from :func:`verify`.
        slots: ``[B]`` slots at the time of the commit, -1 = the row changes nothing.
        last_steps: ``[B]`` node whose window is kept; outside of the step = the row changes
            nothing.
        track_slots: ``[B]`` slots that get a snapshot, -1 = none.
        track_steps: ``[B]`` node whose window is the snapshot; outside of the step = none.

    Returns:
        The new pool in the pool's dtype.
    """
    rows, draft_token_num = windows.shape[:2]
    old = _cpu(pool)
    after = [[old[0], *windows[row]] for row in range(rows)]  # entry 0 is never chosen below
    kept = [step + 1 if 0 <= step < draft_token_num else -1 for step in _ints(last_steps)]
    snap = [-1] * rows
    if track_steps is not None:
        snap = [step + 1 if 0 <= step < draft_token_num else -1 for step in _ints(track_steps)]
    return _written(pool, slots, after, kept, track_slots, snap)


def draft_extend(
    *,
    x: Tensor,
    pool: Tensor,
    weight: Tensor,
    slots: Ints,
    draft_token_num: int,
    accepts: Ints,
    has_initial: Bools,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: bool = True,
    track_slots: Ints | None = None,
    track_tokens: Ints | None = None,
) -> tuple[Tensor, Tensor]:
    """``draft_token_num`` tokens per row, of which the first ``accepts`` move the window on.

    Args:
        x: ``[T, D]`` packed; tokens past the last row are padding.
        pool: ``[S, K-1, D]``.
        weight, bias, activation, residual: As for :func:`row_conv`.
        slots: ``[B]``, -1 = none: the outputs are zero and nothing is written.
        draft_token_num: dtn.
        accepts: ``[B]``; 0 keeps the old window (zeros without one), outside of 0..dtn the row
            changes nothing.
        has_initial: ``[B]``, False = the row starts from zeros.
        track_slots: ``[B]`` slots that get a snapshot, -1 = none.
        track_tokens: ``[B]`` tokens that the snapshot has taken in, from :func:`crossing_tokens`;
            None = no snapshots.

    Returns:
        ``y`` ``[T, D]`` float64, zero past the last row, and the new pool in the pool's dtype.
    """
    rows = len(slots)
    y, windows = _rows(
        x,
        pool,
        weight,
        slots,
        [draft_token_num] * rows,
        has_initial,
        None,
        bias,
        activation,
        residual,
    )
    snap = [-1] * rows if track_tokens is None else track_tokens
    return y, _written(pool, slots, windows, _ints(accepts), track_slots, snap)


def crossing_tokens(*, seq_lens: Ints, accepts: Ints, grid: int) -> list[int]:
    """Tokens of the step after which each row is at a multiple of ``grid`` for the last time.

    Args:
        seq_lens: ``[B]`` tokens in the state before the step.
        accepts: ``[B]`` tokens that are kept.
        grid: Distance of snapshots in tokens.

    Returns:
        ``[B]`` counts, -1 = never; the node index of the same snapshot is one less.
    """
    found = []
    for before, kept in zip(_ints(seq_lens), _ints(accepts), strict=True):
        last = -1
        for tokens in range(1, kept + 1):
            if (before + tokens) % grid == 0:
                last = tokens
        found.append(last)
    return found


def metadata(
    *,
    mode: ForwardMode,
    slots: Ints,
    lengths: Ints,
    has_initial: Bools,
    kernel_size: int,
    num_tokens: int,
    track_slots: Ints | None = None,
    track_tokens: Ints | None = None,
) -> dict[str, list[Any]]:
    """The fields of :class:`sconv.ShortConvMetadata` that the contract fixes, as plain lists.

    Args:
        mode: The step's mode. Verify tracks nothing; a decode's snapshot is its new window, so that
            it has a destination but no packed tokens to gather.
        slots: ``[B]`` physical slots, -1 = none.
        lengths: ``[B]`` tokens of each row.
        has_initial: ``[B]``.
        kernel_size: K.
        num_tokens: T, the tail past the last row included.
        track_slots, track_tokens: As for :func:`extend`.
    """
    slots, lengths = _ints(slots), _ints(lengths)
    rows = len(slots)
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    resumes = [bool(value) for value in has_initial]

    row_of_token = []
    for token in range(num_tokens):
        row_of_token.append(max(rows - 1, 0))
        for row in range(rows):
            if starts[row] <= token < starts[row + 1]:
                row_of_token[token] = row

    targets = [-1] * rows
    sources = [[0] * (kernel_size - 1) for _ in range(rows)]
    if track_slots is not None and mode not in (ForwardMode.TARGET_VERIFY, ForwardMode.IDLE):
        tokens = _ints(lengths if track_tokens is None else track_tokens)
        for row, target in enumerate(_ints(track_slots)):
            if slots[row] in (0, -1) or lengths[row] == 0 or not 0 <= tokens[row] <= lengths[row]:
                continue
            targets[row] = target
            if target != -1 and mode is not ForwardMode.DECODE:
                old = list(range(-(kernel_size - 1), 0))
                packed = list(range(starts[row], starts[row] + tokens[row]))
                sources[row] = (old + packed)[-(kernel_size - 1) :]

    return {
        "cache_indices": slots,
        "query_start_loc": starts,
        "has_initial_state": resumes,
        "cache_mask": [[[resumes[row] and slots[row] != -1]] for row in range(rows)],
        "safe_idx": [max(slot, 0) for slot in slots],
        "cu": list(starts),
        "si": row_of_token,
        "track_conv_indices": sources,
        "track_cache_indices": targets,
    }


def time_axis(pool: Tensor, window_axis: str) -> Tensor:
    """Return a state tensor as ``[..., K-1, D]``; its axis is declared, never guessed from sizes.

    Applied to the result with the same axis, it returns the original order.

    Raises:
        BatchError: The axis is neither ``"time"`` nor ``"channel"``.
    """
    if window_axis == "time":
        return pool
    if window_axis == "channel":
        return pool.transpose(-1, -2)
    raise BatchError(f"window_axis={window_axis!r}: expected 'time' or 'channel'")


def _rows(
    x: Tensor,
    pool: Tensor,
    weight: Tensor,
    slots: Ints,
    lengths: Sequence[int],
    has_initial: Bools,
    parents: Sequence[Ints] | Tensor | None,
    bias: Tensor | None,
    activation: str | None,
    residual: bool,
) -> tuple[Tensor, list[list[Tensor]]]:
    """All outputs and, for each row, the window after 0, 1, ... tokens (empty without a slot)."""
    if sum(lengths) > x.shape[0]:
        raise BatchError(f"x has {x.shape[0]} tokens for rows of {sum(lengths)}")
    y = torch.zeros(x.shape, dtype=torch.float64, device="cpu")
    windows: list[list[Tensor]] = []
    start = 0
    for row, slot in enumerate(_ints(slots)):
        stop = start + lengths[row]
        if slot == -1:
            windows.append([])
        else:
            old = _exact(pool[slot])
            if not has_initial[row]:
                old = torch.zeros_like(old)
            y[start:stop], after = row_conv(
                x[start:stop],
                old,
                weight,
                bias=bias,
                activation=activation,
                residual=residual,
                parents=None if parents is None else parents[row],
            )
            windows.append([old, *after])
        start = stop
    return y, windows


def _written(
    pool: Tensor,
    slots: Ints,
    windows: Sequence[Sequence[Tensor]],
    kept: Ints,
    track_slots: Ints | None,
    track_tokens: Ints,
) -> Tensor:
    """Write each row's window after ``kept`` tokens, and its snapshot after ``track_tokens``."""
    new = _cpu(pool).clone()
    counts, snapshots = _ints(kept), _ints(track_tokens)
    targets = [-1] * len(counts) if track_slots is None else _ints(track_slots)
    for row, slot in enumerate(_ints(slots)):
        last = len(windows[row]) - 1
        # On the dummy, without a slot or tokens, or with a count that is not the row's: no change.
        if slot in (0, -1) or last < 1 or not 0 <= counts[row] <= last:
            continue
        new[slot] = windows[row][counts[row]].to(new.dtype)
        if targets[row] != -1 and 0 <= snapshots[row] <= last:
            new[targets[row]] = windows[row][snapshots[row]].to(new.dtype)
    return new


def _path(node: int, parents: Sequence[int], most: int) -> list[int]:
    """Up to ``most`` nodes that end with ``node``, oldest first."""
    path: list[int] = []
    while 0 <= node < len(parents) and len(path) < most:
        path.insert(0, node)
        node = parents[node]
    return path


def _chain(count: int) -> list[int]:
    return [node - 1 for node in range(count)]


def _ints(values: Iterable[Any]) -> list[int]:
    return [int(value) for value in values]


def _cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def _exact(tensor: Tensor) -> Tensor:
    return _cpu(tensor).to(torch.float64)
