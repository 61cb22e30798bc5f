"""Known faults of NPU back ends, on a simulated device.

Names carry the id of the entry in docs/reference/known-faults.md. Outputs read as digits: 4321 is
token 4 after the window [1, 2, 3].
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sconv import ConvStatePool, ForwardBatch, ForwardMode, StateSpec, Stream, load_backend
from sconv.testing.digits import (
    digit_inputs,
    digit_spec,
    digit_weight,
    fill_pool,
    read_digits,
    read_window,
    run_digits,
)
from sconv.testing.harness import Harness
from sconv.testing.steps import Step
from sconv_contract.behaviour.capturing import capture

SENTINEL = 777.0
DIMS = [1, 5, 130, 2047, 2048, 2049]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="npu")


@pytest.mark.parametrize("axis", ["time", "channel"])
@pytest.mark.parametrize("dim", DIMS)
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
    wide = torch.full((6, shape[0] + 2, shape[1] + 2), SENTINEL, dtype=torch.bfloat16, device="npu")
    window = wide[1:5, 1:-1, 1:-1]
    backend = load_backend("ascend", spec=spec, pool=ConvStatePool.adopt(spec, [window]))
    harness = Harness(backend, seed=dim, live=[1, 2], x_dtype=torch.bfloat16, strided=True)
    slots = (1, -1, 2)
    harness.run(Step(ForwardMode.DECODE, slots, (1, 1, 1), (4, 4, 4), by_slots=True))
    harness.run(Step(ForwardMode.EXTEND, slots, (2, 1, 5), (4, 4, 0), by_slots=True))
    window.fill_(SENTINEL)
    assert bool((wide == SENTINEL).all())


@pytest.mark.parametrize("dim", DIMS)
def test_kern_8_weights_at_the_end_of_their_memory(dim: int) -> None:
    spec = StateSpec(
        num_layers=1, streams=[Stream("a", dim)], kernel_size=4, num_slots=2, max_requests=2
    )
    backend = load_backend("ascend", spec=spec)
    harness = Harness(backend, seed=dim, live=[2], bias=False)
    layer = harness.layers[0, "a"]
    end = torch.full((3 + dim, 4), float("nan"), device="npu")
    end[3:].copy_(layer.weight)
    layer.weight.set_(end[3:])
    harness.run(Step(ForwardMode.DECODE, (2,), (1,), (4,), by_slots=True))


def test_pad_7_padded_verify_rows_have_windows_of_their_own() -> None:
    """Three requests in a bucket of four, two tokens each, captured and replayed."""
    backend = load_backend("ascend", spec=digit_spec(max_draft_tokens=2, max_requests=4))
    backend.init_graph_state(4, 8)
    pool = backend.pool
    for windows in pool.windows.layers:
        windows.fill_(9)
    fill_pool(pool, {4: [1, 2, 3], 2: [2, 3, 4], 6: [3, 4, 5]}, {1: 4, 2: 2, 3: 6})
    rows, x = ints(0, 0, 0, 0), digit_inputs([9] * 8, device="npu")
    weight = digit_weight(device="npu")
    batch = ForwardBatch.target_verify(rows, ints(3, 3, 3, 3), 2)

    def step() -> Tensor:
        backend.init_forward_metadata_in_graph(batch)
        return backend.short_conv(
            x, weight, layer_id=0, stream="a", forward_batch=batch, residual=False
        )

    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    replay, result = capture(backend.device, step)
    rows.copy_(ints(1, 2, 3, 4))
    x.copy_(digit_inputs([4, 5, 5, 6, 6, 7, 8, 8], device="npu"))
    backend.init_forward_metadata_out_graph(batch)
    replay()
    assert read_digits(result) == [4321, 5432, 5432, 6543, 6543, 7654, 0, 0]
    kept = pool.windows.layers[0][:4, :, :, 0]
    assert kept[0].tolist() == [[2, 3, 4], [3, 4, 5]]
    starts = {kept[row, node].data_ptr() for row in range(4) for node in range(2)}
    assert len(starts) == 8
    backend.update_mamba_state_after_mtp_verify(ints(0, 1, 0, -1), None, None, ints(1, 2, 3, 4))
    assert read_window(pool, 4) == [2, 3, 4]
    assert read_window(pool, 2) == [4, 5, 6]
    assert read_window(pool, 6) == [4, 5, 6]


def test_pad_1_a_padded_tail_of_a_replay_is_zero_and_writes_nothing() -> None:
    """The rows behind the last request point at the dummy slot or at none, and change by replay."""
    backend = load_backend("ascend", spec=digit_spec(max_requests=5))
    backend.init_graph_state(5, 5)
    pool, weight = backend.pool, digit_weight(device="npu")
    fill_pool(pool, {2: [1, 2, 3], 7: [4, 5, 6]})
    slots, x = ints(2, 7, -1, 0, 0), digit_inputs([1, 1, 1, 1, 1], device="npu")
    batch = ForwardBatch.decode(slots=slots)

    def step() -> Tensor:
        backend.init_forward_metadata_in_graph(batch)
        return backend.short_conv(
            x, weight, layer_id=0, stream="a", forward_batch=batch, residual=False
        )

    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    replay, result = capture(backend.device, step)
    fill_pool(pool, {2: [1, 2, 3], 7: [4, 5, 6]})
    slots.copy_(ints(2, -1, -1, -1, -1))
    x.copy_(digit_inputs([4, 8, 8, 8, 8], device="npu"))
    backend.init_forward_metadata_out_graph(batch)
    replay()
    assert read_digits(result) == [4321, 0, 0, 0, 0]
    assert (read_window(pool, 2), read_window(pool, 7)) == ([2, 3, 4], [4, 5, 6])


@pytest.mark.parametrize("channel_axis", [False, True])
@pytest.mark.parametrize("width", [3, 4, 6])
def test_layout_3_the_window_is_at_the_end_of_a_wider_slot(width: int, channel_axis: bool) -> None:
    spec = digit_spec(dim=2, channel_axis=channel_axis)
    shape = (10, 2, width) if channel_axis else (10, width, 2)
    buffer = torch.full(shape, SENTINEL, device="npu")
    backend = load_backend("ascend", spec=spec, pool=ConvStatePool.adopt(spec, [buffer]))
    batch = ForwardBatch.extend(None, ints(3), ints(0), slots=ints(6), num_tokens=3)
    assert run_digits(backend, batch, [1, 2, 3]) == [1000, 2100, 3210]
    slot = buffer[6, 0] if channel_axis else buffer[6, :, 0]
    assert slot.tolist() == [SENTINEL] * (width - 3) + [1, 2, 3]
    assert run_digits(backend, ForwardBatch.decode(slots=ints(6)), [4]) == [4321]
    assert slot.tolist() == [SENTINEL] * (width - 3) + [2, 3, 4]


@pytest.mark.parametrize("axis", ["time", "channel"])
def test_layout_8_the_pool_has_the_declared_shape(axis: str) -> None:
    spec = StateSpec(
        num_layers=1,
        streams=[Stream("a", 5)],
        kernel_size=4,
        num_slots=3,
        max_requests=2,
        window_axis=axis,  # type: ignore[arg-type]
    )
    backend = load_backend("ascend", spec=spec)
    expected = (4, 3, 5) if axis == "time" else (4, 5, 3)
    assert tuple(backend.pool.layers[0].shape) == expected
    assert axis in backend.info.capabilities.window_axes


def test_kern_7_no_half_precision_between_bfloat16_tensors() -> None:
    spec = digit_spec(dtype=torch.bfloat16)
    backend = load_backend("ascend", spec=spec)
    batch = ForwardBatch.decode(slots=ints(3))
    backend.init_forward_metadata(batch)
    y = backend.short_conv(
        torch.tensor([[70000.0]], dtype=torch.bfloat16).to("npu"),
        torch.tensor([[0.0, 0.0, 0.0, 1.0]], dtype=torch.bfloat16).to("npu"),
        layer_id=0,
        stream="a",
        forward_batch=batch,
        residual=False,
    )
    assert y.item() == 70144.0


@pytest.mark.parametrize("others", [[6, 7, 8], [6, 7, 8, 9, 10]])
def test_spec_12_a_commit_after_another_forward_finds_its_own_slots(others: list[int]) -> None:
    """The slots are those of the request rows of the call, not of what the last forward left."""
    spec = digit_spec(num_slots=10, max_requests=10, max_draft_tokens=3)
    backend = load_backend("ascend", spec=spec)
    pool, mine, last = backend.pool, [1, 2, 3, 4, 5], [0, 1, 2, 0, 1]
    fill_pool(
        pool,
        {slot: [1, 2, 3] for slot in mine + others},
        {slot: 11 - slot for slot in range(1, 11)},
    )
    rows = ints(*[11 - slot for slot in mine])
    batch = ForwardBatch.target_verify(rows, ints(3, 3, 3, 3, 3), 3)
    run_digits(backend, batch, [4, 5, 6] * 5)
    backend.init_forward_metadata(ForwardBatch.decode(ints(*[11 - slot for slot in others])))
    backend.update_mamba_state_after_mtp_verify(ints(*last), None, None, rows)
    windows = {0: [2, 3, 4], 1: [3, 4, 5], 2: [4, 5, 6]}
    for slot, kept in zip(mine, last, strict=True):
        assert read_window(pool, slot) == windows[kept]
    for slot in others:
        assert read_window(pool, slot) == [1, 2, 3]


def test_dev_1_a_second_device_is_not_the_current_one() -> None:
    """All of a step on npu:1 while npu:0 is current; tensors of two devices are refused."""
    assert torch.npu.current_device() == 0
    backend = load_backend("ascend", spec=digit_spec(max_draft_tokens=2), device="npu:1")
    assert backend.pool.layers[0].device == torch.device("npu:1")
    fill_pool(backend.pool, {3: [1, 2, 3]}, {2: 3})
    rows = ints(2).to("npu:1")
    assert run_digits(backend, ForwardBatch.decode(rows), [4]) == [4321]
    verify = ForwardBatch.target_verify(rows, rows, 2)
    assert run_digits(backend, verify, [5, 6]) == [5432, 6543]
    backend.update_mamba_state_after_mtp_verify(rows - 2, None, None, rows)
    assert read_window(backend.pool, 3) == [3, 4, 5]
    with pytest.raises(ValueError, match="npu:0"):
        backend.init_forward_metadata(ForwardBatch.decode(ints(2)))
    assert torch.npu.current_device() == 0
