"""Launches go to the tensors' device, and never compile inside of a capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from typing import Any

import pytest
import torch

from sconv import ForwardMode, ShortConvMetadata, StateSpec, Stream

triton = pytest.importorskip(
    "triton", reason="the kernels need triton, which has wheels for Linux alone"
)


@pytest.fixture
def launcher() -> Any:
    """A launcher for cuda:1 on a machine that need not have one."""
    from sconv_cuda.launch import Launcher

    made = Launcher(torch.device("cpu"))
    made.interpreted = False
    made._index = 1
    made._stream = lambda index: f"stream of {index}"
    return made


def _compiled(calls: list[Any]) -> Any:
    from sconv_cuda.launch import Compiled

    return Compiled(lambda *args: calls.append(args), "code", "metadata", (4, True))


def test_the_tensors_device_is_entered_around_a_launch_dev_1(
    launcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[int] = []
    current = [0]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        entered.append(index)
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    calls: list[Any] = []
    launcher.launch(_compiled(calls), (3, 2, 1), (17, (5, 6)))
    assert entered == [1]
    assert current == [0]
    (call,) = calls
    assert call == (
        3, 2, 1, "stream of 1", "code", "metadata", None, None, None, 17, (5, 6), 4, True
    )  # fmt: skip

    current[0] = 1
    launcher.launch(_compiled(calls), (1, 1, 1), ())
    assert entered == [1], "the right device is current already"


def test_a_capture_refuses_to_compile(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sconv_cuda.decode import decode
    from sconv_cuda.launch import NotCompiledError

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(NotCompiledError, match=r"'decode'.*backend\.warmup\(\)"):
        launcher.compile(decode, (), (), warps=4, aligned=True)


def test_notes_are_taken_once_per_compilation_and_nothing_runs(launcher: Any) -> None:
    from sconv_cuda.decode import decode

    one, other = torch.zeros(1), torch.zeros(1, dtype=torch.float16)
    with launcher.taking_notes() as notes:
        for tensor in (one, other, one):
            compiled = launcher.compile(decode, (tensor, 3), (4,), warps=4, aligned=True)
            launcher.launch(compiled, (1, 1, 1), (tensor, 3))
    assert len(notes) == 2
    assert launcher.compiled == 0


def test_addresses_stand_in_for_tensors(launcher: Any) -> None:
    tensor = torch.zeros(3)
    address = tensor.data_ptr()
    assert launcher.freeze((tensor, 5, (tensor, 6))) == (address, 5, (address, 6))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"slots_index": 1, "drafts": 2},
            r"'decode'.*missing: \['rows'\].*parameters: \['drafts'\]",
        ),
        ({"slots_index": 1}, r"'decode'.*missing: \['rows'\]"),
    ],
)
def test_a_wrong_name_of_an_argument_fails_at_warm_up(
    load: Any, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, int], message: str
) -> None:
    from sconv_cuda.convolution import MODES
    from sconv_cuda.launch import ArgumentNameError

    mode = MODES[ForwardMode.DECODE]
    good = mode.step

    def step(meta: ShortConvMetadata) -> dict[str, Any]:
        named = good(meta)
        del named["rows"]
        return named | {name: 1 for name in wrong if name not in named}

    monkeypatch.setitem(MODES, ForwardMode.DECODE, replace(mode, step=step))
    with pytest.raises(ArgumentNameError, match=message):
        load(StateSpec(1, [Stream("a", 8)], 4, 4, 4)).warmup()


def test_arguments_in_another_order_are_launched_in_the_kernels(launcher: Any) -> None:
    from sconv_cuda.launch import Kernel

    made = Kernel.__new__(Kernel)
    made.name, made.parameters, made.constants = "swapped", ("first", "second"), ("K", "L")
    made._take_arguments = itemgetter(*made.parameters)
    made._take_constants = itemgetter(*made.constants)
    calls: list[Any] = []
    launcher.interpreted = True
    made.function = {(1, 1, 1): lambda *args: calls.append(args)}
    compiled = launcher.look_up(
        made, {"second": 2, "first": 1}, {"L": 4, "K": 3}, warps=4, aligned=True
    )
    launcher.launch(compiled, (1, 1, 1), (2, 1))
    assert calls == [(1, 2, 3, 4)]


def test_an_argument_that_two_groups_give_is_refused() -> None:
    from sconv_cuda.launch import ArgumentNameError, merged

    with pytest.raises(ArgumentNameError, match="rows"):
        merged({"rows": 1}, {"rows": 1})
