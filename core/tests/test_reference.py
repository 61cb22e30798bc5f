"""The oracle against literal decimals.

With weights 1, 10, 100, 1000 (oldest to newest) an output reads, in decimal: current, previous, one
before, one before that. A wrong digit tells which tap read which token.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sconv import reference

WEIGHT = torch.tensor([[1.0, 10.0, 100.0, 1000.0]])
NAN = float("nan")
PLAIN: dict[str, Any] = {"weight": WEIGHT, "residual": False}


def tokens(*values: float) -> Tensor:
    return torch.tensor(values)[:, None]


def pool_of(slots: dict[int, list[float]], size: int = 9) -> Tensor:
    """``[size, 3, 1]``; every slot that is not named holds NaN."""
    pool = torch.full((size, 3, 1), NAN)
    for slot, window in slots.items():
        pool[slot, :, 0] = torch.tensor(window)
    return pool


def digits(y: Tensor) -> list[float]:
    return y[:, 0].tolist()


def assert_slots(new: Tensor, old: Tensor, changed: dict[int, list[float]]) -> None:
    """The named slots hold these windows; every other one is untouched, NaN included."""
    for slot in range(len(old)):
        if slot in changed:
            assert new[slot, :, 0].tolist() == changed[slot], slot
        else:
            assert torch.equal(new[slot].nan_to_num(-7.0), old[slot].nan_to_num(-7.0)), slot


def test_the_digit_oracle_itself() -> None:
    y, windows = reference.row_conv(tokens(4), tokens(1, 2, 3), WEIGHT, residual=False)
    assert y.dtype == windows.dtype == torch.float64
    assert digits(y) == [4321]
    assert windows.tolist() == [[[2], [3], [4]]]


@pytest.mark.parametrize("kernel_size", [2, 3, 4, 8])
def test_a_row_is_a_causal_convolution(kernel_size: int) -> None:
    """Against torch's own convolution, in float64."""
    torch.manual_seed(0)
    dim, count = 3, 11
    x, weight, bias = torch.randn(count, dim), torch.randn(dim, 1, kernel_size), torch.randn(dim)
    window = torch.randn(kernel_size - 1, dim)
    y, windows = reference.row_conv(x, window, weight, bias=bias, activation="silu", residual=True)
    stream = torch.cat([window, x]).double()
    summed = functional.conv1d(stream.T[None], weight.double(), bias.double(), groups=dim)[0].T
    torch.testing.assert_close(y, functional.silu(summed) + x.double())
    assert torch.equal(windows, stream.unfold(0, kernel_size - 1, 1)[1:].transpose(1, 2))


def test_activation_comes_before_the_residual_and_swish_is_silu() -> None:
    arguments: dict[str, Any] = {"bias": torch.tensor([-4321.5])}
    for name in ("silu", "swish"):
        y, _ = reference.row_conv(tokens(4), tokens(1, 2, 3), WEIGHT, activation=name, **arguments)
        torch.testing.assert_close(
            y, torch.tensor([[4 - 0.5 / (1 + 2.718281828459045**0.5)]]).double()
        )


def test_inputs_are_not_mutated_and_bias_is_not_summed_into() -> None:
    x, window, bias = tokens(4, 5).double(), tokens(1, 2, 3).double(), torch.ones(1).double()
    weight, pool = WEIGHT.double(), pool_of({1: [1, 2, 3]})
    before = [tensor.clone() for tensor in (x, window, bias, weight, pool)]
    reference.row_conv(x, window, weight, bias=bias)
    reference.extend(
        x=x, pool=pool, weight=weight, slots=[1], lengths=[2], has_initial=[True], bias=bias
    )
    for tensor, old in zip((x, window, bias, weight, pool), before, strict=True):
        assert torch.equal(tensor.nan_to_num(-7.0), old.nan_to_num(-7.0))


def test_pad_1_rows_without_a_slot_are_zero() -> None:
    pool = pool_of({2: [1, 2, 3]})
    y, new = reference.decode(x=tokens(4, 8, 8), pool=pool, slots=[2, -1, -1], **PLAIN)
    assert digits(y) == [4321, 0, 0]
    assert_slots(new, pool, {2: [2, 3, 4]})


