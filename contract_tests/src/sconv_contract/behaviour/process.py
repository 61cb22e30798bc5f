"""Ruling 12: what is set for the whole process changes no result, and is left as it is."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from sconv.testing.captures import captured_spec
from sconv.testing.every_step import EveryStep, assert_same_results
from sconv.testing.process import SETTINGS, process_state

from .capturing import capture
from .rule_marks import keeps
from .subject import Subject

__all__ = ["Process"]


def _loaded(subject: Subject) -> EveryStep:
    backend = subject.build(subject.fit(captured_spec()))
    graphs = partial(capture, backend.device) if subject.can.graph_capture else None
    return EveryStep(backend, capture=graphs)


def _assert_unchanged(before: dict[str, Any], when: str) -> None:
    after = process_state()
    changed = [name for name, value in before.items() if after[name] != value]
    assert not changed, f"{when}: a call changed the process's {', '.join(changed)}"


class Process:
    """Tests of :class:`sconv_contract.BackendContract`."""

    @keeps("SCV434")
    @pytest.mark.parametrize("setting", SETTINGS)
    def test_a_setting_of_the_process_changes_nothing(self, subject: Subject, setting: str) -> None:
        """The backend is loaded and used under the setting, and then used without it."""
        plain = _loaded(subject)
        first, second = plain.results(), plain.results()
        outside = process_state()
        with SETTINGS[setting]():
            inside = process_state()
            assert inside != outside, f"{setting}: the process has it already"
            steps = _loaded(subject)
            under = steps.results()
            _assert_unchanged(inside, f"under {setting}")
        after = steps.results()
        _assert_unchanged(outside, f"after {setting}")
        assert_same_results(under, first, f"under {setting}")
        assert_same_results(after, second, f"after {setting}")
