"""One module per format; each turns a report into text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ..findings import Report
from . import github, json_, junit, sarif, text

__all__ = ["FORMATS"]

FORMATS: Final[dict[str, Callable[[Report], str]]] = {
    "text": text.render,
    "json": json_.render,
    "github": github.render,
    "junit": junit.render,
    "sarif": sarif.render,
}
