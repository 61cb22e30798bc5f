"""Annotations of a GitHub Actions job, and the text report below them."""

from __future__ import annotations

from ..findings import Finding, Report, Severity, State
from . import text

__all__ = ["render"]


def render(report: Report) -> str:
    """Return workflow commands, one a finding, then the summary."""
    lines = [_command(finding) for finding in report.findings]
    lines += [f"::error title=known finding::{_data(line)}" for line in report.stale]
    return "\n".join([*lines, *text.summary(report)])


def _command(finding: Finding) -> str:
    level = "error"
    if finding.state is State.EXPECTED:
        level = "notice"
    elif finding.severity is Severity.WARNING:
        level = "warning"
    title = f"{finding.rule} {finding.state.value}"
    place = (
        f"file={_property(finding.path)},line={finding.line},col={finding.column},"
        f"title={_property(title)}"
    )
    detail = f"expected: {finding.reason}" if finding.reason is not None else finding.fix
    return f"::{level} {place}::{_data(f'{finding.message}. {detail}')}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
