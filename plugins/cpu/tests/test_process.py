"""Nothing depends on the process, and nothing of the process is changed."""

from __future__ import annotations

import threading
from functools import cache

import pytest
import torch
from torch import Tensor

from sconv import ForwardBatch, StateSpec, load_backend
from sconv.testing.captures import (
    KINDS,
    captured_spec,
    captured_step,
    load_into,
    refill,
    sized_harness,
)
from sconv.testing.digits import digit_spec, fill_pool
from sconv.testing.process import SETTINGS, process_state
from sconv.testing.recording import record


def _spec(dtype: torch.dtype) -> StateSpec:
    return captured_spec(dtype=dtype, window_layout="dense")


def everything(dtype: torch.dtype, seed: int = 1) -> list[Tensor]:
    """Run every mode, commits, snapshots, a graph, and what owns slots; return all that came out.

    Each step is compared with the oracle on the way.
    """
    backend = load_backend("cpu", spec=_spec(dtype))
    harness = sized_harness(backend, seed=seed, x_dtype=dtype, weight_dtype=dtype)
    found: list[Tensor] = []
    for number, kind in enumerate(KINDS):
        step = captured_step(kind, seed + number)
        before, batch = harness.state(), harness.batch(step)
        inputs = harness.inputs(step.num_tokens)
        backend.init_forward_metadata(batch)
        outputs = harness.convolve(batch, inputs)
        harness.check(step, inputs, before, outputs)
        if kind in ("chain", "tree", "links"):
            last = [row % 2 for row in range(step.rows)]
            rows = batch.req_pool_indices
            harness.commit(step, inputs, before, last, request_rows=rows.tolist())
        found += [*outputs.values(), *harness.state().values()]

    first = captured_step("decode", 0)
    batch, inputs = harness.batch(first), harness.inputs(first.num_tokens)

    def recorded() -> dict[tuple[int, str], Tensor]:
        backend.init_forward_metadata_in_graph(batch)
        return harness.convolve(batch, inputs)

    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    recording = record(recorded)
    refill(harness)
    other = captured_step("decode", seed)
    load_into(batch, harness.batch(other))
    before = harness.state()
    backend.init_forward_metadata_out_graph(batch)
    recording.replay()
    harness.check(other, inputs, before, recording.result)
    found += [*recording.result.values(), *harness.state().values()]
    # One row alone takes a path without a batch.
    step = captured_step("decode", seed)
    one = harness.batch(step)
    single = ForwardBatch.decode(one.req_pool_indices[:1], one.seq_lens[:1])
    backend.init_forward_metadata(single)
    found += harness.convolve(single, harness.inputs(1)).values()
    return [value.clone() for value in found]


def assert_equal(found: list[Tensor], plain: list[Tensor]) -> None:
    assert len(found) == len(plain) > 50
    for mine, theirs in zip(found, plain, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


plain_run = cache(everything)


@pytest.mark.parametrize(
    ("setting", "dtype"),
    [(setting, torch.float32) for setting in SETTINGS]
    + [(setting, torch.float16) for setting in SETTINGS if setting.startswith(("auto", "default"))],
    ids=str,
)
def test_amb_1_and_2_a_setting_of_the_process_changes_nothing(
    setting: str, dtype: torch.dtype
) -> None:
    plain = plain_run(dtype)
    outside = process_state()
    with SETTINGS[setting]():
        inside = process_state()
        assert inside != outside
        found = everything(dtype)
        assert process_state() == inside
    assert process_state() == outside
    assert_equal(found, plain)


@pytest.mark.parametrize("setting", SETTINGS)
def test_amb_1_one_row_of_a_float32_decode_keeps_its_digits(setting: str) -> None:
    x = torch.full((1, 2), 5.005)
    weight, slots = torch.tensor([[0.0, 0, 0, 1]] * 2), torch.tensor([1])
    with SETTINGS[setting]():
        backend = load_backend("cpu", spec=digit_spec(dim=2))
        fill_pool(backend.pool, {1: [1, 2, 3]})
        batch = ForwardBatch.decode(slots=slots)
        backend.init_forward_metadata(batch)
        y = backend.short_conv(
            x, weight, layer_id=0, stream="a", forward_batch=batch, residual=False
        )
    assert y.tolist() == x.tolist()
    assert backend.pool.conv(0, "a")[1, -1].tolist() == x[0].tolist()


def test_amb_2_slots_are_handed_out_and_taken_back_under_another_default_device() -> None:
    with SETTINGS["default device meta"]():
        pool = load_backend("cpu", spec=digit_spec()).pool
        free = pool.num_free
        slots = pool.alloc(2)
        assert slots.device.type == "cpu"
        pool.free(slots)
    assert pool.num_free == free


def test_two_threads_with_a_backend_each_equal_single_runs() -> None:
    plain = {seed: everything(torch.bfloat16, seed) for seed in (1, 2)}
    start, found = threading.Barrier(2), {}

    def work(seed: int) -> None:
        start.wait()
        found[seed] = [everything(torch.bfloat16, seed) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in plain]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, expected in plain.items():
        for each in found[seed]:
            assert_equal(each, expected)
