"""Step indexes of commits and snapshots; the off-by-one between counts and nodes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sconv.errors import BatchError
from sconv.step.tracking import (
    align_track_seqlens,
    crossing_steps,
    decode_track_mask,
    verify_step_indices,
)


def ints(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


# Four rows of six nodes; two trees and two chains, grid 256.
ACCEPT_INDEX = torch.tensor(
    [[0, 2, 5, -1], [6, -1, -1, -1], [12, 13, 14, 15], [18, 19, -1, -1]], dtype=torch.int32
)
ACCEPT_LENS = ints(3, 1, 4, 2, dtype=torch.int32)
SEQ_LENS = ints(254, 255, 300, 254, dtype=torch.int32)


def test_worked_example_of_the_commit() -> None:
    last = verify_step_indices(ACCEPT_INDEX, ACCEPT_LENS, 6)
    assert last.dtype == torch.int64
    assert last.tolist() == [5, 0, 3, 1]


def test_worked_example_of_the_crossings() -> None:
    steps = crossing_steps(SEQ_LENS, ACCEPT_LENS, 256, ACCEPT_INDEX, 6)
    assert steps.dtype == torch.int64
    assert steps.tolist() == [2, 0, -1, 1]


def test_crossing_of_a_chain_is_the_node_after_two_tokens() -> None:
    """254 tokens, 4 accepted: length 256 is reached after two tokens, which is node 1."""
    assert crossing_steps(ints(254), ints(4), 256).tolist() == [1]


def test_a_crossing_by_the_first_token_is_node_0_not_step_1() -> None:
    """255 tokens: the snapshot of length 256 is the window after the first token."""
    assert crossing_steps(ints(255), ints(1), 256).tolist() == [0]


@given(
    before=st.integers(0, 600), accepted=st.integers(0, 12), grid=st.sampled_from([1, 4, 64, 256])
)
@settings(max_examples=200, deadline=None)
def test_a_snapshot_has_exactly_the_length_it_is_filed_under(
    before: int, accepted: int, grid: int
) -> None:
    node = crossing_steps(ints(before), ints(accepted), grid).item()
    lengths = [before + tokens for tokens in range(1, accepted + 1)]
    on_grid = [length for length in lengths if length % grid == 0]
    if on_grid:
        assert lengths[int(node)] == on_grid[-1]
    else:
        assert node == -1


def test_a_chain_and_its_accept_index_agree() -> None:
    rows, dtn = 5, 4
    accept_lens = ints(1, 2, 3, 4, 4)
    seq_lens = ints(7, 6, 5, 4, 8)
    accept_index = torch.arange(rows * dtn).view(rows, dtn)
    accept_index[torch.arange(dtn) >= accept_lens[:, None]] = -1
    chain = crossing_steps(seq_lens, accept_lens, 8)
    assert chain.tolist() == [0, 1, 2, 3, -1]
    assert torch.equal(chain, crossing_steps(seq_lens, accept_lens, 8, accept_index, dtn))
    assert torch.equal(verify_step_indices(accept_index, accept_lens, dtn), accept_lens - 1)


def test_spec_6_the_last_accepted_node_is_not_the_count_minus_one() -> None:
    accept_index = torch.tensor([[0, 2]])
    assert verify_step_indices(accept_index, ints(2), 3).tolist() == [2]


def test_spec_5_accept_count_0_never_reads_the_row_before() -> None:
    accept_index = torch.tensor([[0, 1, 2], [3, 4, 5]])
    assert verify_step_indices(accept_index, ints(3, 0), 3).tolist() == [2, -1]
    assert crossing_steps(ints(253, 256), ints(3, 0), 256, accept_index, 3).tolist() == [2, -1]


def test_spec_5_counts_outside_of_the_step_name_nothing() -> None:
    accept_index = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8]])
    accept_lens = ints(4, -1, 2)
    assert verify_step_indices(accept_index, accept_lens, 3).tolist() == [-1, -1, 1]
    seq_lens = ints(255, 256, 254)
    assert crossing_steps(seq_lens, accept_lens, 256, accept_index, 3).tolist() == [-1, -1, 1]


def test_a_padded_row_that_steps_back_over_the_grid_crosses_nothing() -> None:
    assert crossing_steps(ints(256, 0), ints(-1, -1), 256).tolist() == [-1, -1]


def test_padding_and_foreign_ids_in_accept_index_name_nothing() -> None:
    """Row 0 counts a padded entry, row 1 holds ids of row 0, row 2 of row 3, which is sound."""
    accept_index = torch.tensor([[0, -1], [0, 1], [8, 12], [12, 14]])
    assert verify_step_indices(accept_index, ints(2, 2, 2, 2), 4).tolist() == [-1, -1, -1, 2]


@pytest.mark.parametrize(("rows", "depth"), [(0, 3), (2, 0), (0, 0)])
def test_nothing_accepted_by_nobody(rows: int, depth: int) -> None:
    accept_index = torch.empty((rows, depth), dtype=torch.int32)
    counts = torch.ones(rows, dtype=torch.int64)
    assert verify_step_indices(accept_index, counts, 4).tolist() == [-1] * rows
    assert crossing_steps(counts * 255, counts, 256, accept_index, 4).tolist() == [-1] * rows


def test_a_node_id_beyond_int32_is_kept_whole() -> None:
    rows, dtn = 3, 2**31
    accept_index = torch.tensor([[0], [dtn + 5], [2 * dtn + 7]])
    assert verify_step_indices(accept_index, torch.ones(rows, dtype=torch.int32), dtn).tolist() == [
        0,
        5,
        7,
    ]


def test_decode_snapshots_at_the_grid_only() -> None:
    mask = decode_track_mask(ints(0, 255, 256, 257, 512, -256), 256)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [False, False, True, False, True, False]


def test_decode_and_verify_snapshot_at_the_same_lengths() -> None:
    before = torch.arange(0, 40)
    by_decode = decode_track_mask(before + 1, 8)
    by_verify = crossing_steps(before, torch.ones_like(before), 8) == 0
    assert torch.equal(by_decode, by_verify)


def test_align_of_a_boundary_plus_one() -> None:
    """Prefix 200, asked 330, chunk 64: 130 new tokens hold two whole chunks, 200 + 128."""
    aligned = align_track_seqlens(ints(330), ints(200), 64)
    assert aligned.dtype == torch.int64
    assert aligned.tolist() == [328]


def test_align_cancels_the_plus_one_and_keeps_exact_boundaries() -> None:
    assert align_track_seqlens(ints(64, 65, 127, 128), ints(0, 0, 0, 0), 64).tolist() == [
        64,
        64,
        64,
        128,
    ]


def test_align_floors_so_that_untracked_rows_stay_untracked() -> None:
    """Truncation would round -1 .. prefix - 1 up to the prefix and snapshot the old window."""
    asked = ints(-1, -1, 199, 137, 200)
    prefix = ints(200, 0, 200, 200, 200)
    assert align_track_seqlens(asked, prefix, 64).tolist() == [-1, -1, -1, -1, 200]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(BatchError, match="grid must be at least 1, got 0"):
        crossing_steps(SEQ_LENS, ACCEPT_LENS, 0)
    with pytest.raises(BatchError, match="grid must be at least 1"):
        decode_track_mask(SEQ_LENS, 0)
    with pytest.raises(BatchError, match="chunk_size must be at least 1"):
        align_track_seqlens(SEQ_LENS, SEQ_LENS, -64)
    with pytest.raises(BatchError, match="draft_token_num"):
        crossing_steps(SEQ_LENS, ACCEPT_LENS, 256, ACCEPT_INDEX)
    with pytest.raises(BatchError, match=r"\(4, 4\) and \(3,\)"):
        verify_step_indices(ACCEPT_INDEX, ints(1, 1, 1), 6)


def test_no_host_sync_and_no_data_dependent_shape() -> None:
    with FakeTensorMode():
        counts = torch.empty(3, dtype=torch.int32)
        accept_index = torch.empty(3, 4, dtype=torch.int32)
        assert verify_step_indices(accept_index, counts, 6).shape == (3,)
        assert crossing_steps(counts, counts, 256, accept_index, 6).shape == (3,)
        assert decode_track_mask(counts, 256).shape == (3,)
        assert align_track_seqlens(counts, counts, 64).shape == (3,)
