"""JUnit's XML, one test case a rule, for CI systems that draw those."""

from __future__ import annotations

import re
from typing import Final
from xml.etree import ElementTree

from ..findings import Finding, Report, State
from ..rules import TEXTS

__all__ = ["render"]

_NO_XML: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def render(report: Report) -> str:
    """Return the report as JUnit XML."""
    states = report.states()
    failing = {rule for one in report.failing for rule in (one.rule, *one.leaves_open)}
    failing &= states.keys()
    skipped = sum(state is State.EXPECTED for state in states.values()) + len(report.not_asked)
    suite = ElementTree.Element(
        "testsuite",
        name=f"sconv contract: {report.target}",
        tests=str(len(report.rules) + len(report.stale)),
        failures=str(len(failing) + len(report.stale)),
        errors="0",
        skipped=str(skipped),
    )
    for rule in report.rules:
        name = f"{rule} {TEXTS[rule].name}" if rule in TEXTS else rule
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"sconv.{report.target}", name=name
        )
        if rule in report.not_asked:
            ElementTree.SubElement(case, "skipped", message=report.not_asked[rule])
            continue
        found = [one for one in report.findings if rule in (one.rule, *one.leaves_open)]
        body = "\n".join(_line(one) for one in found)
        if rule in failing:
            failure = ElementTree.SubElement(
                case, "failure", message=found[0].message, type=states[rule].value
            )
            failure.text = body
        elif states[rule] is State.EXPECTED:
            ElementTree.SubElement(case, "skipped", message=f"expected: {found[0].reason}")
        elif found:  # a warning
            ElementTree.SubElement(case, "system-out").text = body
    for line in report.stale:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"sconv.{report.target}", name=line
        )
        ElementTree.SubElement(case, "failure", message=line, type="stale")
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    # What a failing assertion shows may hold characters that XML has no way to write.
    text = _NO_XML.sub("\N{REPLACEMENT CHARACTER}", text)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}'


def _line(finding: Finding) -> str:
    return f"{finding.path}:{finding.line}: {finding.rule} {finding.message}. {finding.fix}"
