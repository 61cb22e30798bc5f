"""The one class that a vendor subclasses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sconv.testing.poison import PoisonedMemory

from .description import Descriptions
from .graphs import Graphs
from .modes import Modes
from .process import Process
from .rulings import Rulings
from .subject import Build, Subject

__all__ = ["BackendContract"]


class BackendContract(Descriptions, Modes, Rulings, Process, Graphs):
    """What every backend does. Subclass it in a test file and give the fixture ``backend``::

        from sconv_contract import BackendContract

        class TestNpu(BackendContract):
            @pytest.fixture
            def backend(self):
                return "npu"

    The fixture is the name of an installed backend, or a function ``build(spec, pool=None)`` that
    returns a :class:`sconv.Backend`. A test of something that the backend does not declare is
    skipped, and says so. Every test makes a backend of its own.
    """

    @pytest.fixture
    def backend(self) -> str | Build:
        """The backend under test."""
        raise NotImplementedError("override the fixture 'backend' with the name of your backend")

    @pytest.fixture
    def subject(self, backend: str | Build) -> Subject:
        """The backend under test, with what it declares."""
        return Subject.of(backend)

    @pytest.fixture(autouse=True)
    def checks_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever the environment says: some tests use slots that SCONV_CHECK=1 refuses."""
        monkeypatch.delenv("SCONV_CHECK", raising=False)

    @pytest.fixture(autouse=True)
    def poisoned_memory(self) -> Iterator[None]:
        """Uninitialised memory is NaN, so that a value that nobody wrote shows."""
        torch.manual_seed(0)
        with PoisonedMemory():  # type: ignore[no-untyped-call]
            yield
