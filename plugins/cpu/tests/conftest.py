"""Hypothesis runs the same examples everywhere; ``HYPOTHESIS_PROFILE=search`` looks for others.

Here too is the backend in the middle of its work on which bad input must change nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from torch import Tensor

from sconv import Backend, ForwardBatch, load_backend
from sconv.testing.digits import digit_spec, fill_pool, read_window, run_digits
from sconv.testing.harness import assert_same_bits
from sconv.testing.poison import PoisonedMemory

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.register_profile("first", settings.get_profile("repeatable"), phases=[Phase.generate])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory is NaN in every test here."""
    with PoisonedMemory():
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def _everything(backend: Backend) -> dict[str, Tensor]:
    pool = backend.pool
    tensors = {f"layer {number}": layer for number, layer in enumerate(pool.layers)}
    tensors |= {f"windows {number}": layer for number, layer in enumerate(pool.windows.layers)}
    tensors["req_to_slot"] = pool.req_to_slot
    tensors["live slots"] = torch.tensor([*pool.live_slots(), pool.num_free])
    return {name: value.clone() for name, value in tensors.items()}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends that are loaded from here on are in checked mode."""
    monkeypatch.setenv("SCONV_CHECK", "1")


@pytest.fixture
def backend() -> Iterator[Backend]:
    """A verify step is in flight, two requests are live; afterwards all is as it was."""
    spec = digit_spec(
        num_layers=2,
        streams=("a", "b"),
        dim=5,
        num_slots=6,
        max_requests=4,
        max_draft_tokens=3,
        track_interval=4,
    )
    made = load_backend("cpu", spec=spec)
    pool = made.pool
    pool.alloc(3)
    fill_pool(pool, {2: [1, 2, 3], 3: [4, 5, 6]}, {4: 2, 1: 3})
    for windows in pool.windows.layers:
        windows.fill_(0)
    batch = ForwardBatch.target_verify(torch.tensor([4, 1]), torch.tensor([3, 3]), 2)
    made.init_forward_metadata(batch)
    for layer_id in range(2):
        for stream in ("a", "b"):
            tokens = [4, 5, 7, 8]
            run_digits(made, batch, tokens, layer_id=layer_id, stream=stream, prepare=False)
    before = _everything(made)
    yield made
    for name, value in _everything(made).items():
        assert_same_bits(value, before[name], name)
    # What is in flight can still be committed, on the rows that it was made with.
    made.update_mamba_state_after_mtp_verify(
        torch.tensor([1, 0]), req_pool_indices=torch.tensor([4, 1])
    )
    assert (read_window(pool, 2), read_window(pool, 3)) == ([3, 4, 5], [5, 6, 7])
