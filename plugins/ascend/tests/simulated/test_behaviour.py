"""The behaviour suite of the contract, eager and with captured graphs, on a simulated device."""

from __future__ import annotations

import pytest

from sconv_contract import BackendContract


class TestAscend(BackendContract):
    @pytest.fixture
    def backend(self) -> str:
        return "ascend"