def test_slot_1_request_rows_are_not_slots() -> None:
    request_to_slot = {0: 5, 1: 3, 2: 1}
    pool = pool_of({1: [1, 2, 3], 5: [4, 5, 6], 2: [7, 7, 7], 0: [0, 0, 0]})
    slots = [request_to_slot[row] for row in (2, 0)]
    y, new = reference.decode(x=tokens(4, 7), pool=pool, slots=slots, **PLAIN)
    assert digits(y) == [4321, 7654]
    assert_slots(new, pool, {1: [2, 3, 4], 5: [5, 6, 7]})


def test_slot_5_a_cleared_slot_reads_zeros() -> None:
    pool = pool_of({2: [0, 0, 0]})
    y, _ = reference.decode(x=tokens(4), pool=pool, slots=[2], **PLAIN)
    assert digits(y) == [4000]


@pytest.mark.parametrize("split", [[3, 4], [1, 1, 5], [2, 1, 1, 3], [6, 1], [7]])
def test_len_2_every_split_of_a_prefill_agrees(split: list[int]) -> None:
    pool, outputs, done = pool_of({}), [], 0
    for length in split:
        x = tokens(*range(done + 1, done + length + 1))
        y, pool = reference.extend(
            x=x, pool=pool, slots=[3], lengths=[length], has_initial=[done > 0], **PLAIN
        )
        outputs += digits(y)
        done += length
    assert outputs == [1000, 2100, 3210, 4321, 5432, 6543, 7654]
    assert_slots(pool, pool_of({}), {3: [5, 6, 7]})


def test_len_3_a_short_last_chunk_keeps_the_older_columns() -> None:
    pool = pool_of({4: [1, 2, 3]})
    _, new = reference.extend(
        x=tokens(4), pool=pool, slots=[4], lengths=[1], has_initial=[True], **PLAIN
    )
    assert_slots(new, pool, {4: [2, 3, 4]})


def test_len_6_rows_of_length_zero_do_nothing() -> None:
    pool = pool_of({2: [7, 8, 9], 4: [5, 5, 5]})
    y, new = reference.extend(
        x=tokens(1, 2, 3),
        pool=pool,
        slots=[1, 2, 3, 4],
        lengths=[2, 0, 1, 0],
        has_initial=[False, True, False, False],
        track_slots=[-1, 5, -1, 6],
        **PLAIN,
    )
    assert digits(y) == [1000, 2100, 3000]
    assert_slots(new, pool, {1: [0, 1, 2], 3: [0, 0, 3]})


@pytest.mark.parametrize("slots", [[], [1, 2]])
def test_len_7_nothing_in_nothing_out(slots: list[int]) -> None:
    pool = pool_of({})
    y, new = reference.extend(
        x=torch.zeros(0, 1),
        pool=pool,
        slots=slots,
        lengths=[0] * len(slots),
        has_initial=[True] * len(slots),
        **PLAIN,
    )
    assert y.shape == (0, 1)
    assert_slots(new, pool, {})


def test_len_11_the_state_is_inputs_not_outputs() -> None:
    pool = pool_of({})
    _, pool = reference.extend(
        x=tokens(1, 2, 3, 4), pool=pool, slots=[1], lengths=[4], has_initial=[False], **PLAIN
    )
    assert pool[1, :, 0].tolist() == [2, 3, 4]
    y, _ = reference.decode(x=tokens(5), pool=pool, slots=[1], **PLAIN)
    assert digits(y) == [5432]


def test_len_12_an_extend_onto_a_state_resumes_it() -> None:
    pool = pool_of({})
    for x, resumes in ((tokens(1, 2, 3), False), (tokens(4, 5), True)):
        y, pool = reference.extend(
            x=x, pool=pool, slots=[2], lengths=[len(x)], has_initial=[resumes], **PLAIN
        )
    assert digits(y) == [4321, 5432]
    assert pool[2, :, 0].tolist() == [3, 4, 5]


