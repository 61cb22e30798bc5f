"""Tests of the simulated device, in a process of their own: see ../test_simulated_npu.py.

What they check is a small plugin: one convolution state, one step, and ways to write it wrongly.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sconv_contract import simulated_npu

SIMULATED = os.environ.get("SCONV_SIM_NPU") == "1"

if SIMULATED:
    simulated_npu.install()


class Elsewhere(pytest.Module):
    """A file of tests that this process cannot run."""

    def collect(self):
        reason = "needs a process of its own: ../test_simulated_npu.py starts one for all of them"
        pytest.skip(reason, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    """A process with the device is no good for other tests, and needs variables of its own."""
    kind = pytest.Module if SIMULATED else Elsewhere
    return kind.from_parent(parent, path=module_path)


@dataclass
class Conv:
    """A state of ``[slots, K-1, D]`` and what one decode step is given."""

    state: Tensor
    slots: Tensor
    x: Tensor
    weight: Tensor

    #: What a right step uses.
    operators = frozenset(
        {"aten::index_select", "aten::cat", "aten::mul", "aten::sum", "aten::index_copy_"}
    )

    @classmethod
    def on(cls, device: str, seed: int = 0) -> Conv:
        """The same values on any device."""
        made = torch.Generator().manual_seed(seed)
        slots = torch.randperm(5, generator=made)[:3]
        return cls(
            *(
                value.to(device)
                for value in (
                    torch.randn(5, 3, 4, generator=made),
                    slots,
                    torch.randn(3, 4, generator=made),
                    torch.randn(4, 4, generator=made),
                )
            )
        )

    def take(self, other: Conv) -> None:
        """Copy another's values into these buffers."""
        self.state.copy_(other.state)
        self.slots.copy_(other.slots)
        self.x.copy_(other.x)

    def step(self) -> Tensor:
        """A right step: outputs ``[B, D]``, and the windows moved on."""
        taps = torch.cat([self.state.index_select(0, self.slots), self.x[:, None]], dim=1)
        self.state.index_copy_(0, self.slots, taps[:, 1:])
        return (taps * self.weight).sum(1)


@pytest.fixture
def conv() -> Conv:
    return Conv.on("npu:0")


@pytest.fixture
def make() -> type[Conv]:
    return Conv
