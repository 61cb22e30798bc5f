"""From a class to its attributes: each definition that may count, behind aliases and imports."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

from .decorators import apply, decorated
from .methods import Method
from .resolve import ClassRef, Found, Project

__all__ = ["Members"]


class Members:
    """The attributes of classes; each class body is read once."""

    def __init__(self, project: Project) -> None:
        """Look names up in this project."""
        self.project = project
        self._own: dict[ast.ClassDef, dict[str, list[Method]]] = {}

    def of(self, order: Sequence[ClassRef]) -> dict[str, list[Method]]:
        """Return everything that each attribute of a class may be, inherited ones included.

        An attribute that is defined in one branch alone may also be the inherited one.

        Args:
            order: The class and its bases, in the order of method resolution.
        """
        found: dict[str, list[Method]] = {}
        settled: set[str] = set()
        for ref in order:
            for name, methods in self.own(ref).items():
                if name not in settled:
                    found.setdefault(name, []).extend(methods)
                if self.project.scope(ref.node)[name].certain:
                    settled.add(name)
        return found

    def named(self, order: Sequence[ClassRef], name: str) -> list[Method]:
        """Return everything that one attribute of a class may be."""
        found: list[Method] = []
        for ref in order:
            found += self.own(ref).get(name, [])
            known = self.project.scope(ref.node).get(name)
            if known is not None and known.certain:
                break
        return found

    def own(self, ref: ClassRef) -> dict[str, list[Method]]:
        """Return everything that the attributes which a class body defines may be."""
        if ref.node not in self._own:
            self._own[ref.node] = {
                name: [
                    method
                    for statement in known.definitions
                    for method in _of_statement(self.project, name, ref, statement)
                ]
                for name, known in self.project.scope(ref.node).items()
            }
        return self._own[ref.node]


def _of_statement(project: Project, name: str, ref: ClassRef, statement: ast.stmt) -> list[Method]:
    start = Method(name, ref, statement)
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return [decorated(project, replace(start, function=statement, place=ref.inside))]
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
            return _of_value(project, start, value, 0)
        case ast.ClassDef():
            return [replace(start, kind="class")]
        case _:
            found = project.lookup(name, ref.inside)
            return [_of_found(project, start, one, 0) for one in found]


def _of_value(project: Project, start: Method, value: ast.expr, depth: int) -> list[Method]:
    """Follow ``name = value`` in a class body."""
    if depth > 8:
        return [replace(start, kind="value", unknown=f"{ast.unparse(value)} leads nowhere")]
    inside = start.owner.inside.at(start.statement)
    match value:
        case ast.Lambda():
            return [replace(start, function=value, place=inside)]
        case ast.Name() | ast.Attribute() | ast.IfExp():
            return [
                _of_found(project, start, found, depth) for found in project.evaluate(value, inside)
            ]
        case ast.Call(func=func, args=[inner, *_]):
            return [
                apply(project, func, inside, one, value)
                for one in _of_value(project, start, inner, depth + 1)
            ]
        case ast.Constant() | ast.Tuple() | ast.List() | ast.Dict() | ast.Set():
            return [replace(start, kind="value")]
        case _:
            return [replace(start, kind="value", unknown=f"{ast.unparse(value)} is not followed")]


def _of_found(project: Project, start: Method, found: Found, depth: int) -> Method:
    match found.node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            assert found.place is not None
            return decorated(project, replace(start, function=found.node, place=found.place))
        case ast.Lambda():
            return replace(start, function=found.node, place=found.place)
        case ast.ClassDef():
            return replace(start, kind="class")
        case ast.Call() as call if found.place is not None:
            return _of_value(project, start, call, depth + 1)[0]
        case ast.Constant():
            return replace(start, kind="value")
        case None:
            return replace(start, kind="value", unknown=f"{found.path} cannot be seen")
        case _:
            return replace(start, kind="value", unknown=f"{found.path} is not followed")
