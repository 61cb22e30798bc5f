"""What a batch says of itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sconv import BatchError, ForwardBatch, ForwardMode


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_each_constructor_sets_its_mode_and_sizes() -> None:
    rows = ids(3, 1)
    batches = {
        ForwardMode.DECODE: (ForwardBatch.decode(rows), 2, 1),
        ForwardMode.EXTEND: (ForwardBatch.extend(rows, rows, rows, num_tokens=9), 9, None),
        ForwardMode.MIXED: (ForwardBatch.mixed(rows, rows, rows), None, None),
        ForwardMode.TARGET_VERIFY: (ForwardBatch.target_verify(rows, rows, 3), 6, 3),
        ForwardMode.DRAFT_EXTEND: (ForwardBatch.draft_extend(rows, rows, 4, rows), 8, 4),
        ForwardMode.IDLE: (ForwardBatch.idle(2), 0, 0),
    }
    assert batches.keys() == set(ForwardMode)
    for mode, (batch, tokens, per_row) in batches.items():
        assert batch.forward_mode is mode
        assert (batch.batch_size, batch.num_tokens, batch.tokens_per_row) == (2, tokens, per_row)
        assert not batch.tracks
        assert not batch.is_tree
    assert [mode for mode in ForwardMode if mode.is_ragged] == [
        ForwardMode.EXTEND,
        ForwardMode.MIXED,
    ]


def test_a_batch_refers_to_the_engines_tensors() -> None:
    """So that an engine may write the next step into them."""
    slots, lengths, prefixes = ids(4, 2), ids(1, 2), ids(0, 3)
    batch = ForwardBatch.extend(None, lengths, prefixes, slots=slots)
    assert batch.slots is slots
    assert batch.req_pool_indices is None
    assert batch.extend_seq_lens is lengths
    assert batch.extend_prefix_lens is prefixes
    with pytest.raises(AttributeError):
        batch.slots = ids(1)  # type: ignore[misc]


def test_empty_batches_are_batches() -> None:
    none = ids()
    for batch in (
        ForwardBatch.decode(none),
        ForwardBatch.extend(none, none, none, num_tokens=0),
        ForwardBatch.target_verify(none, none, 2),
        ForwardBatch.draft_extend(none, none, 2, none),
        ForwardBatch.idle(),
    ):
        assert (batch.batch_size, batch.num_tokens) == (0, 0)


def test_a_tree_is_said_to_be_one() -> None:
    rows, links = ids(1), ids(1, -1).view(1, 2)
    assert ForwardBatch.target_verify(rows, rows, 2, parents=links).is_tree
    assert ForwardBatch.target_verify(rows, rows, 2, next_token=links, next_sibling=links).is_tree


def test_snapshots_are_said_to_be_wanted() -> None:
    rows = ids(1)
    assert ForwardBatch.decode(rows, mamba_track_indices=rows).tracks
    assert ForwardBatch.extend(rows, rows, rows, mamba_track_indices=rows).tracks
    assert ForwardBatch.draft_extend(rows, rows, 2, rows, mamba_track_indices=rows).tracks


@pytest.mark.parametrize("mode", ["decode", None, 1])
def test_a_mode_is_a_mode(mode: object) -> None:
    with pytest.raises(BatchError, match=f"forward_mode is {mode!r}: expected a sconv.ForwardMode"):
        ForwardBatch(mode, 1, 1, 1, slots=ids(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [0, -1, True, 2.0, None, "2"])
@pytest.mark.parametrize("make", [ForwardBatch.target_verify, ForwardBatch.draft_extend])
def test_draft_tokens_are_a_positive_int(make: object, tokens: object) -> None:
    rows = ids(1)
    counts = (rows,) if make == ForwardBatch.draft_extend else ()
    with pytest.raises(BatchError, match=f"draft_token_num={tokens!r}: "):
        make(rows, rows, tokens, *counts)  # type: ignore[operator]
