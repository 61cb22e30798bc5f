"""The page of operators and the list in the package are the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sconv_ascend.operators import OPERATORS, OUT_OF_GRAPH

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "ascend-operators.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the pages are not beside the package")
@pytest.mark.parametrize(
    ("heading", "listed"), [("In graph", OPERATORS), ("Outside of any graph", OUT_OF_GRAPH)]
)
def test_the_page_has_every_operator(heading: str, listed: frozenset[str]) -> None:
    text = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    named = re.findall(r"^\| `(\w+)` \| direct", text, re.MULTILINE)
    assert len(named) == len(set(named))
    assert {f"aten::{name}" for name in named} == listed
