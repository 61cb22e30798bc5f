"""Faults of docs/reference/known-faults.md that the kernels could have on their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import sconv
from sconv.testing.digits import digit_spec
from sconv.testing.rulings import (
    check_fresh_rows_read_zeros,
    check_padded_rows_take_no_snapshot,
)

Load = Callable[..., sconv.Backend]


@pytest.mark.parametrize("padded", [0, -1])
def test_pad_9_a_padded_row_takes_no_snapshot(load: Load, padded: int) -> None:
    backend = load(digit_spec(track_interval=1, chunk_size=1))
    check_padded_rows_take_no_snapshot(backend, padded)


@pytest.mark.parametrize("layout", ["inputs", "dense", "dedup"])
def test_slot_10_a_fresh_row_reads_zeros_in_decode_and_verify(load: Load, layout: str) -> None:
    spec = replace(digit_spec(max_draft_tokens=2), window_layout=layout)
    check_fresh_rows_read_zeros(load(spec))
