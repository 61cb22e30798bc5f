"""Padding, slot life and short rows: faults that other systems had, with the inputs that show them.

Names carry the id of the entry in docs/reference/known-faults.md. Outputs read as digits: 4321 is
token 4 after the window [1, 2, 3].
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sconv import (
    Backend,
    BatchError,
    ConvStatePool,
    ExportedState,
    ForwardBatch,
    ForwardMode,
    SlotError,
    SpecError,
    StateSpec,
    Stream,
    load_backend,
)
from sconv.testing.digits import (
    digit_inputs,
    digit_spec,
    digit_weight,
    fill_pool,
    read_digits,
    read_window,
    run_digits,
    set_window,
)
from sconv.testing.harness import Harness, assert_same_bits
from sconv.testing.recording import record
from sconv.testing.rulings import (
    check_fresh_rows_read_zeros,
    check_padded_rows_take_no_snapshot,
)
from sconv.testing.steps import Step
from sconv.testing.strategies import SENTINEL


def cpu(**options: Any) -> Backend:
    return load_backend("cpu", spec=digit_spec(**options))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def extend(slots: list[int], lengths: list[int], prefixes: list[int]) -> ForwardBatch:
    return ForwardBatch.extend(
        None, ints(*lengths), ints(*prefixes), slots=ints(*slots), num_tokens=sum(lengths)
    )


def test_pad_1_padded_decode_rows_are_zero_and_write_nothing() -> None:
    backend = cpu()
    fill_pool(backend.pool, {2: [1, 2, 3]})
    before = backend.pool.layers[0].clone()
    y = run_digits(backend, ForwardBatch.decode(slots=ints(2, -1, -1)), [4, 8, 8])
    assert y == [4321, 0, 0]
    assert read_window(backend.pool, 2) == [2, 3, 4]
    others = [row for row in range(backend.pool.num_rows) if row != 2]
    assert_same_bits(backend.pool.layers[0][others], before[others], "slots of no row")


@pytest.mark.parametrize("live", [[2, 5], [2]])
def test_pad_1_padded_rows_are_zero_after_a_step_without_any(live: list[int]) -> None:
    """Whether a step is padded says nothing of the next one, of its own shape or another."""
    backend = cpu()
    fill_pool(backend.pool, {2: [1, 2, 3], 5: [5, 6, 7]})
    run_digits(backend, ForwardBatch.decode(slots=ints(*live)), [4] * len(live))
    assert run_digits(backend, ForwardBatch.decode(slots=ints(2, -1)), [5, 8]) == [5432, 0]
    meta = backend.forward_metadata
    assert meta is not None
    assert meta.padded
    assert run_digits(backend, ForwardBatch.decode(slots=ints(2, 5)), [6, 8])[0] == 6543
    meta = backend.forward_metadata
    assert meta is not None
    assert not meta.padded


def test_pad_1_a_replay_zeroes_rows_that_were_live_at_capture() -> None:
    backend = cpu()
    backend.init_graph_state(4, 4)
    fill_pool(backend.pool, {2: [1, 2, 3], 5: [5, 6, 7], 7: [7, 8, 9]})
    slots, x = ints(5, 7, 2), digit_inputs([1, 1, 1])
    batch = ForwardBatch.decode(slots=slots)

    def step() -> Tensor:
        backend.init_forward_metadata_in_graph(batch)
        return backend.short_conv(
            x, digit_weight(), layer_id=0, stream="a", forward_batch=batch, residual=False
        )

    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    recording = record(step)
    fill_pool(backend.pool, {2: [1, 2, 3]})
    slots.copy_(ints(2, -1, -1))
    x.copy_(digit_inputs([4, 8, 8]))
    recording.replay()
    assert read_digits(recording.result) == [4321, 0, 0]


@pytest.mark.parametrize(
    ("null_slots", "padding"), [((-1,), -1), ((0,), 0), ((-1, 0), -1), ((-1, 0), 0)]
)
def test_pad_3_all_consumers_agree_on_the_padding_value(
    null_slots: tuple[int, ...], padding: int
) -> None:
    spec = digit_spec(max_draft_tokens=2)
    pool = ConvStatePool.adopt(spec, torch.zeros(1, 10, 3, 1), null_slots=null_slots)
    backend = load_backend("cpu", spec=spec, pool=pool)
    slots = ints(3, padding, 5)

    def fresh() -> Tensor:
        fill_pool(pool, {3: [1, 2, 3], 5: [4, 5, 6]})
        return pool.layers[0].clone()

    def check(before: Tensor, *, three: list[int], five: list[int]) -> None:
        assert (read_window(pool, 3), read_window(pool, 5)) == (three, five)
        others = [0, 1, 2, 4, 6, 7, 8, 9]
        assert_same_bits(pool.layers[0][others], before[others], "slots of no row")

    before = fresh()
    assert run_digits(backend, ForwardBatch.decode(slots=slots), [4, 9, 7]) == [4321, 0, 7654]
    check(before, three=[2, 3, 4], five=[5, 6, 7])

    before = fresh()
    batch = ForwardBatch.extend(None, ints(1, 2, 1), ints(3, 3, 3), slots=slots, num_tokens=4)
    assert run_digits(backend, batch, [4, 9, 9, 7]) == [4321, 0, 0, 7654]
    check(before, three=[2, 3, 4], five=[5, 6, 7])

    before = fresh()
    batch = ForwardBatch.draft_extend(None, ints(3, 3, 3), 2, ints(1, 1, 2), slots=slots)
    y = run_digits(backend, batch, [4, 5, 9, 9, 7, 8])
    assert y == [4321, 5432, 0, 0, 7654, 8765]
    check(before, three=[2, 3, 4], five=[6, 7, 8])

    before = fresh()
    batch = ForwardBatch.target_verify(None, ints(3, 3, 3), 2, slots=slots)
    y = run_digits(backend, batch, [4, 5, 9, 9, 7, 8])
    assert y == [4321, 5432, 0, 0, 7654, 8765]
    assert_same_bits(pool.layers[0], before, "the pool during verify")
    backend.update_mamba_state_after_mtp_verify(ints(0, 1, 1), req_pool_indices=slots)
    check(before, three=[2, 3, 4], five=[6, 7, 8])


def test_pad_3_no_live_slot_can_be_declared_as_padding() -> None:
    with pytest.raises(SpecError, match=r"null_slots holds 5.*0 or negative"):
        ConvStatePool.adopt(digit_spec(), torch.zeros(1, 10, 3, 1), null_slots=(-1, 5))


def test_pad_3_row_0_is_reserved() -> None:
    pool = cpu(num_slots=4).pool
    assert sorted(pool.alloc(4).tolist()) == [1, 2, 3, 4]
    with pytest.raises(SlotError, match=r"slot 0 is outside 1\.\.4"):
        pool.assign(1, 0)


@pytest.mark.parametrize("dim", [1, 5, 130, 2047, 2048, 2049])
@pytest.mark.parametrize("axis", ["time", "channel"])
def test_pad_5_any_width_beside_a_padded_row(dim: int, axis: str) -> None:
    spec = StateSpec(
        num_layers=1,
        streams=[Stream("a", dim)],
        kernel_size=4,
        num_slots=3,
        max_requests=3,
        window_axis=axis,  # type: ignore[arg-type]
    )
    shape = (3, dim) if axis == "time" else (dim, 3)
    wide = torch.full((6, shape[0] + 2, shape[1] + 2), SENTINEL, dtype=torch.bfloat16)
    window = wide[1:5, 1:-1, 1:-1]
    pool = ConvStatePool.adopt(spec, [window])
    backend = load_backend("cpu", spec=spec, pool=pool)
    harness = Harness(backend, seed=dim, live=[1, 2], x_dtype=torch.bfloat16, strided=True)
    slots = (1, -1, 2)
    harness.run(Step(ForwardMode.DECODE, slots, (1, 1, 1), (4, 4, 4), by_slots=True))
    harness.run(Step(ForwardMode.EXTEND, slots, (2, 1, 5), (4, 4, 0), by_slots=True))
    window.fill_(SENTINEL)
    assert bool((wide == SENTINEL).all())


def test_pad_7_padded_verify_rows_have_windows_of_their_own() -> None:
    """Three requests in a bucket of four, two tokens each, recorded and replayed."""
    backend = cpu(max_draft_tokens=2, max_requests=4)
    backend.init_graph_state(4, 8)
    pool = backend.pool
    for windows in pool.windows.layers:
        windows.fill_(9)
    windows = {4: [1, 2, 3], 2: [2, 3, 4], 6: [3, 4, 5]}
    fill_pool(pool, windows, {1: 4, 2: 2, 3: 6})
    rows, x = ints(0, 0, 0, 0), digit_inputs([9] * 8)
    batch = ForwardBatch.target_verify(rows, ints(3, 3, 3, 3), 2)

    def step() -> Tensor:
        backend.init_forward_metadata_in_graph(batch)
        return backend.short_conv(
            x, digit_weight(), layer_id=0, stream="a", forward_batch=batch, residual=False
        )

    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    recording = record(step)
    rows.copy_(ints(1, 2, 3, 4))
    x.copy_(digit_inputs([4, 5, 5, 6, 6, 7, 8, 8]))
    backend.init_forward_metadata_out_graph(batch)
    recording.replay()
    assert read_digits(recording.result) == [4321, 5432, 5432, 6543, 6543, 7654, 0, 0]
    kept = pool.windows.layers[0][:4, :, :, 0]
    assert kept[0].tolist() == [[2, 3, 4], [3, 4, 5]]
    starts = {kept[row, node].data_ptr() for row in range(4) for node in range(2)}
    assert len(starts) == 8

    backend.update_mamba_state_after_mtp_verify(ints(0, 1, 0), req_pool_indices=ints(1, 2, 3))
    assert [read_window(pool, slot) for slot in (4, 2, 6)] == [[2, 3, 4], [4, 5, 6], [4, 5, 6]]


def test_slot_1_request_rows_are_not_slots() -> None:
    """The entry's map, one row further on: row 0 is the engine's dummy request here."""
    backend = cpu()
    windows = {1: [1, 2, 3], 5: [4, 5, 6], 2: [7, 7, 7], 0: [0, 0, 0]}
    fill_pool(backend.pool, windows, {1: 5, 2: 3, 3: 1})
    assert run_digits(backend, ForwardBatch.decode(ints(3, 1)), [4, 7]) == [4321, 7654]
    expected = {1: [2, 3, 4], 5: [5, 6, 7], 2: [7, 7, 7], 0: [0, 0, 0]}
    assert {slot: read_window(backend.pool, slot) for slot in expected} == expected


def test_slot_3_double_free_is_refused() -> None:
    pool = cpu(num_slots=4).pool
    assert pool.alloc(3).tolist() == [1, 2, 3]
    pool.free(3)
    with pytest.raises(SlotError, match="slot 3 is not in use"):
        pool.free(3)
    assert pool.num_free == 2
    first, second = pool.alloc(1), pool.alloc(1)
    assert first.tolist() != second.tolist()
    assert pool.num_free == 0


def test_slot_4_a_failed_restore_leaves_no_slot_behind() -> None:
    backend = cpu(num_layers=2, num_slots=2)
    pool = backend.pool
    pool.alloc(2)
    fill_pool(pool, {1: [5, 5, 5], 2: [7, 8, 9]})
    exported = [torch.tensor([1.0, 2, 3]).view(1, 3, 1) for _ in range(2)]
    pool.free(2)
    free = pool.num_free

    slots = pool.alloc(1)
    assert slots.tolist() == [2]
    before = [layer.clone() for layer in pool.layers]
    with pytest.raises(SlotError, match="restore: 1 tensors for 2 layers"):
        pool.restore(slots, ExportedState(pool.spec.fingerprint, exported[:1]))
    with pytest.raises(SlotError, match=r"restore: layer 1 is \[1, 2, 1\]"):
        pool.restore(slots, ExportedState(pool.spec.fingerprint, [exported[0], exported[1][:, :2]]))
    for old, layer in zip(before, pool.layers, strict=True):
        assert_same_bits(layer, old, "state after a refused restore")
    pool.free(slots)
    assert pool.num_free == free
    assert int(pool.req_to_slot[1]) == -1
    assert run_digits(backend, ForwardBatch.decode(ints(1)), [4]) == [0]

    again = pool.alloc(1)
    pool.assign(1, again)
    batch = ForwardBatch.extend(ints(1), ints(4), ints(0), num_tokens=4)
    assert run_digits(backend, batch, [1, 2, 3, 4])[-1] == 4321


def test_slot_5_only_the_caller_clears() -> None:
    backend = cpu()
    pool = backend.pool
    pool.alloc(2)
    fill_pool(pool, {1: [1, 2, 3], 2: [7, 8, 9]}, {1: 2})
    pool.restore(2, pool.export(1))
    assert run_digits(backend, ForwardBatch.decode(ints(1)), [4]) == [4321]

    fill_pool(pool, {2: [7, 8, 9]}, {1: 2})
    pool.clear(2)
    assert run_digits(backend, ForwardBatch.decode(ints(1)), [4]) == [4000]


def test_slot_7_a_request_that_joins_has_state_of_its_own() -> None:
    backend = cpu()
    pool = backend.pool
    fill_pool(pool, {})
    pool.assign(1, pool.alloc(1))
    set_window(pool, 1, [1, 2, 3])
    joined = pool.alloc(1)
    pool.clear(joined)
    pool.assign(2, joined)
    pool.free(1)
    assert read_window(pool, int(joined)) == [0, 0, 0]
    assert run_digits(backend, ForwardBatch.decode(ints(2)), [4]) == [4000]
    with pytest.raises(BatchError, match="req_pool_indices holds 9: expected 0 to 8"):
        backend.init_forward_metadata(ForwardBatch.decode(ints(9)))


def test_slot_8_every_slot_comes_back_and_the_dummy_never_enters() -> None:
    pool = cpu(num_slots=4).pool
    pool.assign([1, 2, 3], pool.alloc(3))
    handed_off = pool.export(2)
    pool.free(2)
    with pytest.raises(SlotError, match=r"slot 0 is outside 1\.\.4"):
        pool.free([1, 0])
    pool.free(pool.live_slots())
    assert sorted(pool.alloc(4).tolist()) == [1, 2, 3, 4]
    assert pool.req_to_slot.tolist() == [0] + [-1] * 8
    assert len(handed_off) == 1


@pytest.mark.parametrize("split", [[7], [3, 4], [1, 1, 5], [2, 1, 1, 3], [6, 1], [1] * 7])
def test_len_2_every_split_of_a_prompt_gives_the_same(split: list[int]) -> None:
    backend = cpu()
    fill_pool(backend.pool, {6: [7, 7, 7]})
    y, done = [], 0
    for length in split:
        tokens = list(range(done + 1, done + length + 1))
        y += run_digits(backend, extend([6], [length], [done]), tokens)
        done += length
    assert y == [1000, 2100, 3210, 4321, 5432, 6543, 7654]
    assert read_window(backend.pool, 6) == [5, 6, 7]


def test_len_3_a_last_chunk_shorter_than_the_kernel_keeps_older_columns() -> None:
    backend = cpu()
    fill_pool(backend.pool, {6: [1, 2, 3]})
    assert run_digits(backend, extend([6], [1], [3]), [4]) == [4321]
    assert read_window(backend.pool, 6) == [2, 3, 4]


def test_len_3_the_same_in_a_replay() -> None:
    backend = cpu()
    backend.init_graph_state(2, 4)
    fill_pool(backend.pool, {6: [1, 2, 3], 3: [7, 8, 9]})
    slots, lengths, prefixes = ints(3, 6), ints(2, 2), ints(0, 0)
    x = digit_inputs([1, 2, 3, 4])
    batch = ForwardBatch.extend(None, lengths, prefixes, slots=slots, num_tokens=4)

    def step() -> Tensor:
        backend.init_forward_metadata_in_graph(batch)
        return backend.short_conv(
            x, digit_weight(), layer_id=0, stream="a", forward_batch=batch, residual=False
        )

    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    recording = record(step)
    fill_pool(backend.pool, {6: [1, 2, 3], 3: [7, 8, 9]})
    slots.copy_(ints(6, -1))
    lengths.copy_(ints(1, 0))
    prefixes.copy_(ints(3, 0))
    x.copy_(digit_inputs([4, 9, 9, 9]))
    recording.replay()
    assert read_digits(recording.result) == [4321, 0, 0, 0]
    assert read_window(backend.pool, 6) == [2, 3, 4]
    assert read_window(backend.pool, 3) == [7, 8, 9]


def test_len_6_zero_length_rows_do_nothing() -> None:
    backend = cpu()
    fill_pool(backend.pool, {1: [9, 9, 9], 2: [7, 8, 9], 3: [9, 9, 9], 4: [5, 5, 5]})
    batch = extend([1, 2, 3, 4], [2, 0, 1, 0], [0, 3, 0, 0])
    assert run_digits(backend, batch, [1, 2, 3]) == [1000, 2100, 3000]
    windows = [read_window(backend.pool, slot) for slot in (1, 2, 3, 4)]
    assert windows == [[0, 1, 2], [7, 8, 9], [0, 0, 3], [5, 5, 5]]
    meta = backend.forward_metadata
    assert meta is not None
    assert meta.query_start_loc.tolist() == [0, 2, 2, 3, 3]


def test_len_6_a_zero_length_row_takes_no_snapshot() -> None:
    backend = cpu()
    fill_pool(backend.pool, {2: [7, 8, 9], 5: [1, 1, 1]})
    batch = ForwardBatch.extend(
        None, ints(0), ints(3), slots=ints(2), num_tokens=0, mamba_track_indices=ints(5)
    )
    assert run_digits(backend, batch, []) == []
    assert read_window(backend.pool, 5) == [1, 1, 1]
    meta = backend.forward_metadata
    assert meta is not None
    assert meta.track_cache_indices.tolist() == [-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_len_7_a_batch_without_tokens(dtype: torch.dtype) -> None:
    backend = cpu(dim=5, dtype=dtype)
    fill_pool(backend.pool, {3: [1, 2, 3], 6: [4, 5, 6]})
    before = backend.pool.layers[0].clone()
    batch = extend([3, 6], [0, 0], [3, 0])
    backend.init_forward_metadata(batch)
    weight = digit_weight(5, dtype)
    with pytest.raises(
        BatchError, match=r"x has shape \[5, 0\]: expected packed \[T, D\] = \[0, 5"
    ):
        backend.short_conv(
            torch.empty(5, 0, dtype=dtype), weight, layer_id=0, stream="a", forward_batch=batch
        )
    y = backend.short_conv(
        torch.empty(0, 5, dtype=dtype), weight, layer_id=0, stream="a", forward_batch=batch
    )
    assert (y.shape, y.dtype, y.device.type) == ((0, 5), dtype, "cpu")
    assert_same_bits(backend.pool.layers[0], before, "the pool")


def test_len_7_a_batch_without_rows_but_with_padding_tokens() -> None:
    backend = cpu()
    empty = ints()
    batch = ForwardBatch.extend(empty, empty, empty, num_tokens=3)
    assert run_digits(backend, batch, [1, 2, 3]) == [0, 0, 0]


def test_len_9_the_state_is_the_last_real_tokens() -> None:
    backend = cpu()
    fill_pool(backend.pool, {}, {1: 4, 2: 7})
    batch = ForwardBatch.extend(ints(1, 2), ints(5, 3), ints(0, 0), num_tokens=10)
    y = run_digits(backend, batch, [1, 2, 3, 4, 5, 1, 2, 3, 0, 0])
    assert y[-2:] == [0, 0]
    assert (read_window(backend.pool, 4), read_window(backend.pool, 7)) == ([3, 4, 5], [1, 2, 3])
    assert run_digits(backend, ForwardBatch.decode(ints(1, 2)), [6, 4]) == [6543, 4321]


def test_len_11_the_state_holds_inputs() -> None:
    backend = cpu()
    fill_pool(backend.pool, {}, {1: 4})
    run_digits(backend, ForwardBatch.extend(ints(1), ints(4), ints(0)), [1, 2, 3, 4])
    assert backend.pool.conv(0, "a")[4, :, 0].tolist() == [2, 3, 4]
    assert run_digits(backend, ForwardBatch.decode(ints(1)), [5]) == [5432]


def test_len_12_a_second_prefill_resumes_the_first() -> None:
    backend = cpu()
    fill_pool(backend.pool, {}, {1: 4})
    run_digits(backend, ForwardBatch.extend(ints(1), ints(3), ints(0)), [1, 2, 3])
    y = run_digits(backend, ForwardBatch.extend(ints(1), ints(2), ints(3)), [4, 5])
    assert y == [4321, 5432]
    assert read_window(backend.pool, 4) == [3, 4, 5]


@pytest.mark.parametrize("padded", [0, -1])
def test_pad_9_a_padded_row_takes_no_snapshot(padded: int) -> None:
    backend = cpu(track_interval=1, chunk_size=1)
    check_padded_rows_take_no_snapshot(backend, padded)


@pytest.mark.parametrize("layout", ["inputs", "dense", "dedup"])
def test_slot_10_a_fresh_row_reads_zeros_in_decode_and_verify(layout: str) -> None:
    spec = replace(digit_spec(max_draft_tokens=2), window_layout=layout)
    check_fresh_rows_read_zeros(load_backend("cpu", spec=spec))
