"""A new plugin keeps the contract before anybody has touched it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sconv.cli.main import main
from sconv_contract.rules import RULES
from sconv_contract.rules.behaviour import BEHAVIOUR

VERIFY = r"sconv verify (?:\.|--behaviour \w+)"


@pytest.fixture
def plugin(tmp_path) -> Path:
    """A new plugin, installed where a process with PYTHONPATH finds it."""
    folder = tmp_path / "new"
    assert main(["new-plugin", "my-npu", "--device", "npu", "--output", str(folder)]) == 0
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    metadata = folder / "src" / "sconv_plugin_my_npu-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {project['name']}\nVersion: 0.1.0\n")
    ((name, value),) = project["entry-points"]["sconv.backends"].items()
    (metadata / "entry_points.txt").write_text(f"[sconv.backends]\n{name} = {value}\n")
    return folder


def _sconv(plugin: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(plugin / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "sconv", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_it_keeps_every_static_rule(plugin):
    done = _sconv(plugin, "verify", str(plugin), "--strict", "--format", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(json.loads(done.stdout)["rules"].values()) == {"kept"}
    assert json.loads(done.stdout)["rules"].keys() == RULES.keys()
    assert _sconv(plugin, "verify", "my-npu").returncode == 0


def test_it_is_found_and_chosen_by_name_alone(plugin):
    rows = json.loads(_sconv(plugin, "backends", "--json").stdout)["backends"]
    (row,) = [row for row in rows if row["name"] == "my-npu"]
    assert (row["state"], row["priority"], row["contract"]) == ("available", -1, "1.1")


@pytest.mark.slow
def test_it_keeps_every_rule_of_behaviour(plugin, monkeypatch):
    """All rules apply to it, those on graphs too; options for the vendor's own tests do not."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k of_another_suite")
    done = _sconv(plugin, "verify", "--behaviour", "my-npu", "--format", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["rules"] == dict.fromkeys(BEHAVIOUR, "kept")
    assert report["not_asked"] == {}


@pytest.mark.slow
def test_it_keeps_the_rules_on_the_device_that_it_is_for(plugin):
    """Step 1 of its README, and nothing else: rules that meet padded and short rows, and graphs.

    Nobody orders an accelerator's writes, and its tensors have an index that its name lacks.
    """
    description = plugin / "src" / "sconv_my_npu" / "plugin.py"
    text = description.read_text()
    for host, device in (('Final = "cpu"', 'Final = "npu"'), ("Final = -1", "Final = 100")):
        assert text.count(host) == 1
        text = text.replace(host, device)
    description.write_text(text)
    rules = ["SCV402", "SCV403", "SCV421", "SCV443"]
    selected = ["--simulated", "npu", "--select", ",".join(rules), "--format", "json"]
    done = _sconv(plugin, "verify", "--behaviour", "my-npu", *selected)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["rules"] == dict.fromkeys(rules, "kept")


@pytest.mark.slow
def test_a_fault_in_it_is_reported_by_rule(plugin):
    backend = plugin / "src" / "sconv_my_npu" / "backend.py"
    text = backend.read_text().replace(
        '    """Plain torch until a kernel takes its place."""\n',
        "    def _decode(self, x, conv, state, meta):\n        return x.clone()\n",
    )
    backend.write_text(text)
    done = _sconv(
        plugin, "verify", "--behaviour", "my-npu", "--select", "SCV402,SCV423", "--format", "json"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["rules"] == {"SCV402": "broken", "SCV423": "kept"}
    assert "test_a_decode_equals_the_oracle" in report["findings"][0]["message"]


def test_its_readme_names_what_to_replace(plugin):
    readme = (plugin / "README.md").read_text()
    for word in ("DEVICE_TYPE", "probe", "PRIORITY", "CAPABILITIES", "_convolve", "hookimpl"):
        assert word in readme
    for path in plugin.rglob("*.py"):
        assert "$" not in path.read_text()


def test_the_page_on_plugins_starts_from_it(tmp_path):
    """The commands of the page write the files that it lists."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "write-a-plugin.md").read_text()
    (command,) = re.findall(r"^sconv (new-plugin .*)$", page, re.MULTILINE)
    folder = tmp_path / "sconv-plugin-acme"
    assert main([*command.split(), "--output", str(folder)]) == 0
    shown = re.findall(r"^    ((?:src/|tests/)?\w+(?:/\w+)?\.(?:py|toml))\b", page, re.MULTILINE)
    assert "src/sconv_acme/backend.py" in shown
    assert [name for name in shown if not (folder / name).is_file()] == []
    assert {"sconv verify .", "sconv verify --behaviour acme"} <= set(re.findall(VERIFY, page))
    assert "class TestAcme(BackendContract):" in page


@pytest.mark.parametrize(
    ("name", "device", "says"),
    [
        ("NPU", "npu", "lower-case"),
        ("my--npu", "npu", "single dashes"),
        ("1x", "npu", "starts with a digit: it becomes a module, so start it with a letter"),
        ("auto", "npu", "reserved"),
        ("cuda", "cuda", "belongs to sconv-plugin-cuda"),
        ("npu", "npu:0", "no torch device type"),
    ],
)
def test_a_bad_name_is_refused(name, device, says, tmp_path, capsys):
    folder = tmp_path / "new"
    assert main(["new-plugin", name, "--device", device, "--output", str(folder)]) == 2
    assert says in capsys.readouterr().err
    assert not folder.exists()


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["new-plugin", "npu", "--device", "npu", "--output", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_backend_that_is_not_there_cannot_be_run(capsys):
    assert main(["verify", "--behaviour", "nothing-of-this-name"]) == 2
    assert "no entry point of sconv.backends" in capsys.readouterr().err
