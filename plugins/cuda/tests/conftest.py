"""Tests run on a GPU where there is one, else on the CPU through Triton's interpreter.

``TRITON_INTERPRET=1`` chooses the interpreter on a machine with a GPU too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # Before a kernel is decorated, so before the backend is imported anywhere in this process.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import sconv
from sconv.engine.loading import hold
from sconv.testing.poison import PoisonedMemory

#: Builds the backend under test from a spec, and an adopted pool if there is one.
Load = Callable[..., sconv.Backend]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda:0")


def build(spec: sconv.StateSpec, pool: sconv.ConvStatePool | None = None) -> sconv.Backend:
    """Do what ``load_backend("cuda")`` does, also where no GPU is: the probe has its own tests."""
    from sconv_cuda.backend import create
    from sconv_cuda.plugin import plugin

    info = plugin.sconv_backend()
    return hold(create(spec=spec, device=DEVICE, pool=pool), info, spec)


@pytest.fixture(scope="session")
def load() -> Load:
    pytest.importorskip(
        "triton", reason="the kernels need triton, which has wheels for Linux alone"
    )
    return build


@pytest.fixture(scope="session")
def device() -> torch.device:
    return DEVICE


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory is NaN in every test here."""
    with PoisonedMemory():
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
