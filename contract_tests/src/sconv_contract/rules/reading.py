"""SCV210, and the marked functions that no class shows."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

from ..contract import DISCOVERY, STEP
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
    """Report hooks that are made in ways which the check of classes does not follow.

    Args:
        project: Where names are looked up.
        source: The module.
        seen: The classes and functions that were checked.
    """
    hooks = STEP.keys() | DISCOVERY.keys()
    for node, place in _statements(source.tree.body, Place(source)):
        inside_class = bool(place.chain) and isinstance(place.chain[-1], ast.ClassDef)
        where = Where.of(source.path, node)
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if node in seen or (inside_class and place.chain[-1] in seen):
                    continue
                if any(is_marker(project, one, place) for one in node.decorator_list):
                    what = "a class that is not followed" if inside_class else "no class"
                    yield UNVERIFIABLE.found(
                        where,
                        f"{node.name} is marked as a hook and belongs to {what}",
                        hook=node.name,
                        leaves_open=signature.OPEN,
                    )
            case ast.Expr(value=ast.Call(func=ast.Name(id="setattr"), args=[_, given, *_])):
                name = given.value if isinstance(given, ast.Constant) else None
                if name in hooks:
                    yield _afterwards(where, str(name), "setattr puts it into something")
            case ast.Assign(targets=[ast.Attribute(attr=name)]) if name in hooks:
                yield _afterwards(where, name, "it is assigned to something")


def _afterwards(where: Where, name: str, how: str) -> Finding:
    return UNVERIFIABLE.found(
        where,
        f"{name}: {how} after its class was made",
        hook=name,
        leaves_open=signature.OPEN,
    )


def _statements(body: Sequence[ast.stmt], place: Place) -> Iterator[tuple[ast.stmt, Place]]:
    for statement in body:
        yield statement, place
        scoped = isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for block in blocks(statement):
            yield from _statements(block, place.inside(statement) if scoped else place)
