"""State that an engine owns: what is accepted, what is refused, and how its ids are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sconv import BatchError, ConvStatePool, SlotError, SpecError, StateSpec, Stream
from sconv.errors import GraphBufferError, PoolError
from sconv.testing.harness import assert_same_bits

DIM = 5


def spec(**changes: Any) -> StateSpec:
    options: dict[str, Any] = {
        "num_layers": 2,
        "streams": [Stream("a", 2), Stream("b", 3)],
        "kernel_size": 4,
        "num_slots": 6,
        "max_requests": 4,
        "dtype": torch.float32,
    }
    return StateSpec(**{**options, **changes})


def ids(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def test_one_stacked_tensor_is_used_where_it_lies() -> None:
    stacked = torch.zeros(2, 9, 3, DIM)
    pool = ConvStatePool.adopt(spec(), stacked)
    assert pool.num_rows == 9
    pool.conv(1, "b")[4] = 1
    assert stacked[1, 4, :, 2:].tolist() == [[1, 1, 1]] * 3
    assert int(stacked.sum()) == 9
    assert pool.stacked is not None
    assert pool.stacked.data_ptr() == stacked.data_ptr()


def test_one_tensor_per_layer_with_any_outer_strides() -> None:
    buffers = [torch.zeros(9, 8, 2 * DIM) for _ in range(2)]
    pool = ConvStatePool.adopt(spec(), [buffer[:, 2:5, DIM:] for buffer in buffers])
    pool.conv(0, "a")[3] = 1
    assert buffers[0][3, 2:5, DIM : DIM + 2].tolist() == [[1, 1]] * 3
    assert int(buffers[0].sum()) == 6
    assert int(buffers[1].sum()) == 0
    assert pool.stacked is None


@pytest.mark.parametrize("axis", ["time", "channel"])
def test_the_window_is_the_end_of_a_wider_slot(axis: str) -> None:
    shape = (2, 9, 5, DIM) if axis == "time" else (2, 9, DIM, 5)
    stacked = torch.zeros(shape)
    pool = ConvStatePool.adopt(spec(window_axis=axis), stacked)
    for layer in pool.layers:
        layer.fill_(1)
    ones = stacked if axis == "time" else stacked.transpose(2, 3)
    assert ones[:, :, :2].sum() == 0
    assert ones[:, :, 2:].sum() == 2 * 9 * 3 * DIM
    assert pool.nbytes_by_part["state"] == 4 * stacked.numel()


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: torch.zeros(3, 9, 3, DIM), "adopt: 3 layers, the spec has 2"),
    (lambda: [torch.zeros(9, 3, DIM)], "adopt: 1 layers, the spec has 2"),
    (
        lambda: torch.zeros(2, 9, 3, DIM, dtype=torch.bfloat16),
        "layer 0 is torch.bfloat16, the spec says torch.float32",
    ),
    (
        lambda: [torch.zeros(9, 3, DIM), torch.zeros(9, 3, DIM).half()],
        "layer 1 is torch.float16",
    ),
    (
        lambda: [torch.zeros(9, 3, DIM), torch.zeros(9, 3, DIM, device="meta")],
        "layer 1 is on meta, the others on cpu",
    ),
    (lambda: torch.zeros(2, 9, 3 * DIM), r"layer 0 has shape \[9, 15\]: .*3 dimensions"),
    (
        lambda: torch.zeros(2, 9, DIM, 3),
        r"layer 0 has shape \[9, 5, 3\]: expected \[rows, K-1, D\] with D=5",
    ),
    (lambda: torch.zeros(2, 9, 2, DIM), r"a window of at least K-1=3"),
    (lambda: torch.zeros(2, 1, 3, DIM), "layer 0 has 1 rows: expected the dummy row 0 and a slot"),
    (
        lambda: [torch.zeros(9, 3, DIM), torch.zeros(8, 3, DIM)],
        "layer 1 has 8 rows, layer 0 has 9: a slot is one row of every layer",
    ),
    (
        lambda: torch.zeros(2, 9, DIM, 3).transpose(2, 3),
        r"layer 0 has strides \[15, 1, 3\]: the last one must be 1",
    ),
]


@pytest.mark.parametrize(("build", "message"), WRONG)
def test_memory_that_does_not_fit_is_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ConvStatePool.adopt(spec(), build())
    late = ConvStatePool.adopt(spec(), device="cpu")
    with pytest.raises(SpecError):
        late.bind(build())
    with pytest.raises(PoolError, match="no state yet"):
        _ = late.layers


def test_the_axis_is_declared_and_not_guessed() -> None:
    """A square window fits both ways; only the declaration tells them apart."""
    for axis in ("time", "channel"):
        square = spec(window_axis=axis, streams=[Stream("a", 1), Stream("b", 2)])
        pool = ConvStatePool.adopt(square, torch.zeros(2, 9, 3, 3))
        assert tuple(pool.conv(0, "b").shape) == ((9, 3, 2) if axis == "time" else (9, 2, 3))


def test_state_is_bound_late() -> None:
    pool = ConvStatePool.adopt(spec(), device="cpu")
    for use in (
        lambda: pool.num_rows,
        lambda: pool.nbytes,
        lambda: pool.conv(0, "a"),
        lambda: pool.clear(1),
    ):
        with pytest.raises(PoolError, match=r"no state yet: call pool.bind\(tensors\) first"):
            use()
    stacked = torch.zeros(2, 9, 3, DIM)
    pool.bind(stacked)
    assert pool.layers[1].data_ptr() == stacked[1].data_ptr()


def test_the_engine_hands_out_its_own_slots() -> None:
    pool = ConvStatePool.adopt(spec(), torch.zeros(2, 9, 3, DIM))
    for use in (
        lambda: pool.alloc(1),
        lambda: pool.free(1),
        lambda: pool.fork(1),
        lambda: pool.num_free,
        lambda: pool.live_slots(),
    ):
        with pytest.raises(PoolError, match="ask the engine's allocator"):
            use()


def test_slots_of_an_adopted_pool_are_moved_and_cleared() -> None:
    stacked = torch.randn(2, 9, 3, DIM)
    before = stacked.clone()
    pool = ConvStatePool.adopt(spec(), stacked)
    pool.copy([8, 8], [1, 2])
    pool.clear(7)
    saved = pool.export(3)
    pool.restore(4, saved)
    assert_same_bits(stacked[:, [1, 2]], before[:, [8, 8]], "copies")
    assert not stacked[:, 7].any()
    assert_same_bits(stacked[:, 4], before[:, 3], "restored")
    others = [0, 3, 5, 6, 8]
    assert_same_bits(stacked[:, others], before[:, others], "other rows")
    for bad in ([0], [9], [2, 2], [-1]):
        with pytest.raises(SlotError):
            pool.clear(bad)
    pool.assign([1, 3], [8, 5])
    assert pool.req_to_slot.tolist() == [0, 8, -1, 5, -1]
    with pytest.raises(SlotError, match="names a slot twice"):
        pool.assign([1, 3], [6, 6])


TABLE = ids(0, -1, 4, 2, -1, 3)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("null_slots", "translate", "given", "expected"),
    [
        ((-1,), None, (3, 0, -1, 8), (3, 0, -1, 8)),
        ((0,), None, (3, 0, -1, 8), (3, -1, -1, 8)),
        ((-1, 0), None, (3, 0, -1, -7), (3, -1, -1, -1)),
        ((-1,), TABLE, (3, 0, -1, 5, 1), (2, 0, -1, 3, -1)),
        ((0,), TABLE, (3, 0, -1, 5, 4), (2, -1, -1, 3, -1)),
        ((-1,), TABLE.int(), (2, 3, -1), (4, 2, -1)),
        ((-1,), lambda known: TABLE[known], (2, -1, 5, 1), (4, -1, 3, -1)),
        ((0,), lambda known: TABLE[known], (2, 0, 5), (4, -1, 3)),
    ],
)
def test_ids_become_rows_of_the_pool(
    null_slots: tuple[int, ...],
    translate: Any,
    given: tuple[int, ...],
    expected: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    pool = ConvStatePool.adopt(
        spec(),
        torch.zeros(2, 9, 3, DIM),
        null_slots=null_slots,
        virtual_to_physical=translate,
    )
    tensor = ids(*given, dtype=dtype)
    assert pool.translate_(tensor) is tensor
    assert (tuple(tensor.tolist()), tensor.dtype) == (expected, dtype)
    assert pool.translates_on_host is callable(translate)


@pytest.mark.parametrize("slot", [2**40, 2**31, 9, 0, -2])
def test_type_1_an_engines_slot_is_one_of_its_rows(slot: int) -> None:
    pool = ConvStatePool.adopt(spec(), torch.zeros(2, 9, 3, DIM))
    pool.assign(2, 8)
    with pytest.raises(SlotError, match=rf"assign: slot {slot} is outside 1\.\.8"):
        pool.assign([2, 4], [-1, slot])
    assert pool.req_to_slot.tolist() == [0, -1, 8, -1, -1]


def test_type_1_an_engines_virtual_slot_is_one_of_its_table() -> None:
    state = torch.zeros(2, 9, 3, DIM)
    pool = ConvStatePool.adopt(spec(), state, virtual_to_physical=TABLE)
    pool.assign([1, 2], [0, 5])
    with pytest.raises(SlotError, match=r"slot 6 is outside 0\.\.5"):
        pool.assign(3, 6)
    anywhere = ConvStatePool.adopt(spec(), state, virtual_to_physical=lambda known: known)
    anywhere.assign(1, 10**6)
    with pytest.raises(SlotError, match=r"outside 0\.\.2147483647"):
        anywhere.assign(2, 2**31)
    null = ConvStatePool.adopt(spec(), state, null_slots=(-1, 0))
    null.assign([1, 2], [0, -1])


ANSWERS: dict[str, Any] = {
    "floats": lambda known: known.float(),
    "another shape": lambda known: known[:1],
    "a list": lambda known: known.tolist(),
    "nothing": lambda known: None,
    "another device": lambda known: known.to("meta"),
    "sparse": lambda known: known.to_sparse(),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_type_1_a_translation_gives_a_row_for_each_id(case: str) -> None:
    pool = ConvStatePool.adopt(
        spec(), torch.zeros(2, 9, 3, DIM), virtual_to_physical=ANSWERS[case], null_slots=(-1, 0)
    )
    given = ids(3, 0, -1)
    with pytest.raises(BatchError, match=r"virtual_to_physical returned .*: expected an int32 or"):
        pool.translate_(given)
    assert given.tolist() == [3, 0, -1]


def test_a_translation_never_sees_a_negative_id() -> None:
    """A table need not end in a sentinel for -1."""
    seen: list[list[int]] = []

    def translate(known: Tensor) -> Tensor:
        seen.append(known.tolist())
        return known

    pool = ConvStatePool.adopt(spec(), torch.zeros(2, 9, 3, DIM), virtual_to_physical=translate)
    pool.translate_(ids(4, -1, -3))
    assert seen == [[4, 0, 0]]


def test_a_positive_id_cannot_mean_no_slot() -> None:
    with pytest.raises(SpecError, match="null_slots holds 9: expected 0 or negative ids"):
        ConvStatePool.adopt(spec(), torch.zeros(2, 9, 3, DIM), null_slots=(9,))


def test_verify_windows_may_be_the_engines_too() -> None:
    speculative = spec(max_draft_tokens=2)
    windows = [torch.zeros(3, 2, 3, DIM) for _ in range(2)]
    pool = ConvStatePool.adopt(speculative, torch.zeros(2, 9, 3, DIM), windows=windows)
    assert pool.windows.rows == 3
    assert pool.windows.layers[1].data_ptr() == windows[1].data_ptr()
    assert pool.nbytes_by_part["verify_windows"] == 4 * 2 * windows[0].numel()
    pool.windows.reserve(3)
    with pytest.raises(GraphBufferError, match=r"adopted .*have rows=3, need rows=4"):
        pool.windows.reserve(4)
    for wrong in (windows[:1], [windows[0], windows[1].half()], [w[:, :1] for w in windows]):
        with pytest.raises(SpecError, match="windows: "):
            ConvStatePool.adopt(speculative, torch.zeros(2, 9, 3, DIM), windows=wrong)
