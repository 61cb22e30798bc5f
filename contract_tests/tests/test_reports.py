"""What the formats make of every kind of report: expected, stale, unverifiable, odd texts."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

from sconv.cli.main import main
from sconv_contract.behaviour.command import causes_once
from sconv_contract.findings import Finding, Report, Severity, State
from sconv_contract.report import FORMATS
from sconv_contract.rules import RULES, TEXTS

SCHEMA = json.loads((Path(__file__).parent / "data" / "sarif-2.1.0-rtm.5.json").read_text())

#: A report as bad as one can be, about both halves.
REPORT = Report(
    target="a & b <c>",
    rules=list(TEXTS),
    findings=[
        Finding("", 1, "SCV402", "no test of this rule ran", leaves_open=("SCV402",)),
        Finding("/somewhere/else/rulings.py", 7, "SCV403", "\x1b[31m0 != \x00nan\ud800, 50 %"),
        Finding("a b/ü,:.py", 3, "SCV101", "two\nlines", fix="say <so>", hook="warmup", column=5),
        Finding("a.py", 4, "SCV302", "kept", severity=Severity.WARNING),
        Finding("a.py", 9, "SCV301", "synced", reason="their ticket & ours"),
    ],
    not_asked={"SCV443": "it declares graph_capture=False"},
    stale=["SCV207 is expected and does not occur: remove the entry"],
)
CLEAN = Report(target="npu", rules=list(RULES), findings=[])


@pytest.mark.parametrize("report", [REPORT, CLEAN], ids=["bad", "clean"])
def test_sarif_is_valid_whatever_is_in_it(report):
    log = json.loads(FORMATS["sarif"](report))
    jsonschema.Draft4Validator(SCHEMA).validate(log)
    (run,) = log["runs"]
    assert len(run["results"]) == len(report.findings)
    assert run["invocations"][0]["exitCode"] == int(not report.clean)
    assert len(run["invocations"][0]["toolExecutionNotifications"]) == len(report.stale)
    suppressed = [one for one in run["results"] if one.get("suppressions")]
    assert [one["ruleId"] for one in suppressed] == (["SCV301"] if report is REPORT else [])
    assert {one["level"] for one in run["results"]} <= {"error", "warning", "none"}


@pytest.mark.parametrize("report", [REPORT, CLEAN], ids=["bad", "clean"])
def test_junit_is_xml_whose_counts_are_right(report):
    (suite,) = ElementTree.fromstring(FORMATS["junit"](report).encode("utf-8"))
    assert int(suite.get("tests")) == len(suite) == len(report.rules) + len(report.stale)
    for count, tag in (("failures", "failure"), ("skipped", "skipped")):
        assert int(suite.get(count)) == sum(case.find(tag) is not None for case in suite)
    failed = [case.get("name")[:6] for case in suite if case.find("failure") is not None]
    # A warning is told, and fails only under --strict.
    assert failed == (["SCV101", "SCV402", "SCV403", "SCV207"] if report is REPORT else [])
    assert bool(suite.findall("testcase/system-out")) is (report is REPORT)


def test_github_gives_each_finding_one_line():
    lines = FORMATS["github"](REPORT).splitlines()
    commands = [line for line in lines if line.startswith("::")]
    assert len(commands) == len(REPORT.findings) + len(REPORT.stale)
    assert (
        "::error file=a b/ü%2C%3A.py,line=3,col=5,title=SCV101 broken::two%0Alines. say <so>"
        in lines
    )
    assert any(line.startswith("::warning file=a.py,line=4") for line in lines)
    assert any(line.startswith("::notice file=a.py,line=9") for line in lines)
    assert lines[len(commands)].startswith("sconv contract: ")


def test_json_has_everything():
    data = json.loads(FORMATS["json"](REPORT))
    assert data["rules"].keys() == TEXTS.keys() - {"SCV443"}
    states = [one["state"] for one in data["findings"]]
    assert states == ["unverifiable", "broken", "broken", "broken", "expected"]
    assert (data["clean"], data["stale"]) == (False, list(REPORT.stale))


def test_a_cause_that_rules_share_is_told_once_and_without_their_advice():
    """A state on another device ends every step alike; a wrong result is a rule's own."""
    refused = "BatchError: slots is on npu:{}, the state is on npu"
    raised = [
        ("SCV403", "one", refused.format(1)),
        ("SCV402", "two", refused.format(0)),
        ("SCV421", "three", refused.format(0)),
        ("SCV421", "four", refused.format(0)),
        *((rule, "five", "AssertionError: 1 != 2") for rule in ("SCV405", "SCV406", "SCV407")),
        *((rule, "six", "KeyError: 'x'") for rule in ("SCV441", "SCV442")),
    ]
    failed = [
        (Finding("checks.py", 122, rule, f"{test}: {text}", fix=f"Where to look: {rule}."), text)
        for rule, test, text in raised
    ]
    report = Report("npu", list(TEXTS), sorted(causes_once(failed)))
    assert {rule for rule, state in report.states().items() if state is State.BROKEN} == {
        rule for rule, _, _ in raised
    }
    text = FORMATS["text"](report)
    assert text.count("slots is on") == 1
    assert f"SCV402 error: {refused.format(0)} (and so end SCV403, SCV421)" in text
    assert text.count("it ends as SCV402 does") == 2
    assert "fix: " not in text
    advice = [line.strip() for line in text.splitlines() if "Where to look" in line]
    assert advice == [
        f"Where to look: {rule}." for rule in ("SCV405", "SCV406", "SCV407", "SCV441", "SCV442")
    ]


@pytest.mark.parametrize("style", ["github", "sarif", "text"])
def test_files_are_named_from_where_the_command_runs(corpus, style, tmp_path, monkeypatch, capsys):
    """A plugin is often a folder of a repository, and annotations are of the repository's files."""
    (case,) = [case for case in corpus[0] if case.name == "missing_one"]
    case.unpack(tmp_path / "plugins" / "npu")
    monkeypatch.chdir(tmp_path)
    assert main(["verify", "plugins/npu", "--format", style]) == 1
    assert "plugins/npu/sconv_npu/backend.py" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "plugins" / "npu")
    assert main(["verify", ".", "--format", style]) == 1
    text = capsys.readouterr().out
    assert "sconv_npu/backend.py" in text
    assert "plugins/npu" not in text
