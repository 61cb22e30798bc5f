"""The table of known faults names the tests that exist, and every test is in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "reference" / "known-faults.md"
KINDS = (
    "adopt|amb|cap|cli|dev|doc|err|graph|hf|hook|kern|layout|len|mem|mut|pad|plug|"
    "slot|spec|track|type"
)

pytestmark = pytest.mark.skipif(not TABLE.exists(), reason="the pages are not beside the package")


def table() -> dict[str, str]:
    """Return the row of each id."""
    rows = re.findall(r"^\| ([A-Z]+-\d+) \|(.*)\|$", TABLE.read_text(), re.MULTILINE)
    found = dict(rows)
    assert len(found) == len(rows) > 70
    return found


def ids_in(file: Path) -> set[str]:
    """Return the ids in the names of a file's tests; a name may carry several."""
    names = re.findall(r"^(?: {4})?def (test_\w+)", file.read_text(), re.MULTILINE)
    found: set[str] = set()
    for name in names:
        for kind, first, second in re.findall(rf"_({KINDS})_(\d+)(?:_and_(\d+))?", name):
            found |= {f"{kind}-{number}".upper() for number in (first, second) if number}
    return found


def test_every_test_that_a_row_links_exists() -> None:
    linked = 0
    for name, row in table().items():
        for target in re.findall(r"\]\(([^)]*test_[^)]*)\)", row):
            file = (TABLE.parent / target).resolve()
            assert file.is_file(), f"{name}: {target}"
            if "test_faults" in target or "test_sharding" in target:
                assert name in ids_in(file), f"{name} has no test in {target}"
                linked += 1
    assert linked > 40


def test_every_test_named_by_an_id_has_a_row() -> None:
    rows = table()
    parts = ("core", "plugins", "engines")
    files = [file for part in parts for file in (ROOT / part).rglob("test_*.py")]
    named = {name: file for file in files for name in ids_in(file)}
    assert len(named) > 60
    assert {name: file.name for name, file in named.items() if name not in rows} == {}
