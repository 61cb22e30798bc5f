"""Hypothesis runs the same examples everywhere; ``HYPOTHESIS_PROFILE=search`` looks for others."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

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
