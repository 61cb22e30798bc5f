"""Rulings 1 and 11 of the modes, read as digits: checks that every backend's tests run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..engine.backend import Backend
from ..step.batch import ForwardBatch
from .digits import fill_pool, read_window, run_digits

__all__ = ["check_fresh_rows_read_zeros", "check_padded_rows_take_no_snapshot"]


def check_padded_rows_take_no_snapshot(backend: Backend, padded: int) -> None:
    """Assert that a row on slot ``padded`` (0 or -1) leaves the slot that it would snapshot to.

    Args:
        backend: Built for a ``digit_spec`` with ``track_interval=1`` and ``chunk_size=1``.
        padded: The slot; the row's track index is stale and names slot 3, which is in use.
    """
    ints = _ints_on(backend)
    one = ints(1, 1)
    common = {"slots": ints(2, padded), "mamba_track_indices": ints(-1, 3)}
    for batch in (
        ForwardBatch.decode(**common),
        ForwardBatch.extend(None, one, one, **common, num_tokens=2),
        ForwardBatch.mixed(None, one, one, **common, num_tokens=2),
        ForwardBatch.draft_extend(None, one, 1, one.to(torch.int32), **common),
    ):
        fill_pool(backend.pool, {0: [0, 0, 0], 2: [1, 2, 3], 3: [7, 8, 9]})
        assert run_digits(backend, batch, [4, 5])[0] == 4321
        meta = backend.conv_state_metadata(0, batch)
        assert meta.track_cache_indices.tolist() == [-1, -1], batch.forward_mode
        assert meta.writes.tolist() == [True, False], batch.forward_mode
        assert read_window(backend.pool, 2) == [2, 3, 4], batch.forward_mode
        assert read_window(backend.pool, 3) == [7, 8, 9], batch.forward_mode


def check_fresh_rows_read_zeros(backend: Backend) -> None:
    """Assert that a row with ``seq_lens`` 0 ignores the window that its slot was left with.

    Args:
        backend: Built for a ``digit_spec`` with two draft tokens, in any window layout.
    """
    ints = _ints_on(backend)
    names, lengths = ints(1, 2), ints(0, 3)

    def prepare() -> None:
        fill_pool(backend.pool, {1: [7, 8, 9], 2: [1, 2, 3]}, {1: 1, 2: 2})

    def check_after() -> None:
        assert read_window(backend.pool, 1) == [0, 0, 4]
        assert read_window(backend.pool, 2) == [2, 3, 4]
        # Without lengths every row resumes.
        assert run_digits(backend, ForwardBatch.decode(names), [5, 5]) == [5400, 5432]

    prepare()
    assert run_digits(backend, ForwardBatch.decode(names, lengths), [4, 4]) == [4000, 4321]
    check_after()

    prepare()
    batch = ForwardBatch.target_verify(names, lengths, 2)
    assert run_digits(backend, batch, [4, 5, 4, 5]) == [4000, 5400, 4321, 5432]
    assert read_window(backend.pool, 1) == [7, 8, 9]
    backend.update_mamba_state_after_mtp_verify(ints(0, 0), None, None, req_pool_indices=names)
    check_after()

    # One row alone, which some backends have a faster way for.
    prepare()
    alone = ForwardBatch.decode(ints(1), ints(0))
    assert run_digits(backend, alone, [4]) == [4000]
    assert run_digits(backend, ForwardBatch.decode(ints(1)), [5]) == [5400]


def _ints_on(backend: Backend) -> Callable[..., Tensor]:
    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=backend.device)

    return ints
