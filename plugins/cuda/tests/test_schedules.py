"""A server's day on the CUDA backend: random right schedules, and faults that checked mode finds.

Through Triton's interpreter, which is slow, unless there is a GPU; there static steps are captured.
``SCONV_FUZZ=7x60`` runs seven days of 60 events.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

import sconv
from sconv.testing.fuzzer import Fuzzer, fuzzed_spec
from sconv.testing.state_faults import FAULTS, assert_found

Load = Callable[..., sconv.Backend]

DAYS, EVENTS = (int(part) for part in os.environ.get("SCONV_FUZZ", "1x15").split("x"))
LAYOUTS = ("inputs", "dense", "dedup")


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCONV_CHECK", "1")


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Not here, where it costs most of the time: every other test of this folder has it."""


def started(load: Load, day: int, *, layout: str | None = None) -> Fuzzer:
    backend = load(
        fuzzed_spec(
            window_layout=layout or LAYOUTS[day % 3],
            window_axis=("time", "channel")[day % 2],
            dtype=(torch.float32, torch.bfloat16)[day // 2 % 2],
        )
    )
    capture = None
    if backend.device.type == "cuda":

        def capture(step: Callable[[], object]) -> sconv.CapturedStep[object]:
            return sconv.capture(backend.device, step)

    return Fuzzer(backend, day, graphs=day % 2 == 0, capture=capture)


@pytest.mark.parametrize("day", range(DAYS))
def test_a_day_keeps_every_window_and_raises_no_alarm(day: int, load: Load) -> None:
    fuzzer = started(load, day)
    fuzzer.run(EVENTS)
    fuzzer.end()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_right_schedule_is_found(name: str, load: Load) -> None:
    fuzzer = started(load, 1, layout=FAULTS[name].layout)
    assert_found(fuzzer, FAULTS[name], after=2)
