"""What a check found, and in which of four states that leaves a rule."""

from __future__ import annotations

import ast
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Finding", "Report", "Severity", "State", "Where"]


class Severity(enum.Enum):
    """How bad a finding is. A warning fails a run only under ``--strict``."""

    ERROR = "error"
    WARNING = "warning"


class State(enum.Enum):
    """What is known of a rule. Unverifiable is never counted as kept."""

    KEPT = "kept"
    BROKEN = "broken"
    EXPECTED = "expected"
    UNVERIFIABLE = "unverifiable"


@dataclass(frozen=True, slots=True)
class Where:
    """A place in a file that a finding points at."""

    path: Path
    line: int = 1
    column: int = 1

    @classmethod
    def of(cls, path: Path, node: ast.AST) -> Where:
        """Return the place of a syntax node."""
        return cls(path, getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1)


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One breach of one rule, or one question that the source does not answer.

    Attributes:
        path: File, relative to the current folder if the target lies in it, else to the target.
        line: Counted from 1.
        rule: Its stable id.
        message: What was found and what was expected.
        fix: What to do.
        hook: The hook it is about, or "".
        column: Counted from 1.
        severity: Error or warning.
        leaves_open: For a question: the rules that it leaves open.
        reason: Why the vendor expects it; None if nobody does.
    """

    path: str
    line: int
    rule: str
    message: str
    fix: str = ""
    hook: str = ""
    column: int = 1
    severity: Severity = field(default=Severity.ERROR, compare=False)
    leaves_open: tuple[str, ...] = ()
    reason: str | None = field(default=None, compare=False)

    @property
    def state(self) -> State:
        """Broken, expected or unverifiable."""
        if self.reason is not None:
            return State.EXPECTED
        return State.UNVERIFIABLE if self.leaves_open else State.BROKEN


@dataclass(frozen=True, slots=True)
class Report:
    """The result for one target.

    Attributes:
        target: As the user named it.
        rules: Ids of the rules that were asked.
        findings: In order of file and line.
        subjects: What was checked, in words: ``"class sconv_npu.backend.NpuBackend"``.
        not_asked: Rules that do not apply, and why.
        stale: Known findings that vanished or expired, in words.
        strict: Warnings fail too.
    """

    target: str
    rules: Sequence[str]
    findings: Sequence[Finding]
    subjects: Sequence[str] = ()
    not_asked: dict[str, str] = field(default_factory=dict)
    stale: Sequence[str] = ()
    strict: bool = False

    @property
    def failing(self) -> list[Finding]:
        """The findings that fail the run."""
        return [
            found
            for found in self.findings
            if found.state is not State.EXPECTED
            and (self.strict or found.severity is Severity.ERROR)
        ]

    @property
    def clean(self) -> bool:
        """Whether the run passes."""
        return not self.failing and not self.stale

    def state(self, rule: str) -> State:
        """Return what is known of a rule."""
        states = {
            found.state
            for found in self.findings
            if found.rule == rule or rule in found.leaves_open
        }
        for state in (State.BROKEN, State.UNVERIFIABLE, State.EXPECTED):
            if state in states:
                return state
        return State.KEPT

    def states(self) -> dict[str, State]:
        """Return the state of every rule that was asked and applies."""
        return {rule: self.state(rule) for rule in self.rules if rule not in self.not_asked}
