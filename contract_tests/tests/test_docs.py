"""The pages of this distribution say what it does."""

from __future__ import annotations

import re
import runpy
import shlex
import tomllib
from pathlib import Path

import pytest

from sconv.cli.main import main
from sconv_contract.cli import parser
from sconv_contract.expected import read_expectations
from sconv_contract.report import FORMATS
from sconv_contract.rules import RULES, TEXTS
from sconv_contract.rules.behaviour import BEHAVIOUR

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "contract-rules.md").read_text()
HOW_TO = (ROOT / "docs" / "how-to" / "verify-a-plugin.md").read_text()


def test_the_page_of_rules_is_what_the_texts_say():
    """``python contract_tests/scripts/rules_page.py`` writes it."""
    script = runpy.run_path(str(ROOT / "contract_tests" / "scripts" / "rules_page.py"))
    assert script["page"](PAGE) == PAGE
    assert all(f"### {rule}: " in PAGE for rule in RULES)
    assert all(f"| {rule} " in PAGE for rule in BEHAVIOUR)


def test_the_page_of_rules_names_no_rule_that_does_not_exist():
    assert set(re.findall(r"SCV\d{3}", PAGE + HOW_TO)) <= TEXTS.keys()


def test_the_known_finding_of_the_page_is_read(tmp_path):
    (block,) = re.findall(r"```toml\n(.*?)```", HOW_TO, re.DOTALL)
    (tmp_path / "pyproject.toml").write_text(block)
    (entry,) = read_expectations(tmp_path / "pyproject.toml").entries
    assert (entry.rule, entry.where) == ("SCV302", "sconv_npu/backend.py")


def test_the_formats_of_the_page_are_all():
    named = re.findall(r"`--format (\S+)`", HOW_TO)[0]
    assert named.replace("\\", "").split("|") == list(FORMATS)


TEMPLATE = "contract_tests/src/sconv_contract/scaffold/template"
COMMANDS = [
    (name, command)
    for name in (
        ".pre-commit-hooks.yaml",
        "contract_tests/README.md",
        "docs/how-to/verify-a-plugin.md",
        f"{TEMPLATE}/README.md.template",
        f"{TEMPLATE}/.github/workflows/contract.yml.template",
    )
    for command in re.findall(r"sconv verify( [^`\n&#]+)", (ROOT / name).read_text())
]


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_every_command_of_a_page_is_one(name, command):
    options = parser().parse_args(shlex.split(command.partition("--print")[0]))
    assert options.target or options.explain or options.behaviour or options.tree


def test_the_pre_commit_hook_passes_a_plugin_and_refuses_a_broken_one(
    corpus, tmp_path, monkeypatch, capsys
):
    """As pre-commit runs it: the entry, in the folder of the repository, with no file names."""
    hook = (ROOT / ".pre-commit-hooks.yaml").read_text()
    assert "pass_filenames: false" in hook
    project = tomllib.loads((ROOT / "contract_tests" / "pyproject.toml").read_text())["project"]
    assert f"sconv-contract=={project['version'].rpartition('.')[0]}.*" in hook
    (entry,) = re.findall(r"^  entry: sconv (.*)$", hook, re.MULTILINE)
    for half, name, code in ((1, "plain", 0), (0, "missing_one", 1)):
        (case,) = [case for case in corpus[half] if case.name == name]
        monkeypatch.chdir(case.unpack(tmp_path / name))
        assert main(shlex.split(entry)) == code
        assert "sconv contract: ." in capsys.readouterr().out


def test_the_repository_can_be_installed_for_its_hook():
    """pre-commit does that; setuptools, which it would take, refuses so many folders."""
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert root["build-system"]["build-backend"] == "hatchling.build"
    assert root["tool"]["hatch"]["build"]["targets"]["wheel"]["bypass-selection"] is True
    assert root["tool"]["uv"]["package"] is False
