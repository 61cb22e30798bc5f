"""Known findings: which breaches a vendor expects for now, why, and until when.

::

    [[tool.sconv.contract.expected]]
    rule = "SCV302"
    where = "sconv_npu/backend.py"
    reason = "the driver keeps one tensor per step; their ticket 4411"
    until = 2027-03-31

``where`` is a file as it is reported, or the end of its path, or a hook; it may be left out. An
entry that matches nothing, and one whose day has passed, fail the run.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from .findings import Finding
from .rules import TEXTS
from .source.pyproject import TargetError, read_toml, table

__all__ = ["Expectation", "Expectations", "read_expectations"]

_KEYS: Final = {"rule", "where", "reason", "until"}


@dataclass(frozen=True, slots=True)
class Expectation:
    """One known finding."""

    rule: str
    where: str
    reason: str
    until: datetime.date

    def matches(self, finding: Finding) -> bool:
        """Whether it speaks of this finding."""
        place = not self.where or finding.hook == self.where
        place = place or f"/{finding.path}".endswith(f"/{self.where}")
        return place and finding.rule == self.rule

    def __str__(self) -> str:
        return f"{self.rule} at {self.where}" if self.where else self.rule


@dataclass(frozen=True, slots=True)
class Expectations:
    """The known findings of one project, on one day."""

    entries: Sequence[Expectation]
    today: datetime.date

    def apply(
        self, findings: Sequence[Finding], rules: Sequence[str]
    ) -> tuple[list[Finding], list[str]]:
        """Return the findings with their reasons, and what is wrong with the entries."""
        current = [entry for entry in self.entries if entry.until >= self.today]
        used: set[Expectation] = set()
        marked = []
        for finding in findings:
            match = next((entry for entry in current if entry.matches(finding)), None)
            marked.append(replace(finding, reason=match.reason) if match else finding)
            if match:
                used.add(match)
        stale = []
        for entry in self.entries:
            if entry.rule not in rules:
                continue
            if entry not in current:
                stale.append(f"{entry} was expected until {entry.until}: repair it, or renew it")
            elif entry not in used:
                stale.append(f"{entry} is expected and does not occur: remove the entry")
        return marked, stale


def read_expectations(pyproject: Path | None, today: datetime.date | None = None) -> Expectations:
    """Read ``[[tool.sconv.contract.expected]]``.

    Raises:
        TargetError: The file or an entry is malformed.
    """
    day = datetime.date.today() if today is None else today
    if pyproject is None or not pyproject.is_file():
        return Expectations((), day)
    contract = table(pyproject, read_toml(pyproject), "tool", "sconv", "contract")
    section = contract.get("expected", [])
    if not isinstance(section, list):
        raise TargetError(f"{pyproject}: tool.sconv.contract.expected is no array of tables")
    return Expectations(tuple(_entry(pyproject, entry) for entry in section), day)


def _entry(pyproject: Path, entry: Any) -> Expectation:
    what = f"{pyproject}: an entry of tool.sconv.contract.expected"
    if not isinstance(entry, dict) or set(entry) - _KEYS:
        raise TargetError(f"{what} has other keys than {', '.join(sorted(_KEYS))}: {entry}")
    rule, reason, until = entry.get("rule"), entry.get("reason"), entry.get("until")
    where = entry.get("where", "")
    if not isinstance(rule, str) or rule not in TEXTS:
        raise TargetError(f"{what} names the rule {rule!r}, which does not exist")
    if not isinstance(reason, str) or not reason.strip():
        raise TargetError(f"{what} for {rule} gives no reason")
    if isinstance(until, str):
        try:
            until = datetime.date.fromisoformat(until)
        except ValueError as exc:
            raise TargetError(f"{what} for {rule}: until = {until!r} is no date") from exc
    if isinstance(until, datetime.datetime) or not isinstance(until, datetime.date):
        raise TargetError(f"{what} for {rule} gives no day until which it is expected")
    if not isinstance(where, str):
        raise TargetError(f"{what} for {rule}: where = {where!r} is no file and no hook")
    return Expectation(rule, where, reason, until)
