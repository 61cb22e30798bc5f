"""The rooms and doors of the packages are those that the architecture page draws."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from importlinter.application import use_cases
from importlinter.configuration import configure

import sconv.plugin

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
PAGE = (ROOT / "docs/explanation/architecture.md").read_text()

_CELL = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("contract", [one["id"] for one in SETTINGS["contracts"]])
def test_imports_keep_to(contract: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    configure()
    assert use_cases.lint_imports(
        config_filename="pyproject.toml", limit_to_contracts=(contract,), cache_dir=None
    )


def test_the_page_draws_the_rooms_from_the_top_down() -> None:
    assert _CELL.findall(section("The rooms of core")) == SETTINGS["contracts"][0]["layers"]


@pytest.mark.parametrize("package", ["core/src/sconv", "contract_tests/src/sconv_contract"])
def test_a_package_has_at_most_15_rooms_at_its_top(package: str) -> None:
    rooms = [
        path.name
        for path in (ROOT / package).iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    ]
    assert len(rooms) <= 15, sorted(rooms)


def test_the_page_of_the_plugin_door_lists_its_names() -> None:
    page = (ROOT / "docs/reference/plugin-door.md").read_text()
    assert sorted(_CELL.findall(page)) == sorted(sconv.plugin.__all__)
