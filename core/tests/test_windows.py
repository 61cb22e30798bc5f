"""Verify windows: what they hold, how many bytes that is, and how they grow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sconv import SpecError, StateSpec, Stream
from sconv.state.windows import InputWindows, VerifyWindows

CPU = torch.device("cpu")


def spec(**changes: Any) -> StateSpec:
    options: dict[str, Any] = {
        "num_layers": 2,
        "streams": [[Stream("k", 3), Stream("v", 5)], [Stream("k", 2)]],
        "kernel_size": 4,
        "num_slots": 6,
        "max_requests": 4,
        "max_draft_tokens": 3,
        "draft_topk": 2,
    }
    return StateSpec(**{**options, **changes})


@pytest.mark.parametrize("axis", ["time", "channel"])
def test_dense_windows_keep_one_window_per_token(axis: str) -> None:
    windows = VerifyWindows(spec(window_axis=axis), CPU)
    assert (windows.layout, windows.rows) == ("dense", 4)
    tail = (3, 8) if axis == "time" else (8, 3)
    assert tuple(windows.layers[0].shape) == (4, 3, *tail)
    part = windows.stream(0, "v")
    assert tuple(part.shape) == (4, 3, 3, 5)
    part[2, 1, 0, 4] = 9
    column = windows.layers[0][2, 1]
    assert (column[0, 7] if axis == "time" else column[7, 0]).item() == 9
    assert windows.nbytes == 2 * 4 * 3 * 3 * (8 + 2)


def test_inputs_are_a_third_of_the_dense_bytes() -> None:
    dense, inputs = VerifyWindows(spec(), CPU), InputWindows(spec(), CPU)
    assert (inputs.layout, inputs.rows) == ("inputs", 4)
    assert [tuple(layer.shape) for layer in inputs.layers] == [(4, 3, 8), (4, 3, 2)]
    assert inputs.paths is not None
    assert tuple(inputs.paths.shape) == (4, 3, 3)
    paths = inputs.paths.numel() * inputs.paths.element_size()
    flags = inputs.rows
    assert 3 * (inputs.nbytes - paths - flags) == dense.nbytes
    part = inputs.stream(0, "v")
    part[1, 2, 0] = 5
    assert inputs.layers[0][1, 2, 3].item() == 5


@pytest.mark.parametrize("kind", [VerifyWindows, InputWindows])
def test_without_speculation_there_are_none(kind: type[VerifyWindows]) -> None:
    windows = kind(spec(max_draft_tokens=1, draft_topk=1), CPU)
    assert (windows.layers, windows.rows, windows.nbytes) == ((), 0, 0)
    windows.reserve(100)
    assert (windows.layers, windows.rows) == ((), 0)


@pytest.mark.parametrize("kind", [VerifyWindows, InputWindows])
def test_room_for_more_rows_is_made_once(kind: type[VerifyWindows]) -> None:
    windows = kind(spec(), CPU)
    windows.reserve(7)
    assert windows.rows == 7
    assert {layer.shape[0] for layer in windows.layers} == {7}
    address = windows.layers[0].data_ptr()
    windows.reserve(5)
    windows.reserve(7)
    assert (windows.rows, windows.layers[0].data_ptr()) == (7, address)


def test_a_stream_that_does_not_exist() -> None:
    with pytest.raises(SpecError, match="stream='v': layer 1 has 'k'"):
        VerifyWindows(spec(), CPU).stream(1, "v")


def test_only_dense_windows_are_adopted() -> None:
    dense = [torch.zeros(5, 3, 3, 8, dtype=torch.bfloat16), torch.zeros(6, 3, 3, 2).bfloat16()]
    windows = VerifyWindows.adopt(spec(), dense)
    assert windows.rows == 5
    with pytest.raises(SpecError, match=r"layer 1 is \[6, 3, 2\].*expected \[rows, 3, 3, 2\]"):
        VerifyWindows.adopt(spec(), [dense[0], dense[1][:, :, 0]])
    with pytest.raises(SpecError, match="only dense verify windows can be adopted"):
        InputWindows.adopt(spec(), dense)
