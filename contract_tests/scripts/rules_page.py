"""Writes the entries of docs/reference/contract-rules.md from the texts of the rules.

Run it after a text has changed; a test compares the page with what it writes. What stands under a
heading before its first entry is written by hand, and kept.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Final

from sconv_contract.findings import Severity
from sconv_contract.rules import RULES
from sconv_contract.rules.behaviour import BEHAVIOUR
from sconv_contract.rules.rule import Text

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "contract-rules.md"

_WIDTH: Final = 104


def page(current: str) -> str:
    """Return the page with every entry as the rules' texts say."""
    head, *families = re.split(r"(?m)^(?=## SCV)", current)
    return head + "\n".join(_family(one) for one in families)


def _family(section: str) -> str:
    digit = section.removeprefix("## SCV")[0]
    if digit == "4":
        intro = section.partition("\n| rule |")[0]
        return f"{intro}\n| rule | asks | where to look |\n|---|---|---|\n{_rows()}"
    intro = section.partition("\n### ")[0]
    texts = [rule.text for id_, rule in RULES.items() if id_.startswith(f"SCV{digit}")]
    return "\n".join([intro, *map(_entry, texts)])


def _entry(text: Text) -> str:
    warning = " (warning)" if text.severity is Severity.WARNING else ""
    fence = "toml" if text.example.startswith("[") else "python {.no-run}"
    parts = [
        f"### {text.id}: {text.name}{warning}",
        textwrap.fill(text.summary, _WIDTH),
        textwrap.fill(f"Why: {text.why}", _WIDTH),
        f"```{fence}\n{text.example}\n```",
        textwrap.fill(f"Fix: {text.fix}", _WIDTH),
    ]
    return "\n\n".join(parts) + "\n"


def _rows() -> str:
    return "".join(
        f"| {one.id} {one.name} | {one.summary} | {one.fix} |\n" for one in BEHAVIOUR.values()
    )


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
