"""A server's day on the CPU: random right schedules, and the same ones with a fault put in.

``SCONV_FUZZ=24x2000 pytest plugins/cpu/tests/test_schedules.py`` runs 24 days of 2,000 events.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from sconv import Backend, load_backend
from sconv.testing.fuzzer import Fuzzer, fuzzed_spec
from sconv.testing.recording import record
from sconv.testing.state_faults import FAULTS, assert_found

DAYS, EVENTS = (int(part) for part in os.environ.get("SCONV_FUZZ", "6x300").split("x"))
LAYOUTS = ("dense", "inputs", "dedup")


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Not here, where it triples the time: every other test of this folder has it."""


def options(day: int) -> dict[str, Any]:
    """Every window layout with both axes, and every kernel width."""
    return {
        "window_layout": LAYOUTS[day % 3],
        "window_axis": ("time", "channel")[day // 3 % 2],
        "kernel_size": 2 + (day * 5 + 2) % 7,
        "dtype": (torch.float32, torch.bfloat16, torch.float16)[day // 2 % 3],
    }


def started(day: int, **changes: Any) -> Backend:
    return load_backend("cpu", spec=fuzzed_spec(**(options(day) | changes)))


@pytest.mark.parametrize("day", range(DAYS))
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_a_day_keeps_every_window_and_raises_no_alarm(
    day: int, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager, with static batches, and with captured ones, which are refilled and replayed."""
    monkeypatch.setenv("SCONV_CHECK", str(int(checked)))
    fuzzer = Fuzzer(started(day), day, graphs=day % 3 > 0, capture=record if day % 2 else None)
    assert type(fuzzer.backend).__name__ == ("CheckedBackend" if checked else "Backend")
    fuzzer.run(EVENTS)
    # Everything happened, and not only now and then.
    happened = {
        "admitted": 60,
        "begun": 10,
        "hit by fork": 1,
        "hit by copy": 1,
        "aborted": 70,
        "aborted in flight": 10,
        "offloaded": 10,
        "evicted": 50,
        "prefill": 150,
        "decode": 100,
        "draft-extend": 50,
        "idle": 40,
        "verify of chains": 60,
        "commit": 80,
        "snapshot by prefill": 40,
        "snapshot by decode": 10,
        "snapshot by commit": 20,
    }
    if EVENTS >= 2000:
        rare = {name: fuzzer.counts.get(name, 0) for name in happened}
        assert not {name: count for name, count in rare.items() if count < happened[name]}, rare
    fuzzer.end()


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout)
        for name, fault in FAULTS.items()
        for layout in ([fault.layout] if fault.layout else LAYOUTS)
    ],
)
@pytest.mark.usefixtures("checked")
def test_a_fault_in_a_right_schedule_is_found(name: str, layout: str) -> None:
    for seed in range(3):
        backend = started(seed, window_layout=layout)
        fuzzer = Fuzzer(backend, seed, graphs=seed > 0, capture=record if seed == 2 else None)
        assert_found(fuzzer, FAULTS[name], after=20 + 7 * seed)
