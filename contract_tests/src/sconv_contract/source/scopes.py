"""Which definitions a name can have when a block has run.

Both branches of an ``if`` or ``try`` count, and a definition that a later one certainly overwrites
does not. Definitions inside functions are no definitions of the block.
"""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = [
    "Block",
    "Live",
    "Scope",
    "Stars",
    "blocks",
    "live",
    "statements",
    "type_checking_only",
]


@dataclass(frozen=True, eq=False)
class Live:
    """What a name may be.

    Attributes:
        certain: It is defined whichever way the block ran.
        statement: What has defined it last, or None if there are several ways.
        ways: What it may be by each of them. They are shared, not copied: a name that is defined
            under thousands of conditions has as many of these, and not the square of it.
    """

    certain: bool
    statement: ast.stmt | None = None
    ways: tuple[Live, ...] = ()

    @cached_property
    def definitions(self) -> tuple[ast.stmt, ...]:
        """The statements that may have defined it last."""
        found: dict[ast.stmt, None] = {}
        seen: set[Live] = set()
        pending = [self]
        while pending:
            one = pending.pop()
            if one not in seen:
                seen.add(one)
                found |= {} if one.statement is None else {one.statement: None}
                pending += reversed(one.ways)
        return tuple(found)


Scope = dict[str, Live]


class Stars(list[ast.ImportFrom]):
    """The ``from … import *`` statements of a block."""


def live(body: Sequence[ast.stmt], stars: Stars | None = None) -> Scope:
    """Return the names that a block defines, each with what it may be afterwards.

    Args:
        body: The block.
        stars: Receives the star imports that it runs.
    """
    return _Names.after(body, None, stars if stars is not None else Stars()).scope()


class Block:
    """The body of a module or class, and the names that it has while it runs.

    Each statement is looked at once, whatever number of moments is asked for.
    """

    def __init__(self, body: Sequence[ast.stmt]) -> None:
        """Read a body."""
        self.body = body
        self.stars = Stars()
        self._history: dict[str, list[tuple[int, Live | None]]] = {}
        now = _Names(None)
        for number, statement in enumerate(body, 1):
            step = _Names(now)
            step.run(statement, self.stars)
            for name, known in step.changed.items():
                self._history.setdefault(name, []).append((number, known))
            now.changed |= step.changed
        self.scope = now.scope()

    @cached_property
    def _numbers(self) -> dict[ast.stmt, int]:
        return {
            inner: number
            for number, statement in enumerate(self.body)
            for inner in statements((statement,))
        }

    def before(self, later: Sequence[ast.AST], name: str) -> Live | None:
        """Return what a name may be before any of these statements ran, or None."""
        numbers = [self._numbers[one] for one in later if one in self._numbers]
        history = self._history.get(name, [])
        if numbers:
            place = bisect_right(history, min(numbers), key=lambda entry: entry[0])
            history = history[:place]
        return history[-1][1] if history else None


def type_checking_only(body: Sequence[ast.stmt]) -> Scope:
    """Return the names that a block defines under ``if TYPE_CHECKING`` for type checkers alone."""
    found: Scope = {}
    for statement in body:
        if isinstance(statement, ast.If) and _is_type_checking(statement.test):
            found |= live(statement.body)
    return found


