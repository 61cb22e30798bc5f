"""For programs."""

from __future__ import annotations

import json
from typing import Any

from ..findings import Report

__all__ = ["as_dict", "render"]


def render(report: Report) -> str:
    """Return the report as JSON."""
    return json.dumps(as_dict(report), indent=2)


def as_dict(report: Report) -> dict[str, Any]:
    """Return the report as plain data."""
    return {
        "target": report.target,
        "clean": report.clean,
        "subjects": list(report.subjects),
        "rules": {rule: state.value for rule, state in report.states().items()},
        "not_asked": report.not_asked,
        "stale": list(report.stale),
        "findings": [
            {
                "rule": finding.rule,
                "state": finding.state.value,
                "severity": finding.severity.value,
                "path": finding.path,
                "line": finding.line,
                "column": finding.column,
                "hook": finding.hook,
                "message": finding.message,
                "fix": finding.fix,
                "leaves_open": list(finding.leaves_open),
                "reason": finding.reason,
            }
            for finding in report.findings
        ],
    }
