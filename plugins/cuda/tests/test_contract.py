"""The behaviour suite of ``sconv-contract``: what every backend does, asked of this one.

On a GPU all of it runs, captures and replays included. Triton's interpreter runs kernels as plain
Python on copies of the tensors, so that a step can neither be recorded there nor run on tensors
without values; and it is slow, so that the rest of the graph rules waits for a GPU as well, and
random steps are left to the other tests of this folder.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import sconv

pytest.importorskip("sconv_contract", reason="the suite is in sconv-contract, next door")

from sconv_contract import BackendContract
from sconv_contract.behaviour.graphs import Graphs
from sconv_contract.behaviour.modes import Modes
from sconv_contract.behaviour.process import Process
from sconv_contract.behaviour.rule_marks import rule_of


class TestContract(BackendContract):
    @pytest.fixture
    def backend(
        self,
        load: Callable[..., sconv.Backend],
        device: torch.device,
        request: pytest.FixtureRequest,
    ) -> Callable[..., sconv.Backend]:
        if device.type == "cpu":
            name = request.function.__name__
            recorded = hasattr(Graphs, name) or hasattr(Process, name)
            if recorded and rule_of(request.function) != "SCV445":
                pytest.skip("a step that Triton interprets cannot be recorded: this needs a GPU")
            if hasattr(Modes, name):
                pytest.skip("the interpreter is slow, and test_modes_oracle draws the same steps")
        return load
