"""A server's day on a simulated npu: random right schedules, and faults that checked mode finds.

``SCONV_FUZZ=17x150`` runs 17 days of 150 events.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

import sconv
from sconv.testing.fuzzer import Fuzzer, fuzzed_spec
from sconv.testing.state_faults import FAULTS, assert_found

DAYS, EVENTS = (int(part) for part in os.environ.get("SCONV_FUZZ", "3x60").split("x"))
LAYOUTS = ("dense", "inputs", "dedup")


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCONV_CHECK", "1")


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Not here, where it costs most of the time: every other test of this folder has it."""


def started(day: int, *, layout: str | None = None, graphs: bool = True) -> Fuzzer:
    spec = fuzzed_spec(
        window_layout=layout or LAYOUTS[day % 3],
        window_axis=("time", "channel")[day % 2],
        dtype=(torch.float32, torch.bfloat16)[day // 2 % 2],
    )
    backend = sconv.load_backend("ascend", spec=spec)

    def capture(step: Callable[[], object]) -> sconv.CapturedStep[object]:
        return sconv.capture(backend.device, step)

    return Fuzzer(backend, day, graphs=graphs, capture=capture if day % 2 == 0 else None)


@pytest.mark.parametrize("day", range(DAYS))
def test_a_day_keeps_every_window_and_raises_no_alarm(day: int) -> None:
    """With graphs of the device, or with both halves of each static step run eagerly."""
    fuzzer = started(day)
    fuzzer.run(EVENTS)
    fuzzer.end()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_right_schedule_is_found(name: str) -> None:
    for seed in (0, 1):
        fuzzer = started(seed, layout=FAULTS[name].layout, graphs=seed == 0)
        assert_found(fuzzer, FAULTS[name], after=10 + 5 * seed)
