"""Modules, and places in them where names are looked up."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import griffe

from .scopes import Scope, Stars, live, statements, type_checking_only

__all__ = ["ClassRef", "Found", "Place", "Source", "absolute", "imported", "until"]


@dataclass(eq=False)
class Source:
    """One parsed module.

    Attributes:
        name: Dotted.
        path: The file.
        tree: Its syntax tree.
        module: griffe's model of it.
    """

    name: str
    path: Path
    tree: ast.Module
    module: griffe.Module
    stars: Stars = field(default_factory=Stars)
    _early: dict[int, Scope] = field(default_factory=dict)

    @cached_property
    def scope(self) -> Scope:
        """The names of the module after it ran."""
        return live(self.tree.body, self.stars)

    def scope_until(self, body: Sequence[ast.stmt]) -> Scope:
        """Return the names after these first statements."""
        if len(body) not in self._early:
            self._early[len(body)] = live(body)
        return self._early[len(body)]

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


def until(body: list[ast.stmt], before: tuple[ast.AST, ...]) -> list[ast.stmt]:
    """Return the statements of a block that ran before any of those."""
    for number, statement in enumerate(body):
        if isinstance(statement, ast.Expr | ast.Assign | ast.Import | ast.ImportFrom):
            within: Iterable[ast.stmt] = (statement,)
        else:
            within = statements((statement,))
        if any(inner is one for inner in within for one in before):
            return body[:number]
    return body


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
