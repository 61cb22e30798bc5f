"""JUnit's XML, one test case a rule, for CI systems that draw those."""

from __future__ import annotations

from xml.etree import ElementTree

from ..findings import Finding, Report, State
from ..rules.every import EVERY

__all__ = ["render"]


def render(report: Report) -> str:
    """Return the report as JUnit XML."""
    states = report.states()
    failures = sum(state in (State.BROKEN, State.UNVERIFIABLE) for state in states.values())
    skipped = sum(state is State.EXPECTED for state in states.values()) + len(report.not_asked)
    suite = ElementTree.Element(
        "testsuite",
        name=f"sconv contract: {report.target}",
        tests=str(len(report.rules) + len(report.stale)),
        failures=str(failures + len(report.stale)),
        errors="0",
        skipped=str(skipped),
    )
    for rule in report.rules:
        name = f"{rule} {EVERY[rule].name}" if rule in EVERY else rule
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"sconv.{report.target}", name=name
        )
        if rule in report.not_asked:
            ElementTree.SubElement(case, "skipped", message=report.not_asked[rule])
            continue
        found = [one for one in report.findings if rule in (one.rule, *one.leaves_open)]
        body = "\n".join(_line(one) for one in found)
        if states[rule] in (State.BROKEN, State.UNVERIFIABLE):
            failure = ElementTree.SubElement(
                case, "failure", message=found[0].message, type=states[rule].value
            )
            failure.text = body
        elif states[rule] is State.EXPECTED:
            ElementTree.SubElement(case, "skipped", message=f"expected: {found[0].reason}")
    for line in report.stale:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"sconv.{report.target}", name=line
        )
        ElementTree.SubElement(case, "failure", message=line, type="stale")
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(
        root, encoding="unicode"
    )


def _line(finding: Finding) -> str:
    return f"{finding.path}:{finding.line}: {finding.rule} {finding.message}. {finding.fix}"
