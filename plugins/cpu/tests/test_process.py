"""Nothing depends on the process: what the contract's rule SCV434 does not ask of this backend."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sconv import ForwardBatch, load_backend
from sconv.testing.captures import captured_spec
from sconv.testing.digits import digit_spec, fill_pool
from sconv.testing.every_step import EveryStep, assert_same_results
from sconv.testing.process import SETTINGS, process_state
from sconv.testing.recording import record


def _capture(step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    recording = record(step)
    return recording.replay, recording.result


def _loaded(dtype: torch.dtype, seed: int = 1) -> EveryStep:
    spec = captured_spec(dtype=dtype, window_layout="dense")
    return EveryStep(load_backend("cpu", spec=spec), seed=seed, capture=_capture)


@pytest.mark.parametrize("setting", SETTINGS)
def test_amb_1_a_recorded_step_and_a_float32_state_depend_on_no_setting(setting: str) -> None:
    """What SCV434 does not ask of a backend that declares no graphs, and of one dtype alone."""
    plain = _loaded(torch.float32).results()
    with SETTINGS[setting]():
        inside = process_state()
        found = _loaded(torch.float32).results()
        assert process_state() == inside
    assert_same_results(found, plain, setting)


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
    plain = {seed: _loaded(torch.bfloat16, seed).results() for seed in (1, 2)}
    start, found = threading.Barrier(2), {}

    def work(seed: int) -> None:
        start.wait()
        found[seed] = [_loaded(torch.bfloat16, seed).results() for _ in range(3)]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in plain]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, expected in plain.items():
        for each in found[seed]:
            assert_same_results(each, expected, f"seed {seed}")
