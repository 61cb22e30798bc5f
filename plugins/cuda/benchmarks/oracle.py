"""A float64 oracle that runs on the GPU, for thousands of cases a minute.

It shares no code with the kernels or with :mod:`sconv.reference`, which the tests compare with: a
case is plain numbers on the host, and an expected value is one gather from a table of all inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sconv.testing.harness import output_bound


@dataclass
class Case:
    """One step by pool rows, and what its commit does."""

    mode: str
    slots: list[int]
    lengths: list[int]
    before: list[int]
    num_tokens: int
    parents: list[list[int]] | None = None
    accepts: list[int] | None = None
    track_slots: list[int] | None = None
    track_tokens: list[int] | None = None  # tokens that a snapshot has taken in, -1 = none
    last_steps: list[int] = field(default_factory=list)
    track_steps: list[int] = field(default_factory=list)

    @property
    def starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    def resumes(self, row: int) -> bool:
        return self.before[row] > 0


class Table:
    """All inputs of a step side by side: packed tokens, the pool's columns, and a zero."""

    def __init__(self, case: Case, x: Tensor, pool: Tensor) -> None:
        self.case, self.tokens = case, x.shape[0]
        self.window, self.dim = pool.shape[1], x.shape[1]
        zero = torch.zeros(1, self.dim, dtype=torch.float64, device=x.device)
        flat = pool.reshape(-1, self.dim).double()
        self.values = torch.cat([x.double(), flat, zero])
        self.zero = self.values.shape[0] - 1

    def place(self, row: int, position: int) -> int:
        """Where input ``position`` of a row lies; negative ones are in its old window."""
        if position >= 0:
            return int(self.case.starts[row]) + position
        if not self.case.resumes(row):
            return self.zero
        return self.tokens + self.case.slots[row] * self.window + self.window + position


def history(case: Case, row: int, token: int, count: int) -> list[int]:
    """The last ``count`` positions that end with a token, oldest first."""
    positions = [token]
    while len(positions) < count:
        last = positions[-1]
        if case.parents is not None and last >= 0:
            parent = case.parents[row][last]
            positions.append(parent if parent >= 0 else -1)
        else:
            positions.append(last - 1)
    return positions[::-1]


def outputs(
    case: Case,
    x: Tensor,
    pool: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    residual: bool,
) -> tuple[Tensor, Tensor]:
    """``[T, D]`` float64, zero for rows without a slot and past the last row; and how far off.

    The bound is that of :func:`sconv.testing.harness.output_bound`: float32 arithmetic on these
    magnitudes, then one rounding to the dtype of ``x``.
    """
    table, kernel_size = Table(case, x, pool), pool.shape[1] + 1
    index = np.full((case.num_tokens, kernel_size), table.zero, dtype=np.int64)
    live = np.zeros(case.num_tokens, dtype=bool)
    for row, slot in enumerate(case.slots):
        if slot < 0:
            continue
        begin = int(case.starts[row])
        for token in range(case.lengths[row]):
            live[begin + token] = True
            if case.parents is None:
                path = range(token - kernel_size + 1, token + 1)
            else:
                path = history(case, row, token, kernel_size)
            index[begin + token] = [table.place(row, position) for position in path]
    taps = table.values[torch.from_numpy(index).to(x.device)]
    products = taps * weight.reshape(-1, kernel_size).double().T
    y, size = products.sum(1), products.abs().sum(1)
    if bias is not None:
        y, size = y + bias.double(), size + bias.double().abs()
    if silu:
        y = y * torch.sigmoid(y)
    if residual:
        y, size = y + x.double(), size + x.double().abs()
    there = torch.from_numpy(live).to(x.device)[:, None]
    y, size = torch.where(there, y, 0), torch.where(there, size, 0)
    return y, output_bound(y, size, x.dtype, kernel_size)


def windows_after(
    case: Case, x: Tensor, pool: Tensor, wanted: list[tuple[int, int, int]]
) -> Tensor:
    """Return the pool after windows were written: (pool row, row, last token; -1 = old window).

    Values are moved, not computed, so the result is exact.
    """
    table, new = Table(case, x, pool), pool.clone()
    if wanted:
        index = [
            [table.place(row, position) for position in history(case, row, token, table.window)]
            for _, row, token in wanted
        ]
        picked = table.values[torch.tensor(index, device=x.device)]
        new[torch.tensor([slot for slot, _, _ in wanted], device=x.device)] = picked.to(new.dtype)
    return new


def state(case: Case, x: Tensor, pool: Tensor) -> Tensor:
    """Return the pool after the step."""
    if case.mode == "verify":
        return pool.clone()
    wanted = []
    for row, slot in enumerate(case.slots):
        length = case.lengths[row]
        kept = length if case.accepts is None else case.accepts[row]
        if slot < 0 or length == 0 or not 0 <= kept <= length:
            continue
        wanted.append((slot, row, kept - 1))
        if case.track_slots is not None and case.track_slots[row] >= 0:
            tokens = length if case.track_tokens is None else case.track_tokens[row]
            if 0 <= tokens <= length:
                wanted.append((case.track_slots[row], row, tokens - 1))
    return windows_after(case, x, pool, wanted)


def committed(case: Case, x: Tensor, pool: Tensor) -> Tensor:
    """Return the pool after the commit of a verify step."""
    wanted = []
    for row, slot in enumerate(case.slots):
        length, last = case.lengths[row], case.last_steps[row]
        if slot <= 0 or not 0 <= last < length:
            continue
        wanted.append((slot, row, last))
        target = -1 if case.track_slots is None else case.track_slots[row]
        if target > 0 and 0 <= case.track_steps[row] < length:
            wanted.append((target, row, case.track_steps[row]))
    return windows_after(case, x, pool, wanted)
