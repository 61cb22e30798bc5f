"""SARIF 2.1.0, which code-scanning pages read."""

from __future__ import annotations

import json
from typing import Any, Final
from urllib.parse import quote

from importlib_metadata import version

from ..findings import Finding, Report, Severity, State
from ..rules import TEXTS

__all__ = ["as_dict", "render"]

_SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"


def render(report: Report) -> str:
    """Return the report as SARIF."""
    return json.dumps(as_dict(report), indent=2)


def as_dict(report: Report) -> dict[str, Any]:
    """Return the report as a SARIF log."""
    named = list(dict.fromkeys([*report.rules, *(one.rule for one in report.findings)]))
    driver = {
        "name": "sconv-contract",
        "version": version("sconv-contract"),
        "rules": [_rule(rule) for rule in named],
    }
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding, named) for finding in report.findings],
        "invocations": [
            {
                "executionSuccessful": True,
                "exitCode": 0 if report.clean else 1,
                "toolExecutionNotifications": [
                    {"level": "error", "message": {"text": line}} for line in report.stale
                ],
            }
        ],
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(rule: str) -> dict[str, Any]:
    if rule not in TEXTS:
        return {"id": rule}
    known = TEXTS[rule]
    return {
        "id": rule,
        "name": "".join(word.capitalize() for word in known.name.replace("-", " ").split()),
        "shortDescription": {"text": known.summary},
        "fullDescription": {"text": known.why},
        "help": {"text": known.fix},
        "defaultConfiguration": {"level": _level(known.severity)},
    }


def _result(finding: Finding, named: list[str]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": named.index(finding.rule),
        # "review": nobody can tell from the source; "fail": it is broken.
        "kind": "review" if finding.state is State.UNVERIFIABLE else "fail",
        "level": "none" if finding.state is State.UNVERIFIABLE else _level(finding.severity),
        "message": {"text": f"{finding.message}. {finding.fix}".strip()},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": quote(finding.path)},
                    "region": {"startLine": finding.line, "startColumn": finding.column},
                }
            }
        ],
        "properties": {"hook": finding.hook, "state": finding.state.value},
    }
    if finding.reason is not None:
        result["suppressions"] = [{"kind": "external", "justification": finding.reason}]
    return result


def _level(severity: Severity) -> str:
    return severity.value
