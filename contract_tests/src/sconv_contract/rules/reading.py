"""SCV210, and the marked functions that no class shows."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

from ..decorators import is_marker
from ..findings import Finding
from ..resolve import Place, Project, Source
from ..scopes import blocks
from ..source import SourceError
from . import signature
from .rule import Rule, Where
from .wiring import UNVERIFIABLE

__all__ = ["RULES", "stray_marks", "unreadable_file"]

UNREADABLE: Final = Rule(
    "SCV210",
    "file cannot be read",
    "Every Python file of the plugin can be decoded and parsed.",
    "A file that a check skips is where the fault is.",
    "def short_conv(self:  # a syntax error",
    "Correct the file, or verify with the Python version that it is written for.",
)

RULES: Final = (UNREADABLE,)


def unreadable_file(path: Path, problem: SourceError) -> Finding:
    """Return the finding for a file that cannot be read."""
    return UNREADABLE.found(Where(path, problem.line), f"{path.name} {problem}")


def stray_marks(project: Project, source: Source, seen: Collection[ast.AST]) -> Iterator[Finding]:
    """Report marked functions that belong to no class that was checked.

    Args:
        project: Where names are looked up.
        source: The module.
        seen: The classes and functions that were checked.
    """
    for node, place in _statements(source.tree.body, Place(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node in seen:
            continue
        inside_class = bool(place.chain) and isinstance(place.chain[-1], ast.ClassDef)
        if inside_class and place.chain[-1] in seen:
            continue
        if any(is_marker(project, one, place) for one in node.decorator_list):
            what = "a class that is not followed" if inside_class else "no class"
            yield UNVERIFIABLE.found(
                Where.of(source.path, node),
                f"{node.name} is marked as a hook and belongs to {what}",
                hook=node.name,
                leaves_open=signature.OPEN,
            )


def _statements(body: Sequence[ast.stmt], place: Place) -> Iterator[tuple[ast.stmt, Place]]:
    for statement in body:
        yield statement, place
        scoped = isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for block in blocks(statement):
            yield from _statements(block, place.inside(statement) if scoped else place)
