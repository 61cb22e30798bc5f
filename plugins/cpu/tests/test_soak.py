"""The soak of ``plugins/cpu/benchmarks/soak.py``, short, and that it sees what is not flat."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from soak import Reading, problems, soak

FLAT = [Reading(100 * part, 1000, 5, 10.0) for part in range(1, 7)]


def test_a_short_soak_keeps_memory_and_files() -> None:
    readings = soak(300, parts=3)
    assert [one.steps for one in readings] == [100, 200, 300]
    # Time is left to the long run: other work on a machine reaches a short one.
    assert [one for one in problems(readings) if "step takes" not in one] == []


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (Reading(700, 1000 + 9 * 1024, 5, 10.0), "memory grew by 9216 KiB"),
        (Reading(700, 1000, 6, 10.0), "1 more files are open"),
    ],
)
def test_what_grows_is_named(last: Reading, said: str) -> None:
    assert problems(FLAT) == []
    assert problems([*FLAT, last]) == [said]


def test_slower_steps_are_named() -> None:
    slow = [Reading(700 + part, 1000, 5, 16.0) for part in range(3)]
    assert problems([*FLAT, *slow]) == ["a step takes 16 us, and 10 before"]
