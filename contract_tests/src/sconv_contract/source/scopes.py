"""Which definitions a name can have when a block has run.

Both branches of an ``if`` or ``try`` count, and a definition that a later one certainly overwrites
does not. Definitions inside functions are no definitions of the block.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = [
    "Live",
    "Scope",
    "Stars",
    "blocks",
    "every_statement",
    "live",
    "statements",
    "type_checking_only",
]


@dataclass(frozen=True, slots=True)
class Live:
    """What a name may be.

    Attributes:
        definitions: Statements that may have defined it last, in source order.
        certain: It is defined whichever way the block ran.
    """

    definitions: tuple[ast.stmt, ...]
    certain: bool


Scope = dict[str, Live]


class Stars(list[ast.ImportFrom]):
    """The ``from … import *`` statements of a block."""


def live(body: Sequence[ast.stmt], stars: Stars | None = None) -> Scope:
    """Return the names that a block defines, each with what it may be afterwards.

    Args:
        body: The block.
        stars: Receives the star imports that it runs.
    """
    return _run(body, {}, stars if stars is not None else Stars())


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


def every_statement(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield all statements of a block, those of nested blocks, functions and classes included."""
    pending = list(reversed(body))
    while pending:
        statement = pending.pop()
        yield statement
        pending += [inner for block in blocks(statement) for inner in reversed(block)]


def blocks(statement: ast.stmt) -> Iterable[list[ast.stmt]]:
    """Return the blocks of statements that a statement holds."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if isinstance(block, list):
            yield block
    for handler in getattr(statement, "handlers", []):
        yield handler.body
    for case in getattr(statement, "cases", []):
        yield case.body


def _run(body: Sequence[ast.stmt], before: Scope, stars: Stars) -> Scope:
    now = dict(before)
    for statement in body:
        now = _step(statement, now, stars)
    return now


def _step(statement: ast.stmt, now: Scope, stars: Stars) -> Scope:
    match statement:
        case ast.If():
            if _is_type_checking(statement.test):
                return _run(statement.orelse, now, stars)
            return _either(
                _returning(
                    (block, _run(block, now, stars)) for block in (statement.body, statement.orelse)
                )
            )
        case ast.Try() | ast.TryStar():
            tried = _run(statement.body, now, stars)
            # An exception may come before or after any statement of the body.
            partly = _either([now, tried])
            ways = [([*statement.body, *statement.orelse], _run(statement.orelse, tried, stars))]
            ways += [
                (handler.body, _run(handler.body, partly, stars)) for handler in statement.handlers
            ]
            return _run(statement.finalbody, _either(_returning(ways)), stars)
        case ast.With() | ast.AsyncWith():
            return _run(statement.body, now, stars)
        case ast.For() | ast.AsyncFor() | ast.While():
            return _run(statement.orelse, _either([now, _run(statement.body, now, stars)]), stars)
        case ast.Match():
            return _either([now, *(_run(case.body, now, stars) for case in statement.cases)])
        case ast.Delete():
            gone = {target.id for target in statement.targets if isinstance(target, ast.Name)}
            return {name: found for name, found in now.items() if name not in gone}
        case ast.ImportFrom() if any(alias.name == "*" for alias in statement.names):
            stars.append(statement)
            return now
        case _:
            defined = Live((statement,), certain=True)
            return now | dict.fromkeys(_names(statement), defined)


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


def _returning(ways: Iterable[tuple[Sequence[ast.stmt], Scope]]) -> list[Scope]:
    """Leave out the blocks after which nothing runs, unless that is all of them."""
    known = list(ways)
    going_on = [
        scope
        for block, scope in known
        if not block or not isinstance(block[-1], ast.Raise | ast.Return)
    ]
    return going_on or [scope for _, scope in known]


def _either(ways: Sequence[Scope]) -> Scope:
    merged: Scope = {}
    for name in dict.fromkeys(name for way in ways for name in way):
        found = [way[name] for way in ways if name in way]
        definitions = dict.fromkeys(each for one in found for each in one.definitions)
        certain = len(found) == len(ways) and all(one.certain for one in found)
        merged[name] = Live(tuple(definitions), certain)
    return merged


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"