@pytest.mark.parametrize(
    ("accepted", "state", "next_y"),
    [(0, [1, 2, 3], 7321), (1, [2, 3, 4], 7432), (2, [3, 4, 5], 7543), (3, [4, 5, 6], 7654)],
)
def test_spec_1_spec_5_spec_7_verify_then_keep_some(
    accepted: int, state: list[float], next_y: float
) -> None:
    pool = pool_of({6: [1, 2, 3]})
    y, windows = reference.verify(
        x=tokens(4, 5, 6), pool=pool, slots=[6], draft_token_num=3, **PLAIN
    )
    assert digits(y) == [4321, 5432, 6543]
    new = reference.commit(pool=pool, windows=windows, slots=[6], last_steps=[accepted - 1])
    assert_slots(new, pool, {6: state})
    y, _ = reference.decode(x=tokens(7), pool=new, slots=[6], **PLAIN)
    assert digits(y) == [next_y]


def test_spec_5_steps_outside_of_the_step_change_nothing() -> None:
    pool = pool_of({6: [1, 2, 3], 4: [1, 2, 3], 5: [7, 8, 9]})
    _, windows = reference.verify(
        x=tokens(4, 5, 6, 4, 5, 6, 4, 5, 6), pool=pool, slots=[6, 4, 5], draft_token_num=3, **PLAIN
    )
    new = reference.commit(
        pool=pool,
        windows=windows,
        slots=[6, 4, -1],
        last_steps=[3, -1, 2],
        track_slots=[1, 2, 3],
        track_steps=[0, 0, 0],
    )
    assert_slots(new, pool, {})


def test_spec_6_a_tree_node_reads_its_ancestors() -> None:
    pool = pool_of({2: [1, 2, 3]})
    y, windows = reference.verify(
        x=tokens(4, 5, 6), pool=pool, slots=[2], draft_token_num=3, parents=[[-1, 0, 0]], **PLAIN
    )
    assert digits(y) == [4321, 5432, 6432]
    assert windows[0, :, :, 0].tolist() == [[2, 3, 4], [3, 4, 5], [3, 4, 6]]
    new = reference.commit(pool=pool, windows=windows, slots=[2], last_steps=[2])
    assert_slots(new, pool, {2: [3, 4, 6]})


def test_tree_windows_of_the_worked_example() -> None:
    """Node 0 has children 1 and 2, node 1 has child 3."""
    pool = pool_of({3: [1, 2, 3]})
    _, windows = reference.verify(
        x=tokens(10, 11, 12, 13),
        pool=pool,
        slots=[3],
        draft_token_num=4,
        parents=torch.tensor([[-1, 0, 0, 1]]),
        **PLAIN,
    )
    assert windows[0, :, :, 0].tolist() == [[2, 3, 10], [3, 10, 11], [3, 10, 12], [10, 11, 13]]


def test_verify_of_a_row_without_a_slot_is_zero() -> None:
    pool = pool_of({3: [1, 2, 3]})
    y, windows = reference.verify(
        x=tokens(4, 5, 4, 5), pool=pool, slots=[-1, 3], draft_token_num=2, **PLAIN
    )
    assert digits(y) == [0, 0, 4321, 5432]
    assert not windows[0].any()


def test_spec_12_a_commit_uses_the_slots_of_its_own_call() -> None:
    pool = pool_of({1: [1, 2, 3], 2: [1, 2, 3]})
    _, windows = reference.verify(
        x=tokens(4, 5, 6, 7), pool=pool, slots=[1, 2], draft_token_num=2, **PLAIN
    )
    new = reference.commit(pool=pool, windows=windows, slots=[-1, 7], last_steps=[1, 1])
    assert_slots(new, pool, {7: [3, 6, 7]})


def test_a_commit_snapshots_the_node_after_two_tokens_at_the_boundary() -> None:
    """254 tokens and 4 more: length 256 is node 1."""
    pool = pool_of({1: [1, 2, 3]})
    _, windows = reference.verify(
        x=tokens(4, 5, 6, 7), pool=pool, slots=[1], draft_token_num=4, **PLAIN
    )
    crossed = reference.crossing_tokens(seq_lens=[254], accepts=[4], grid=256)
    assert crossed == [2]
    new = reference.commit(
        pool=pool,
        windows=windows,
        slots=[1],
        last_steps=[3],
        track_slots=[8],
        track_steps=[crossed[0] - 1],
    )
    assert_slots(new, pool, {1: [5, 6, 7], 8: [3, 4, 5]})


