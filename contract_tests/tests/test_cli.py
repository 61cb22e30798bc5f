"""The command: targets, formats, exit codes, rules chosen, known findings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

from sconv.cli.main import main
from sconv_contract.rules import RULES, TEXTS

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def case(corpus):
    """Unpacks a case of the corpus by name."""
    known = {one.name: one for half in corpus for one in half}
    return lambda name, folder: known[name].unpack(folder)


@pytest.fixture(autouse=True)
def outside_of_ci(monkeypatch):
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)


def verify(*arguments: object) -> int:
    return main(["verify", *map(str, arguments)])


def test_exit_codes(case, tmp_path, capsys):
    assert verify(case("plain", tmp_path / "good")) == 0
    assert verify(case("missing_one", tmp_path / "bad")) == 1
    assert verify(tmp_path / "nothing") == 2
    assert "is no folder, no installed distribution and no entry point" in capsys.readouterr().err


def test_a_warning_fails_only_when_strict(case, tmp_path):
    folder = case("dynamic_arange", tmp_path)
    assert verify(folder) == 0
    assert verify(folder, "--strict") == 1


def test_text_says_what_is_passed_what_is_accepted_and_what_to_change(case, tmp_path, capsys):
    verify(case("missing_one", tmp_path))
    text = capsys.readouterr().out
    assert "sconv_npu/backend.py:12:5: SCV101 error: init_graph_state lacks the parameter" in text
    assert "'max_num_tokens'; it is called with: max_bs, max_num_tokens" in text
    assert "fix: Add the parameter." in text
    assert f"rules: {len(RULES) - 1} kept, 1 broken, 0 expected, 0 unverifiable" in text
    assert "broken: SCV101 (missing parameter)" in text


def test_unverifiable_is_never_kept(case, tmp_path, capsys):
    assert verify(case("base_out_of_sight", tmp_path), "--format", "json") == 1
    states = json.loads(capsys.readouterr().out)["rules"]
    assert states["SCV101"] == states["SCV207"] == "unverifiable"
    assert states["SCV204"] == "kept"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--select", "SCV101"], 1),
        (["--select", "SCV2"], 0),
        (["--ignore", "SCV1"], 0),
        (["--select", "SCV1", "--ignore", "SCV101,SCV102"], 0),
        (["--select", "SCV9"], 2),
    ],
)
def test_select_and_ignore(case, tmp_path, arguments, code):
    assert verify(case("missing_one", tmp_path), *arguments) == code


def test_list_and_explain_cover_every_rule(capsys):
    assert verify("--list") == 0
    listed = capsys.readouterr().out
    for rule in TEXTS.values():
        assert f"{rule.id}  " in listed
        assert verify("--explain", rule.id) == 0
        page = capsys.readouterr().out
        for part in (rule.summary, rule.why, rule.fix, rule.example.partition("\n")[0]):
            assert part in page
    assert verify("--explain", "SCV999") == 2


@pytest.mark.parametrize("name", ["missing_one", "base_out_of_sight", "dynamic_arange", "plain"])
def test_sarif_is_valid(case, tmp_path, capsys, name):
    verify(case(name, tmp_path), "--format", "sarif")
    log = json.loads(capsys.readouterr().out)
    schema = json.loads((DATA / "sarif-2.1.0-rtm.5.json").read_text())
    jsonschema.Draft4Validator(schema).validate(log)
    results = log["runs"][0]["results"]
    assert bool(results) is (name != "plain")
    rules = log["runs"][0]["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == list(RULES)
    for result in results:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        assert (tmp_path / uri).is_file()
    levels = {"missing_one": "error", "base_out_of_sight": "none", "dynamic_arange": "warning"}
    assert {result["level"] for result in results} == ({levels[name]} if results else set())


def test_the_schema_refuses_what_is_no_sarif():
    schema = json.loads((DATA / "sarif-2.1.0-rtm.5.json").read_text())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft4Validator(schema).validate({"version": "2.1.0", "runs": [{}]})


def test_junit_has_a_case_for_each_rule(case, tmp_path, capsys):
    verify(case("missing_one", tmp_path), "--format", "junit")
    suite = ElementTree.fromstring(capsys.readouterr().out)[0]
    failed = [one.get("name") for one in suite if one.find("failure") is not None]
    assert failed == ["SCV101 missing parameter"]
    assert suite.get("tests") == str(len(RULES)) == str(len(suite))
    assert suite.get("failures") == "1"


def test_github_annotations_are_the_default_in_its_ci(case, tmp_path, capsys, monkeypatch):
    folder = case("missing_one", tmp_path)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    verify(folder)
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "::error file=sconv_npu/backend.py,line=12,col=5,title=SCV101 broken::init_graph_state"
    )
    assert "\n" not in first
    assert any("rules:" in line for line in rest)


def test_a_report_can_go_to_a_file(case, tmp_path, capsys):
    folder = case("missing_one", tmp_path / "plugin")
    assert verify(folder, "--format", "json", "--output", tmp_path / "report.json") == 1
    assert json.loads((tmp_path / "report.json").read_text())["clean"] is False
    assert capsys.readouterr().out == ""


def _expect(folder: Path, **entry: str) -> None:
    lines = ["", "[[tool.sconv.contract.expected]]"]
    lines += [f"{key} = {value}" for key, value in entry.items()]
    with (folder / "pyproject.toml").open("a") as file:
        file.write("\n".join(lines) + "\n")


GOOD_ENTRY = {"rule": '"SCV101"', "reason": '"ticket 4411"', "until": "9999-01-01"}


@pytest.mark.parametrize("where", [None, "backend.py", "sconv_npu/backend.py", "init_graph_state"])
def test_a_known_finding_is_expected(case, tmp_path, capsys, where):
    folder = case("missing_one", tmp_path)
    _expect(folder, **GOOD_ENTRY, **({"where": f'"{where}"'} if where else {}))
    assert verify(folder) == 0
    text = capsys.readouterr().out
    assert "SCV101 expected: init_graph_state" in text
    assert "expected: ticket 4411" in text
    assert "1 expected" in text


@pytest.mark.parametrize(
    ("name", "entry", "says"),
    [
        ("plain", GOOD_ENTRY, "does not occur: remove the entry"),
        ("missing_one", GOOD_ENTRY | {"where": '"kernels.py"'}, "does not occur"),
        ("missing_one", GOOD_ENTRY | {"until": "2001-01-01"}, "was expected until 2001-01-01"),
    ],
)
def test_a_known_finding_that_vanished_or_expired_fails(case, tmp_path, capsys, name, entry, says):
    folder = case(name, tmp_path)
    _expect(folder, **entry)
    assert verify(folder) == 1
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    "entry",
    [
        {"rule": '"SCV101"', "until": "9999-01-01"},
        {"rule": '"SCV101"', "reason": '" "', "until": "9999-01-01"},
        {"rule": '"SCV101"', "reason": '"x"'},
        {"rule": '"SCV101"', "reason": '"x"', "until": '"soon"'},
        {"rule": '"SCV999"', "reason": '"x"', "until": "9999-01-01"},
        {"rule": '["SCV101"]', "reason": '"x"', "until": "9999-01-01"},
        GOOD_ENTRY | {"where": "3"},
        GOOD_ENTRY | {"untill": "1"},
    ],
)
def test_a_malformed_known_finding_is_an_error(case, tmp_path, entry):
    folder = case("missing_one", tmp_path)
    _expect(folder, **entry)
    assert verify(folder) == 2


def test_a_known_finding_of_a_rule_that_is_not_asked_is_left_alone(case, tmp_path):
    folder = case("plain", tmp_path)
    _expect(folder, **GOOD_ENTRY)
    assert verify(folder, "--ignore", "SCV101") == 0


@pytest.mark.parametrize(
    "folder", sorted((ROOT / "plugins").glob("*/pyproject.toml")), ids=lambda path: path.parent.name
)
def test_every_plugin_of_this_project_is_clean(folder, capsys):
    assert verify(folder.parent, "--strict") == 0, capsys.readouterr().out
    assert "checked entry point" in capsys.readouterr().out


@pytest.mark.parametrize("target", [ROOT / "plugins" / "cpu", "sconv-plugin-cpu", "cpu"])
def test_this_projects_cpu_plugin_is_clean(target, capsys):
    assert verify(target, "--strict") == 0
    text = capsys.readouterr().out
    assert "checked entry point cpu = sconv_cpu.plugin:plugin" in text
    assert "checked class sconv_cpu.backend.CpuBackend" in text


def test_a_folder_of_source_is_checked_without_its_project(case, tmp_path, capsys):
    folder = case("missing_one", tmp_path)
    assert verify(folder / "sconv_npu") == 1
    text = capsys.readouterr().out
    assert "SCV101" in text
    assert "not asked: SCV203" in text


def test_another_folder_can_hold_what_it_builds_on(case, tmp_path):
    folder = case("base_out_of_sight", tmp_path / "plugin")
    library = tmp_path / "libraries" / "a_library_that_nobody_has"
    library.mkdir(parents=True)
    skeleton = (folder / "sconv_npu" / "good.py").read_text()
    (library / "__init__.py").write_text(skeleton.replace("class Good", "class Base"))
    assert verify(folder) == 1
    assert verify(folder, "--search-path", library.parent) == 0


def test_tree_needs_a_hook_and_uses_the_formats(tmp_path, capsys):
    (tmp_path / "npu.py").write_text("class Npu:\n    def warmup(self): ...\n")
    (tmp_path / "engine.py").write_text("def start(b):\n    b.warmup(1)\n")
    with pytest.raises(SystemExit) as stopped:
        verify("--tree", tmp_path)
    assert stopped.value.code == 2
    assert verify("--tree", tmp_path, "--hook", "warmup", "--format", "json") == 1
    assert verify("--tree", tmp_path, "--hook", "warm_up") == 2
    assert '"rule": "SCV101"' in capsys.readouterr().out


def test_it_needs_no_torch_and_imports_nothing_of_the_plugin(case, tmp_path):
    """A plugin whose import would end the process is checked in a process without torch."""
    folder = case("plain", tmp_path)
    package = folder / "sconv_npu" / "__init__.py"
    package.write_text("raise SystemExit('imported')\n")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from sconv.cli.main import main\n"
        f"code = main(['verify', {str(folder)!r}])\n"
        "assert not any(name.startswith('sconv_npu') for name in sys.modules)\n"
        "raise SystemExit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "27 kept" in done.stdout or "kept, 0 broken" in done.stdout


def test_one_plugin_takes_half_a_second(case, tmp_path, monkeypatch):
    """Processor time of the whole command; other work on the machine makes it longer at times."""
    folder = case("built_on_core", tmp_path / "plugin")
    # As after an installation, which compiles: the first run writes the bytecode.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "bytecode"))
    command = [sys.executable, "-m", "sconv", "verify", str(folder)]
    assert any(_seconds(command) < 0.5 for _ in range(10))


def _seconds(command: list[str]) -> float:
    before = os.times()
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    after = os.times()
    user, system = after.children_user, after.children_system
    return user + system - before.children_user - before.children_system


def test_a_package_below_another_keeps_its_full_name(case, tmp_path, capsys):
    """Relative imports that leave the given folder are followed."""
    folder = case("plain", tmp_path)
    inner = folder / "sconv_npu" / "kernels"
    inner.mkdir()
    (inner / "__init__.py").write_text("")
    (inner / "warm.py").write_text(
        "from sconv import hookimpl\n\nfrom ..good import Good\n\n\nclass Warm(Good):\n"
        "    @hookimpl\n    def warmup(self, times): ...\n"
    )
    assert verify(inner, "--format", "json") == 1
    report = json.loads(capsys.readouterr().out)
    assert [one["rule"] for one in report["findings"]] == ["SCV102"]
    assert report["subjects"] == ["class sconv_npu.kernels.warm.Warm"]


def test_hook_3_source_without_any_hook_is_no_pass(tmp_path, capsys):
    (tmp_path / "model.py").write_text("class Model:\n    def warmup(self): ...\n")
    assert verify(tmp_path) == 2
    assert "no class with a hook of sconv" in capsys.readouterr().err