def statements(body: Iterable[ast.stmt]) -> Iterable[ast.stmt]:
    """Yield the statements that running a block may run, nested blocks included, calls not."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(statement, ast.If) and _is_type_checking(statement.test):
            yield from statements(statement.orelse)
            continue
        for block in blocks(statement):
            yield from statements(block)


def blocks(statement: ast.stmt) -> Iterable[list[ast.stmt]]:
    """Return the blocks of statements that a statement holds."""
    if not hasattr(statement, "body") and not isinstance(statement, ast.Match):
        return  # most statements hold none
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if isinstance(block, list):
            yield block
    for handler in getattr(statement, "handlers", []):
        yield handler.body
    for case in getattr(statement, "cases", []):
        yield case.body


class _Names:
    """Names as they are at a point of a block: what changed since another point."""

    def __init__(self, before: _Names | None) -> None:
        self.before = before
        self.changed: dict[str, Live | None] = {}

    @classmethod
    def after(cls, body: Sequence[ast.stmt], before: _Names | None, stars: Stars) -> _Names:
        """Return the names after a block."""
        names = cls(before)
        for statement in body:
            names.run(statement, stars)
        return names

    def scope(self) -> Scope:
        """Return the names that changed and are still there."""
        return {name: known for name, known in self.changed.items() if known is not None}

    def get(self, name: str) -> Live | None:
        """Return what a name may be."""
        names: _Names | None = self
        while names is not None:
            if name in names.changed:
                return names.changed[name]
            names = names.before
        return None

    def run(self, statement: ast.stmt, stars: Stars) -> None:
        """Take up what a statement defines."""
        match statement:
            case ast.If():
                if _is_type_checking(statement.test):
                    self.changed |= self.after(statement.orelse, self, stars).changed
                    return
                blocks_ = (statement.body, statement.orelse)
                ways = [(block, self.after(block, self, stars)) for block in blocks_]
                self._either(_returning(ways))
            case ast.Try() | ast.TryStar():
                self._try(statement, stars)
            case ast.With() | ast.AsyncWith():
                self.changed |= self.after(statement.body, self, stars).changed
            case ast.For() | ast.AsyncFor() | ast.While():
                self._either([_Names(self), self.after(statement.body, self, stars)])
                self.changed |= self.after(statement.orelse, self, stars).changed
            case ast.Match():
                ran = [self.after(case.body, self, stars) for case in statement.cases]
                self._either([_Names(self), *ran])
            case ast.Delete():
                gone = [target.id for target in statement.targets if isinstance(target, ast.Name)]
                self.changed |= dict.fromkeys(gone)
            case ast.ImportFrom() if any(alias.name == "*" for alias in statement.names):
                stars.append(statement)
            case _:
                defined = Live(True, statement)
                self.changed |= dict.fromkeys(_names(statement), defined)

    def _try(self, statement: ast.Try | ast.TryStar, stars: Stars) -> None:
        tried = self.after(statement.body, self, stars)
        # An exception may come before or after any statement of the body.
        partly = _Names(self)
        partly._either([_Names(self), tried])
        ended = self.after(statement.orelse, tried, stars)
        ways = [([*statement.body, *statement.orelse], _joined(self, tried, ended))]
        for handler in statement.handlers:
            handled = self.after(handler.body, partly, stars)
            ways.append((handler.body, _joined(self, partly, handled)))
        self._either(_returning(ways))
        self.changed |= self.after(statement.finalbody, self, stars).changed

    def _either(self, ways: Sequence[_Names]) -> None:
        """Take up what blocks define of which one runs."""
        merged: dict[str, Live | None] = {}
        for name in dict.fromkeys(name for way in ways for name in way.changed):
            found = [known for way in ways if (known := way.get(name)) is not None]
            certain = len(found) == len(ways) and all(one.certain for one in found)
            merged[name] = Live(certain, ways=tuple(found)) if found else None
        self.changed |= merged


def _joined(before: _Names, *steps: _Names) -> _Names:
    """Return the changes of blocks that ran one after the other."""
    names = _Names(before)
    for step in steps:
        names.changed |= step.changed
    return names


def _names(statement: ast.stmt) -> Iterable[str]:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield statement.name
        case ast.Import():
            for alias in statement.names:
                yield alias.asname or alias.name.partition(".")[0]
        case ast.ImportFrom():
            for alias in statement.names:
                yield alias.asname or alias.name
        case ast.Assign():
            for target in statement.targets:
                yield from _targets(target)
        case ast.AnnAssign() if statement.value is not None:
            yield from _targets(statement.target)


def _targets(target: ast.expr) -> Iterable[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _targets(element)


def _returning(ways: Sequence[tuple[Sequence[ast.stmt], _Names]]) -> list[_Names]:
    """Leave out the blocks after which nothing runs, unless that is all of them."""
    going_on = [
        names
        for block, names in ways
        if not block or not isinstance(block[-1], ast.Raise | ast.Return)
    ]
    return going_on or [names for _, names in ways]


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"