def test_crossings_of_the_worked_example() -> None:
    """The node indexes of the chains 2, 3 and of the single tokens, each as a count."""
    found = reference.crossing_tokens(
        seq_lens=[254, 255, 300, 254, 255, 256], accepts=[3, 1, 4, 2, 0, -1], grid=256
    )
    assert found == [2, 1, -1, 2, -1, -1]


@pytest.mark.parametrize(
    ("accepted", "state"),
    [(0, [1, 2, 3]), (1, [2, 3, 4]), (2, [3, 4, 5]), (3, [4, 5, 6]), (-1, None), (4, None)],
)
def test_draft_extend_keeps_exactly_what_was_accepted(
    accepted: int, state: list[float] | None
) -> None:
    pool = pool_of({5: [1, 2, 3]})
    y, new = reference.draft_extend(
        x=tokens(4, 5, 6),
        pool=pool,
        slots=[5],
        draft_token_num=3,
        accepts=[accepted],
        has_initial=[True],
        **PLAIN,
    )
    assert digits(y) == [4321, 5432, 6543]
    assert_slots(new, pool, {} if state is None else {5: state})


def test_draft_extend_snapshots_the_boundary_not_the_token_before() -> None:
    """255 tokens: the snapshot of length 256 has taken in the first draft token."""
    pool = pool_of({5: [1, 2, 3]})
    _, new = reference.draft_extend(
        x=tokens(4, 5, 6),
        pool=pool,
        slots=[5],
        draft_token_num=3,
        accepts=[2],
        has_initial=[True],
        track_slots=[1],
        track_tokens=reference.crossing_tokens(seq_lens=[255], accepts=[2], grid=256),
        **PLAIN,
    )
    assert_slots(new, pool, {5: [3, 4, 5], 1: [2, 3, 4]})


def test_draft_extend_of_a_fresh_row_starts_from_zeros() -> None:
    pool = pool_of({5: [9, 9, 9]})
    y, new = reference.draft_extend(
        x=tokens(4, 5),
        pool=pool,
        slots=[5],
        draft_token_num=2,
        accepts=[1],
        has_initial=[False],
        **PLAIN,
    )
    assert digits(y) == [4000, 5400]
    assert_slots(new, pool, {5: [0, 0, 4]})


@pytest.mark.parametrize("swapped", [False, True])
def test_track_1_snapshots_count_from_the_rows_own_start(swapped: bool) -> None:
    rows = [([1, 2, 3, 4, 5], 1, 5, [2, 3, 4]), ([6, 7, 8, 9, 1, 2, 3], 2, 6, [7, 8, 9])]
    if swapped:
        rows.reverse()
    pool = pool_of({})
    _, new = reference.extend(
        x=tokens(*(value for row in rows for value in row[0])),
        pool=pool,
        slots=[row[1] for row in rows],
        lengths=[len(row[0]) for row in rows],
        has_initial=[False, False],
        track_slots=[row[2] for row in rows],
        track_tokens=[4, 4],
        **PLAIN,
    )
    assert_slots(new, pool, {1: [3, 4, 5], 2: [1, 2, 3], 5: [2, 3, 4], 6: [7, 8, 9]})


def test_track_1_a_short_snapshot_reaches_into_the_old_window() -> None:
    pool = pool_of({2: [7, 8, 9]})
    _, new = reference.extend(
        x=tokens(1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3),
        pool=pool,
        slots=[1, 2],
        lengths=[5, 7],
        has_initial=[False, True],
        track_slots=[-1, 6],
        track_tokens=[4, 2],
        **PLAIN,
    )
    assert_slots(new, pool, {1: [3, 4, 5], 2: [1, 2, 3], 6: [9, 6, 7]})


