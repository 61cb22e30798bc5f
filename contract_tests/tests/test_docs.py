"""The pages of this distribution say what it does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from sconv_contract.behaviour.rules import BEHAVIOUR
from sconv_contract.expected import read_expectations
from sconv_contract.report import FORMATS
from sconv_contract.rules import RULES
from sconv_contract.rules.every import EVERY

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "contract-rules.md").read_text()
HOW_TO = (ROOT / "docs" / "how-to" / "verify-a-plugin.md").read_text()


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_the_page_of_rules_has_each_static_rule_whole(rule):
    section = PAGE.partition(f"### {rule.id}: {rule.name}")[2].partition("\n### ")[0]
    for part in (rule.summary, f"Why: {rule.why}", f"Fix: {rule.fix}"):
        assert flat(part) in flat(section)
    assert rule.example in section


@pytest.mark.parametrize("rule", BEHAVIOUR.values(), ids=list(BEHAVIOUR))
def test_the_page_of_rules_has_each_rule_of_behaviour(rule):
    assert f"| {rule.id} {rule.name} | {rule.summary} | {rule.fix} |" in PAGE


def test_the_page_of_rules_names_no_rule_that_does_not_exist():
    assert set(re.findall(r"SCV\d{3}", PAGE + HOW_TO)) <= EVERY.keys()


def test_the_known_finding_of_the_page_is_read(tmp_path):
    (block,) = re.findall(r"```toml\n(.*?)```", HOW_TO, re.DOTALL)
    (tmp_path / "pyproject.toml").write_text(block)
    (entry,) = read_expectations(tmp_path / "pyproject.toml").entries
    assert (entry.rule, entry.where) == ("SCV302", "sconv_npu/backend.py")


def test_the_formats_of_the_page_are_all():
    named = re.findall(r"`--format (\S+)`", HOW_TO)[0]
    assert named.replace("\\", "").split("|") == list(FORMATS)


def test_the_pre_commit_hook_runs_a_command_that_exists():
    hook = (ROOT / ".pre-commit-hooks.yaml").read_text()
    project = tomllib.loads((ROOT / "contract_tests" / "pyproject.toml").read_text())["project"]
    assert "entry: sconv verify ." in hook
    assert "verify" in project["entry-points"]["sconv.commands"]
    assert f"sconv-contract=={project['version'].rpartition('.')[0]}.*" in hook
