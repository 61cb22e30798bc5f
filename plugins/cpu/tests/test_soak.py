"""The soak of ``plugins/cpu/benchmarks/soak.py``, short, and that it sees what is not flat."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sconv import ForwardBatch, Stream, load_backend
from sconv.testing.captures import FREE, KINDS, ROWS, captured_spec, captured_step, sized_harness

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from soak import Reading, problems, soak

FLAT = [Reading(100 * part, 1000, 9000, 5, 10.0) for part in range(1, 7)]


def test_a_short_soak_keeps_memory_and_files() -> None:
    reported: list[Reading] = []
    readings = soak(90, parts=3, report=reported.append)
    assert [one.steps for one in reported] == [30, 60, 90]
    assert reported == readings
    # Time is left to the long run: other work on a machine reaches a short one.
    assert [one for one in problems(readings) if "step takes" not in one] == []


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (Reading(700, 1000 + 9 * 1024, 9000, 5, 10.0), "memory grew by 9216 KiB"),
        (Reading(700, 1000, 20_000, 5, 10.0), "Python's objects take 11000 more blocks"),
        (Reading(700, 1000, 9000, 6, 10.0), "1 more files are open"),
    ],
)
def test_what_grows_is_named(last: Reading, said: str) -> None:
    assert problems(FLAT) == []
    assert problems([*FLAT, last]) == [said]


def test_slower_steps_are_named() -> None:
    slow = [Reading(700 + part, 1000, 9000, 5, 16.0) for part in range(3)]
    assert problems([*FLAT, *slow]) == ["a step takes 16 us, and 10 before"]


def new_objects(step: Callable[[int], None]) -> tuple[int, int]:
    """Run 8 steps and then 12 more; return how many objects these left, and how many of those that
    they dropped waited for the garbage collector."""
    # What was there before need not be looked through, which takes longer than the steps.
    gc.freeze()
    gc.disable()
    try:
        for number in range(8):
            step(number)
        gc.collect()
        before = len(gc.get_objects())
        for number in range(12):
            step(number)
        waiting = gc.collect()
        return len(gc.get_objects()) - before, waiting
    finally:
        gc.enable()
        gc.unfreeze()


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static buffers"])
@pytest.mark.parametrize("kind", [*KINDS, "one row"])
def test_steps_leave_no_objects_behind(kind: str, static: bool) -> None:
    """Neither in a cache, nor in a cycle that the garbage collector alone would free."""
    spec = captured_spec(num_layers=1, streams=[Stream("k", 5)], window_layout="dense")
    backend = load_backend("cpu", spec=spec)
    harness = sized_harness(backend)
    steps = [captured_step("decode" if kind == "one row" else kind, seed) for seed in range(4)]
    # Every step of a kind has as many tokens.
    inputs = harness.inputs(1 if kind == "one row" else steps[0].num_tokens)
    targets = torch.tensor(FREE[:ROWS])

    def run(number: int) -> None:
        batch = harness.batch(steps[number % 4])
        if kind == "one row":
            assert batch.req_pool_indices is not None
            batch = ForwardBatch.decode(batch.req_pool_indices[:1])
        if static:
            backend.init_forward_metadata_out_graph(batch)
            backend.init_forward_metadata_in_graph(batch)
        else:
            backend.init_forward_metadata(batch)
        harness.convolve(batch, inputs)
        if kind in ("chain", "tree", "links"):
            kept = torch.full((ROWS,), number % 3)
            rows = batch.req_pool_indices
            backend.update_mamba_state_after_mtp_verify(kept, targets, kept, req_pool_indices=rows)

    left, waiting = new_objects(run)
    assert left < 6
    assert waiting == 0


@pytest.mark.parametrize("cycle", [False, True])
def test_objects_that_are_left_are_counted(cycle: bool) -> None:
    kept: list[list[object]] = []

    def leaves_one(number: int) -> None:
        one: list[object] = []
        (one if cycle else kept).append(one)

    assert new_objects(leaves_one) == ((0, 12) if cycle else (12, 0))
