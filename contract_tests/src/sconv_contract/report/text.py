"""For people: findings by hook, and a summary to paste."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ..findings import Finding, Report, State
from ..rules import TEXTS

__all__ = ["render", "summary"]


def render(report: Report) -> str:
    """Return the report as text."""
    return "\n".join([*_findings(report), *_stale(report), *summary(report)])


def summary(report: Report) -> Iterator[str]:
    """Yield the lines that a vendor can paste into a release note."""
    states = report.states()
    counts = Counter(states.values())
    yield f"sconv contract: {report.target}: {'clean' if report.clean else 'not clean'}"
    for subject in report.subjects:
        yield f"  checked {subject}"
    yield "  rules: " + ", ".join(f"{counts[state]} {state.value}" for state in State)
    for state in (State.BROKEN, State.UNVERIFIABLE, State.EXPECTED):
        for rule in [rule for rule, known in states.items() if known is state]:
            name = f" ({TEXTS[rule].name})" if rule in TEXTS else ""
            yield f"  {state.value}: {rule}{name}"
    for why in dict.fromkeys(report.not_asked.values()):
        rules = [rule for rule, reason in report.not_asked.items() if reason == why]
        yield f"  not asked: {', '.join(rules)}: {why}"


def _findings(report: Report) -> Iterator[str]:
    hooks = sorted({finding.hook for finding in report.findings})
    for hook in hooks:
        yield hook or "plugin"
        for finding in report.findings:
            if finding.hook == hook:
                yield from _finding(finding)
        yield ""


def _finding(finding: Finding) -> Iterator[str]:
    severity = "" if finding.state is not State.BROKEN else f" {finding.severity.value}"
    state = f" {finding.state.value}" if finding.state is not State.BROKEN else ""
    place = f"{finding.path}:{finding.line}:{finding.column}"
    yield f"  {place}: {finding.rule}{severity}{state}: {finding.message}"
    if finding.reason is not None:
        yield f"    expected: {finding.reason}"
    elif finding.fix:
        # What a backend does wrong does not tell why, and such advice says so itself.
        label = "" if finding.rule.startswith("SCV4") else "fix: "
        yield f"    {label}{finding.fix}"


def _stale(report: Report) -> Iterator[str]:
    for line in report.stale:
        yield f"known finding: {line}"
    if report.stale:
        yield ""
