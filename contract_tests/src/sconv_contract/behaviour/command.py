"""``sconv verify --behaviour NAME``: runs the suite and reports by rule."""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from sconv import BackendInfo, BackendNotFoundError, BackendUnavailableError, PluginError
from sconv.discovery.selection import select
from sconv.messages import one_line

from ..expected import Expectations
from ..findings import Finding, Report
from ..rules.behaviour import BEHAVIOUR
from ..target import TargetError
from .rule_marks import rule_of

__all__ = ["causes_once", "refuse_without_needs", "run_behaviour", "selected"]

_NEEDED: Final = ("pytest", "hypothesis", "torch")

#: It fills new memory, and so stands between a backend and its device.
_POISON: Final = "sconv.testing.poison"

#: So many rules with one cause are not broken each in its own way.
_SHARED: Final = 3
_FIRST: Final = "Mend this first: nothing else is known of these rules."

_MODULE: Final = """\
import pytest

from sconv_contract import BackendContract


class TestBackend(BackendContract):
    @pytest.fixture
    def backend(self):
        return {name!r}
"""


def refuse_without_needs() -> None:
    """Check that what the suite needs is installed.

    Raises:
        TargetError: It is not.
    """
    missing = [one for one in _NEEDED if importlib.util.find_spec(one) is None]
    if missing:
        raise TargetError(
            f"the behaviour suite needs {', '.join(missing)}:"
            " pip install 'sconv-contract[behaviour]'"
        )


def selected(name: str) -> BackendInfo:
    """Return an installed backend that can run here.

    Raises:
        TargetError: It is not installed, is broken, or cannot run here.
    """
    try:
        return select(name)
    except (BackendNotFoundError, BackendUnavailableError) as exc:
        raise TargetError(str(exc)) from exc
    except PluginError as exc:
        raise TargetError(f"{exc}; sconv verify {name} says what to change") from exc


def run_behaviour(
    name: str,
    *,
    expectations: Expectations | None = None,
    rules: Sequence[str] = tuple(BEHAVIOUR),
    subjects: Sequence[str] = (),
) -> Report:
    """Run the suite on an installed backend and return its state by rule.

    Args:
        name: Of the backend.
        expectations: Known findings.
        rules: Those that are asked.
        subjects: What else is to be said of what was checked.

    Raises:
        TargetError: The backend is not installed or cannot run here, or the suite cannot.
    """
    refuse_without_needs()
    info = selected(name)

    import pytest

    collector = _Collector(rules)
    with tempfile.TemporaryDirectory() as folder:
        module = Path(folder) / "test_backend_contract.py"
        module.write_text(_MODULE.format(name=name), encoding="utf-8")
        options = ["-p", "no:cacheprovider", "-p", "no:terminal", "-W", "ignore"]
        options += ["--rootdir", folder, "-c", "/dev/null", "--import-mode=importlib"]
        with pytest.MonkeyPatch.context() as environment:
            # Options for the tests of whoever calls, such as to run them in several processes.
            environment.delenv("PYTEST_ADDOPTS", raising=False)
            code = pytest.main([*options, str(module)], plugins=[collector])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise TargetError(f"the suite did not run: pytest ended with {code!r}")
    findings, not_asked = collector.results()
    stale: list[str] = []
    if expectations is not None:
        findings, stale = expectations.apply(findings, rules)
    return Report(
        target=name,
        rules=list(rules),
        findings=sorted(findings),
        subjects=[
            f"{info} on {info.device_type}",
            *subjects,
            f"{collector.count} tests of the suite",
        ],
        not_asked=not_asked,
        stale=stale,
    )


def place_of(caught: Any) -> Any:
    """Return the traceback's entry that a finding is reported at.

    Args:
        caught: pytest's ``ExceptionInfo``. Where the simulated device refused something, the line
            that asked for it is meant, and not the lines of torch and of the device below it.
    """
    entries = caught.traceback
    device_code = getattr(caught.value, "device_code", None)
    if device_code is not None:
        below = [device_code, *_folders("torch", _POISON)]
        asked = [one for one in entries if not any(map(Path(one.path).is_relative_to, below))]
        entries = asked or entries
    return entries[-1]


def causes_once(failed: Sequence[tuple[Finding, str]]) -> Iterator[Finding]:
    """Yield what failed, but once what several rules met: none of them says where it lies.

    Errors of one type and text from one line have one cause, whatever numbers are in the text. What
    a test found to be different is each rule's own.

    Args:
        failed: Findings, each with what was raised.
    """
    rules: dict[tuple[str, int, str], set[str]] = {}
    for found, raised in failed:
        rules.setdefault(_cause(found, raised), set()).add(found.rule)
    told: set[tuple[str, int, str, str]] = set()
    for found, raised in failed:
        cause = _cause(found, raised)
        first, *others = sorted(rules[cause])
        if raised.startswith(AssertionError.__name__) or len(others) + 1 < _SHARED:
            yield found
        elif (*cause, found.rule) not in told:
            told.add((*cause, found.rule))
            if found.rule == first:
                message = f"{raised} (and so end {', '.join(others)})"
                yield replace(found, message=message, fix=_FIRST)
            else:
                yield replace(found, message=f"it ends as {first} does", fix="")


def _cause(found: Finding, raised: str) -> tuple[str, int, str]:
    return found.path, found.line, re.sub(r"\d+", "0", raised)


def _folders(*modules: str) -> list[Path]:
    known = [sys.modules[name] for name in modules if name in sys.modules]
    return [Path(module.__file__).parent for module in known if module.__file__]


class _Collector:
    """A pytest plugin that runs the tests of some rules and keeps what happened to each."""

    def __init__(self, rules: Sequence[str]) -> None:
        self.count = 0
        self._rules = rules
        self._failed: list[tuple[Finding, str]] = []
        self._ran: set[str] = set()
        self._skipped: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if rule_of(item.function) in self._rules]

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        rule = rule_of(item.function)
        if call.when == "call":
            self.count += 1
        if call.excinfo is None:
            if call.when == "call":
                self._ran.add(rule)
            return
        text = one_line(str(call.excinfo.value))
        if call.excinfo.typename == "Skipped":
            self._skipped[rule] = text.removeprefix("capability: ")
            return
        entry = place_of(call.excinfo)
        raised = f"{call.excinfo.typename}: {text[:600]}"
        finding = Finding(
            path=str(entry.path),
            line=entry.lineno + 1,
            rule=rule,
            message=f"{item.name}: {raised}",
            fix=f"Where to look: {BEHAVIOUR[rule].fix}",
        )
        self._failed.append((finding, raised))

    def results(self) -> tuple[list[Finding], dict[str, str]]:
        """Return the findings, and the rules that do not apply with the reason."""
        asked = self._rules
        failed = {finding.rule for finding, _ in self._failed}
        not_asked = {
            rule: why
            for rule, why in self._skipped.items()
            if rule in asked and rule not in failed and rule not in self._ran
        }
        findings = list(causes_once([one for one in self._failed if one[0].rule in asked]))
        findings += [
            Finding("", 1, rule, "no test of this rule ran", leaves_open=(rule,))
            for rule in asked
            if rule not in failed and rule not in self._ran and rule not in not_asked
        ]
        return findings, not_asked
