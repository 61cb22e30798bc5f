"""Modules, and places in them where names are looked up."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import griffe

from .scopes import Block, Scope, blocks, type_checking_only

__all__ = ["ClassRef", "Found", "Place", "Source", "absolute", "imported"]


@dataclass(eq=False)
class Source:
    """One parsed module.

    Attributes:
        name: Dotted.
        path: The file.
        tree: Its syntax tree.
        module: griffe's model of it.
        raw: The bytes of the file.
        block: The names of the module while it runs.
    """

    name: str
    path: Path
    tree: ast.Module
    module: griffe.Module
    raw: bytes
    block: Block

    @property
    def scope(self) -> Scope:
        """The names of the module after it ran."""
        return self.block.scope

    @cached_property
    def statements(self) -> list[tuple[ast.stmt, Place]]:
        """All statements, those inside of classes and functions included, with their places."""
        found: list[tuple[ast.stmt, Place]] = []
        pending = [(statement, Place(self)) for statement in reversed(self.tree.body)]
        while pending:
            statement, place = pending.pop()
            found.append((statement, place))
            if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                place = place.inside(statement)
            inner = [one for block in blocks(statement) for one in block]
            pending += [(one, place) for one in reversed(inner)]
        return found

    @cached_property
    def typing_scope(self) -> Scope:
        """The names that it defines for type checkers alone."""
        return type_checking_only(self.tree.body)


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a module a name is looked up.

    Attributes:
        source: The module.
        chain: The classes and functions that it is inside of, outermost first.
        before: Statements that have not run when the name is looked up. A class body runs where
            it stands; a function runs when everything has.
    """

    source: Source
    chain: tuple[ast.AST, ...] = ()
    before: tuple[ast.AST, ...] = ()

    def inside(self, node: ast.AST) -> Place:
        """Return the place inside of a class or function that stands here."""
        before = (*self.before, node) if isinstance(node, ast.ClassDef) else ()
        return Place(self.source, (*self.chain, node), before)

    def at(self, statement: ast.AST) -> Place:
        """Return this place as it is when a statement of it begins."""
        return Place(self.source, self.chain, (*self.before, statement))

    @property
    def path(self) -> str:
        """The dotted path of this place."""
        names = [getattr(node, "name", "<lambda>") for node in self.chain]
        return ".".join([self.source.name, *names])


@dataclass(frozen=True, slots=True)
class Found:
    """What an expression may mean.

    Attributes:
        path: Dotted, as far as known.
        node: A class, a function, a module or a value; None if it lies outside of what is read.
        place: Where the node stands.
    """

    path: str
    node: ast.AST | None = None
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class ClassRef:
    """A class definition."""

    path: str
    node: ast.ClassDef
    place: Place

    @property
    def inside(self) -> Place:
        """The place of its members."""
        return self.place.inside(self.node)


def absolute(statement: ast.Import | ast.ImportFrom, source: Source) -> list[str]:
    """Return the dotted paths that an import statement names; of a star, its module."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    paths = [
        griffe.relative_to_absolute(statement, alias, source.module) for alias in statement.names
    ]
    return [path.removesuffix(".*") for path in paths]


def imported(statement: ast.Import | ast.ImportFrom, name: str, source: Source) -> Iterator[str]:
    """Yield the dotted paths that an import statement binds a name to."""
    for alias in statement.names:
        if isinstance(statement, ast.ImportFrom):
            if (alias.asname or alias.name) == name:
                yield griffe.relative_to_absolute(statement, alias, source.module)
        elif alias.asname == name:
            yield alias.name
        elif alias.asname is None and alias.name.partition(".")[0] == name:
            yield name
