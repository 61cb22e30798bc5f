"""What a spec accepts, and how it names what it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sconv import SpecError, StateSpec, Stream
from sconv.state.spec import StreamSlice


def spec(**changes: Any) -> StateSpec:
    options: dict[str, Any] = {
        "num_layers": 2,
        "streams": [Stream("k", 3), Stream("v", 5)],
        "kernel_size": 4,
        "num_slots": 6,
        "max_requests": 4,
    }
    return StateSpec(**{**options, **changes})


def test_streams_lie_side_by_side_in_order() -> None:
    made = spec()
    assert made.stream_slice(1, "k") == StreamSlice(0, 3)
    assert made.stream_slice(1, "v") == StreamSlice(3, 8)
    assert made.stream_slice(1, "v").dim == 5
    assert made.layer_dim(0) == 8
    assert made.uniform


def test_layers_may_have_streams_of_their_own() -> None:
    made = spec(streams=[[Stream("k", 3), Stream("v", 5)], [Stream("v", 2)]])
    assert [made.layer_dim(layer) for layer in range(2)] == [8, 2]
    assert made.stream_slice(1, "v") == StreamSlice(0, 2)
    assert not made.uniform
    with pytest.raises(SpecError, match="stream='k': layer 1 has 'v'"):
        made.stream_slice(1, "k")


def test_layers_of_equal_width_stack_whatever_their_streams() -> None:
    assert spec(streams=[[Stream("k", 8)], [Stream("k", 3), Stream("v", 5)]]).uniform


@pytest.mark.parametrize(("axis", "shape"), [("time", (3, 8)), ("channel", (8, 3))])
def test_the_axis_orders_the_window(axis: str, shape: tuple[int, int]) -> None:
    made = spec(window_axis=axis)
    assert made.window_size == 3
    assert made.window_shape(0) == shape


def test_defaults() -> None:
    made = spec()
    assert (made.dtype, made.window_axis) == (torch.bfloat16, "time")
    assert (made.max_draft_tokens, made.draft_topk) == (1, 1)
    assert (made.track_interval, made.track_grid, made.chunk_size) == (None, None, 64)


@pytest.mark.parametrize(
    ("interval", "chunk", "grid"), [(64, 64, 64), (96, 64, 192), (256, 64, 256), (5, 3, 15)]
)
def test_snapshots_are_where_both_grids_meet(interval: int, chunk: int, grid: int) -> None:
    assert spec(track_interval=interval, chunk_size=chunk).track_grid == grid


def test_a_spec_is_a_value() -> None:
    """Equal specs are equal keys, and no list of the caller's is shared."""
    streams = [Stream("k", 3), Stream("v", 5)]
    made = spec(streams=streams)
    assert made == spec()
    assert hash(made) == hash(spec())
    assert made != spec(kernel_size=5)
    streams.append(Stream("q", 1))
    assert made.layer_dim(0) == 8
    with pytest.raises(AttributeError):
        made.kernel_size = 5  # type: ignore[misc]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"num_layers": 0}, "num_layers=0: expected at least 1"),
    ({"num_slots": 0}, "num_slots=0: expected at least 1"),
    ({"max_requests": -1}, "max_requests=-1: expected at least 1"),
    ({"max_draft_tokens": 0}, "max_draft_tokens=0: expected at least 1"),
    ({"draft_topk": 0}, "draft_topk=0: expected at least 1"),
    ({"chunk_size": 0}, "chunk_size=0: expected at least 1"),
    ({"track_interval": 0}, "track_interval=0: expected at least 1"),
    ({"num_slots": 2.0}, "num_slots=2.0: expected an int"),
    ({"num_slots": 10**18}, r"num_slots=1000000000000000000: expected at most 2147483647, since"),
    ({"num_slots": 2**31}, "num_slots=2147483648: expected at most 2147483647"),
    ({"max_requests": 10**13}, "max_requests=10000000000000: expected at most 2147483647"),
    (
        {"num_slots": 2**31 - 1, "streams": [Stream("k", 2**31)]},
        r"num_slots=2147483647 takes \d+ bytes of state, \d+ per slot: a tensor has at most",
    ),
    (
        {"max_requests": 2**31 - 1, "max_draft_tokens": 2**31},
        r"max_requests=2147483647 with max_draft_tokens=2147483648 takes up to \d+ bytes of verify",
    ),
    ({"num_slots": True}, "num_slots=True: expected an int"),
    ({"kernel_size": "4"}, "kernel_size='4': expected an int"),
    ({"kernel_size": 1}, "kernel_size=1: expected at least 2"),
    ({"kernel_size": 9}, "kernel_size=9: the contract covers 2 to 8"),
    ({"track_interval": 3, "max_draft_tokens": 4}, "track_interval=3 is smaller than"),
    ({"dtype": torch.float64}, "dtype=torch.float64: the state is bfloat16, float16 or float32"),
    ({"dtype": torch.int8}, "dtype=torch.int8"),
    ({"window_axis": "row"}, "window_axis='row': expected 'time' or 'channel'"),
    ({"streams": []}, "streams is empty"),
    ({"streams": [[Stream("k", 1)], []]}, r"streams\[1\] is empty"),
    ({"streams": [[Stream("k", 1)]]}, "streams has 1 lists for num_layers=2"),
    ({"streams": [Stream("k", 1), [Stream("v", 1)]]}, "streams mixes"),
    ({"streams": [Stream("k", 1), Stream("k", 2)]}, r"streams names a stream twice: \['k', 'k'\]"),
    (
        {"streams": [Stream("", 1)]},
        "streams holds a stream named '': expected a string that is not",
    ),
    ({"streams": [Stream("k", 0)]}, "dim of stream 'k'=0: expected at least 1"),
    ({"streams": [[Stream("k", 1)], ["v"]]}, r"streams\[1\] holds 'v': expected sconv.Stream"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_a_spec_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec(**changes)


@pytest.mark.parametrize("layer_id", [-1, 2])
def test_a_layer_that_does_not_exist(layer_id: int) -> None:
    with pytest.raises(SpecError, match=rf"layer_id={layer_id}: .*layers 0 to 1"):
        spec().stream_slice(layer_id, "k")


def test_a_stream_that_is_no_name() -> None:
    with pytest.raises(SpecError, match=r"stream=.* layer 0 has 'k', 'v'"):
        spec().stream_slice(0, ["k"])  # type: ignore[arg-type]
