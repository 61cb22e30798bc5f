"""The whole behaviour suite of the contract, as it is and under each setting of the process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sconv.testing.process import SETTINGS, process_state
from sconv_contract import BackendContract

pytestmark = pytest.mark.slow


class TestContract(BackendContract):
    @pytest.fixture
    def backend(self) -> str:
        return "cpu"


class TestUnderSettings(TestContract):
    #: Sets each of them itself, and would find one of them set.
    test_a_setting_of_the_process_changes_nothing = None

    @pytest.fixture(autouse=True, params=SETTINGS)
    def setting(
        self, request: pytest.FixtureRequest, checks_off: None, poisoned_memory: None
    ) -> Iterator[None]:
        with SETTINGS[request.param]():
            before = process_state()
            yield
            assert process_state() == before
