"""Tests on a simulated npu device. They need a process of their own: ``test_simulated.py`` runs it.

By hand: ``python -m sconv_contract.simulated_npu -- pytest -n 0 plugins/ascend/tests/simulated``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from sconv.testing.poison import PoisonedMemory

# Without the device there is nothing here to collect, and installing it would change torch for
# every other test of the process.
collect_ignore_glob = [] if os.environ.get("SCONV_SIM_NPU") == "1" else ["test_*.py"]

settings.register_profile(
    "simulated",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("simulated")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory is NaN in every test here."""
    torch.manual_seed(0)
    with PoisonedMemory():
        yield