def test_snapshots_outside_of_the_row_are_not_taken() -> None:
    pool = pool_of({1: [1, 2, 3], 2: [4, 5, 6], 3: [7, 8, 9]})
    _, new = reference.extend(
        x=tokens(4, 7, 8),
        pool=pool,
        slots=[1, 2, -1],
        lengths=[1, 1, 1],
        has_initial=[True, True, True],
        track_slots=[4, 5, 6],
        track_tokens=[2, -201, 1],
        **PLAIN,
    )
    assert_slots(new, pool, {1: [2, 3, 4], 2: [5, 6, 7]})


def test_a_snapshot_at_the_prefix_itself_is_the_old_window() -> None:
    pool = pool_of({1: [1, 2, 3]})
    _, new = reference.extend(
        x=tokens(4),
        pool=pool,
        slots=[1],
        lengths=[1],
        has_initial=[True],
        track_slots=[4],
        track_tokens=[0],
        **PLAIN,
    )
    assert_slots(new, pool, {1: [2, 3, 4], 4: [1, 2, 3]})


def test_a_decode_snapshot_is_the_window_after_the_token() -> None:
    pool = pool_of({1: [1, 2, 3], 2: [4, 5, 6]})
    _, new = reference.decode(x=tokens(4, 7), pool=pool, slots=[1, 2], track_slots=[-1, 3], **PLAIN)
    assert_slots(new, pool, {1: [2, 3, 4], 2: [5, 6, 7], 3: [5, 6, 7]})


def test_the_mask_selects_so_that_nan_in_a_stale_slot_stays_there() -> None:
    pool = pool_of({})
    y, new = reference.extend(
        x=tokens(1, 2, 8), pool=pool, slots=[4], lengths=[2], has_initial=[False], **PLAIN
    )
    assert digits(y) == [1000, 2100, 0]
    assert_slots(new, pool, {4: [0, 1, 2]})


def test_kern_4_bf16_states_are_rounded_once_and_kept_in_their_dtype() -> None:
    weight = torch.tensor([[1.0, 4.0, 16.0, 64.0]], dtype=torch.bfloat16)
    pool = torch.zeros(2, 3, 1, dtype=torch.bfloat16)
    y, new = reference.extend(
        x=tokens(1, 2, 3, 1.0009765625),
        pool=pool,
        weight=weight,
        slots=[1],
        lengths=[4],
        has_initial=[False],
        residual=False,
    )
    assert digits(y)[:3] == [64, 144, 228]
    assert digits(y)[3] == 121 + 64 * 0.0009765625
    assert new.dtype == torch.bfloat16
    assert new[1, :, 0].tolist() == [2, 3, 1]


def test_layout_7_the_axis_is_declared_not_guessed() -> None:
    """T = D = K-1 = 3: no size says which axis is which."""
    x = torch.tensor([[10.0 * t + d for d in range(3)] for t in range(3)])
    weight = WEIGHT.expand(3, 4)
    window = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])  # [K-1, D]
    in_time = torch.stack([torch.full((3, 3), NAN), window])
    in_channel = in_time.transpose(1, 2).contiguous()
    expected = [[741, 1852, 2963], [10074, 11185, 12296], [21007, 22118, 23229]]
    for pool, axis in ((in_time, "time"), (in_channel, "channel")):
        y, new = reference.extend(
            x=x,
            pool=reference.time_axis(pool, axis),
            weight=weight,
            slots=[1],
            lengths=[3],
            has_initial=[True],
            residual=False,
        )
        assert y.tolist() == expected
        back = reference.time_axis(new, axis)
        assert reference.time_axis(back, axis)[1].tolist() == x.tolist()
    with pytest.raises(ValueError, match="'time' or 'channel'"):
        reference.time_axis(in_time, "auto")


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="activation='relu'"):
        reference.row_conv(tokens(4), tokens(1, 2, 3), WEIGHT, activation="relu")
    with pytest.raises(ValueError, match=r"window is \(2, 1\), expected \(3, 1\)"):
        reference.row_conv(tokens(4), tokens(1, 2), WEIGHT)
    with pytest.raises(ValueError, match=r"weight is \(2, 2\)"):
        reference.row_conv(tokens(4), tokens(1, 2, 3), WEIGHT.view(2, 2))
    with pytest.raises(ValueError, match="x has 1 tokens for rows of 2"):
        reference.decode(x=tokens(4), pool=pool_of({}), slots=[1, 2], **PLAIN)
