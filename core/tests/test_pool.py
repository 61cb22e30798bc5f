"""The life of a slot in a pool of sconv's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sconv import ConvStatePool, PoolExhaustedError, SlotError, StateSpec, Stream
from sconv.testing.harness import assert_same_bits
from sconv.testing.poison import poison_

PER_LAYER = [[Stream("k", 3), Stream("v", 2)], [Stream("k", 4)]]


def make(**changes: Any) -> ConvStatePool:
    """A pool of NaN with slots 1 to 4 handed out and numbered values in them."""
    options: dict[str, Any] = {
        "num_layers": 2,
        "streams": [Stream("k", 3), Stream("v", 2)],
        "kernel_size": 4,
        "num_slots": 6,
        "max_requests": 5,
        "dtype": torch.float32,
    }
    pool = ConvStatePool(StateSpec(**{**options, **changes}))
    pool.alloc(4)
    for layer in pool.layers:
        poison_(layer)
        layer[1:5] = torch.arange(layer[1:5].numel(), dtype=layer.dtype).view_as(layer[1:5])
    return pool


VARIANTS = [
    pytest.param({}, id="time"),
    pytest.param({"window_axis": "channel"}, id="channel"),
    pytest.param({"streams": PER_LAYER}, id="per-layer"),
    pytest.param({"streams": PER_LAYER, "window_axis": "channel"}, id="per-layer-channel"),
    pytest.param({"dtype": torch.bfloat16, "max_draft_tokens": 3}, id="bf16"),
]


def copies(pool: ConvStatePool) -> list[Tensor]:
    return [layer.clone() for layer in pool.layers]


def assert_only(pool: ConvStatePool, before: list[Tensor], changed: list[int]) -> None:
    """All rows but some hold the bits that they held."""
    same = [row for row in range(pool.num_rows) if row not in changed]
    for number, (old, layer) in enumerate(zip(before, pool.layers, strict=True)):
        assert_same_bits(layer[same], old[same], f"other slots of layer {number}")


@pytest.mark.parametrize("changes", VARIANTS)
def test_shapes_and_bytes(changes: dict[str, Any]) -> None:
    pool = make(**changes)
    spec = pool.spec
    assert pool.num_rows == 7
    for layer_id, layer in enumerate(pool.layers):
        assert tuple(layer.shape) == (7, *spec.window_shape(layer_id))
    elements = sum(7 * 3 * spec.layer_dim(layer) for layer in range(2))
    size = torch.empty((), dtype=spec.dtype).element_size()
    windows = 0
    if spec.max_draft_tokens > 1:
        windows = sum(5 * 3 * 3 * spec.layer_dim(layer) for layer in range(2)) * size
    assert pool.nbytes_by_part == {"state": elements * size, "verify_windows": windows}
    assert pool.nbytes == elements * size + windows
    assert (pool.stacked is not None) == spec.uniform


def test_a_stream_is_a_view_of_its_channels() -> None:
    for axis in ("time", "channel"):
        pool = make(window_axis=axis)
        part = pool.conv(1, "v")
        assert tuple(part.shape) == ((7, 3, 2) if axis == "time" else (7, 2, 3))
        part[5] = 9
        layer = pool.layers[1][5] if axis == "time" else pool.layers[1][5].T
        assert layer[:, 3:].tolist() == [[9, 9]] * 3
        assert bool(layer[:, :3].isnan().all())
        stacked = pool.stacked
        assert stacked is not None
        assert stacked[1, 5].data_ptr() == pool.layers[1][5].data_ptr()


def test_alloc_is_host_work_and_leaves_what_is_there() -> None:
    pool = make()
    before = copies(pool)
    slots = pool.alloc(2)
    assert (slots.tolist(), slots.dtype, slots.device.type) == ([5, 6], torch.int64, "cpu")
    assert_only(pool, before, [])
    assert pool.alloc(0).tolist() == []
    with pytest.raises(PoolExhaustedError, match=r"alloc\(1\): 0 of 6"):
        pool.alloc(1)


@pytest.mark.parametrize("changes", VARIANTS)
def test_clear_zeroes_these_slots_in_every_layer(changes: dict[str, Any]) -> None:
    pool = make(**changes)
    before = copies(pool)
    pool.clear(torch.tensor([3, 1], dtype=torch.int32))
    assert_only(pool, before, [1, 3])
    for layer in pool.layers:
        assert not layer[[1, 3]].any()


@pytest.mark.parametrize("changes", VARIANTS)
def test_copy_takes_every_layer_along(changes: dict[str, Any]) -> None:
    pool = make(**changes)
    before = copies(pool)
    pool.copy([2, 2], [4, 1])
    assert_only(pool, before, [1, 4])
    for layer, old in zip(pool.layers, before, strict=True):
        for slot in (1, 4):
            assert_same_bits(layer[slot], old[2], f"slot {slot}")


@pytest.mark.parametrize("changes", VARIANTS)
def test_fork_is_a_new_slot_with_the_same_windows(changes: dict[str, Any]) -> None:
    pool = make(**changes)
    before = copies(pool)
    assert pool.fork([3, 3]).tolist() == [5, 6]
    assert_only(pool, before, [5, 6])
    for layer, old in zip(pool.layers, before, strict=True):
        assert_same_bits(layer[5], old[3], "first fork")
        assert_same_bits(layer[6], old[3], "second fork")


def test_a_fork_that_fails_keeps_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make()

    def fails(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(ConvStatePool, "copy", fails)
    with pytest.raises(MemoryError):
        pool.fork(1)
    assert pool.live_slots() == [1, 2, 3, 4]


@pytest.mark.parametrize("changes", VARIANTS)
def test_an_export_is_restored_bit_for_bit(changes: dict[str, Any]) -> None:
    pool, other = make(**changes), make(**changes)
    pool.layers[1][2, 0, 0] = float("nan")
    saved = pool.export([2, 4])
    before = copies(other)
    other.restore([3, 1], saved)
    assert_only(other, before, [1, 3])
    for layer, source in zip(other.layers, pool.layers, strict=True):
        assert_same_bits(layer[[3, 1]], source[[2, 4]], "restored slots")
    for part in saved:
        part.fill_(7)
    assert not bool((pool.layers[0][2] == 7).all())


def test_request_rows_follow_their_slots() -> None:
    pool = make()
    assert pool.req_to_slot.dtype is torch.int32
    assert pool.req_to_slot.tolist() == [0, -1, -1, -1, -1, -1]
    pool.assign([4, 1], [2, 3])
    pool.assign(5, torch.tensor([1]))
    assert pool.req_to_slot.tolist() == [0, 3, -1, -1, 2, 1]
    pool.assign([4, 2], [4, 2])
    assert pool.req_to_slot.tolist() == [0, 3, 2, -1, 4, 1]
    pool.free([3, 2])
    assert pool.req_to_slot.tolist() == [0, -1, -1, -1, 4, 1]
    pool.assign(5, -1)
    assert pool.req_to_slot.tolist() == [0, -1, -1, -1, 4, -1]
    assert pool.live_slots() == [1, 4]


def test_the_map_stays_where_it_is() -> None:
    """Recorded steps read it."""
    pool = make()
    address = pool.req_to_slot.data_ptr()
    pool.assign([1, 2, 3], [1, 2, 3])
    pool.free([1, 2])
    pool.assign(3, -1)
    assert pool.req_to_slot.data_ptr() == address


def test_two_requests_cannot_swap_slots_through_a_shared_one() -> None:
    pool = make()
    pool.assign([1, 2], [1, 2])
    with pytest.raises(SlotError, match="belongs to another request row already"):
        pool.assign(3, 2)
    pool.assign([1, 2], [2, 1])
    assert pool.req_to_slot.tolist() == [0, 2, 1, -1, -1, -1]


@pytest.mark.parametrize("ids", [3, [3], (3,), torch.tensor(3), torch.tensor([3]), range(3, 4)])
def test_ids_come_in_any_form(ids: Any) -> None:
    pool = make()
    pool.free(ids)
    assert pool.live_slots() == [1, 2, 4]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (
            torch.tensor([1.0]),
            r"got a torch.float32 tensor of shape \[1\]; expected int32 or int64",
        ),
        (torch.tensor([[1]]), r"got a torch.int64 tensor of shape \[1, 1\]"),
        (torch.tensor([True]), "got a torch.bool tensor"),
        ([1.0], r"got \[1.0\]; expected an id, a sequence of ids or a tensor"),
        ([True], "got \\[True\\]; expected an id"),
        (True, "got True; expected an id"),
        (b"\x01", "got b'.*'; expected an id"),
        (bytearray(b"\x01"), "expected an id"),
        ({1: 2}, "got {1: 2}; expected an id"),
        ({1, 2}, "got {1, 2}; expected an id"),
        ([torch.tensor(True)], "expected an id"),
        (torch.tensor([1]).to_sparse(), "a tensor that has the layout sparse_coo"),
        (torch.tensor([1], device="meta"), "a tensor on meta, without values"),
        (None, "got None; expected an id"),
        (1.5, "got 1.5; expected an id"),
    ],
)
def test_type_1_ids_are_ints(ids: Any, message: str) -> None:
    pool = make()
    with pytest.raises(SlotError, match=message):
        pool.free(ids)
    assert pool.live_slots() == [1, 2, 3, 4]


def test_empty_lists_do_nothing() -> None:
    pool = make()
    before = copies(pool)
    pool.free([])
    pool.clear([])
    pool.copy([], [])
    pool.assign([], [])
    assert pool.fork([]).tolist() == []
    pool.restore([], pool.export([]))
    assert_only(pool, before, [])


def test_state_made_under_inference_mode_can_be_written_outside() -> None:
    with torch.inference_mode():
        pool = make(max_draft_tokens=2)
    pool.clear([1])
    pool.assign(1, 1)
    pool.windows.layers[0].zero_()
    assert not pool.layers[0][1].any()
