"""Calls of a hook in an engine's source: what each passes, as far as the source shows."""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .methods import own_nodes

__all__ = ["Call", "calls_in", "mentions"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call.

    Attributes:
        path: The file.
        line: Where.
        positional: How many arguments it passes by position.
        keywords: The names that it passes.
        open: It passes more, through ``*`` or ``**``, that the source does not show.
    """

    path: Path
    line: int
    positional: int
    keywords: frozenset[str]
    open: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def mentions(tree: ast.Module, raw: bytes, word: str) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield the nodes that span a line with a word on it, each with the function that it is in."""
    wanted = word.encode()
    lines = [number for number, line in enumerate(raw.splitlines(), 1) if wanted in line]
    pending: list[tuple[ast.AST, ast.AST]] = [(tree, tree)]
    while pending:
        node, function = pending.pop()
        yield node, function
        scoped = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        inside = node if scoped else function
        pending += [(one, inside) for one in ast.iter_child_nodes(node) if _spans(one, lines)]


def _spans(node: ast.AST, lines: list[int]) -> bool:
    first = getattr(node, "lineno", None)
    if first is None:
        return True
    decorators = getattr(node, "decorator_list", None)
    first = min([first, *(one.lineno for one in decorators)]) if decorators else first
    place = bisect_left(lines, first)
    return place < len(lines) and lines[place] <= (getattr(node, "end_lineno", None) or first)


def calls_in(tree: ast.Module, raw: bytes, path: Path, hook: str) -> Iterator[Call]:
    """Yield the calls of a hook in a module, those on ``super()`` left out.

    A call on super passes on what its own caller passed, and is checked where that one is.
    """
    known: dict[ast.AST, dict[str, set[str] | None]] = {}
    for node, function in mentions(tree, raw, hook):
        if isinstance(node, ast.Call) and _calls(node.func, hook):
            if function not in known:
                known[function] = _dictionaries(function)
            yield _call(node, path, known[function])


def _calls(function: ast.expr, hook: str) -> bool:
    match function:
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
            return False
        case ast.Attribute(attr=name):
            return name == hook
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=name), *_]):
            return bool(name == hook)
        case _:
            return False


def _call(node: ast.Call, path: Path, dictionaries: dict[str, set[str] | None]) -> Call:
    keywords: set[str] = set()
    is_open = any(isinstance(argument, ast.Starred) for argument in node.args)
    for keyword in node.keywords:
        if keyword.arg is not None:
            keywords.add(keyword.arg)
            continue
        known = _keys(keyword.value)
        if known is None and isinstance(keyword.value, ast.Name):
            known = dictionaries.get(keyword.value.id)
        if known is None:
            is_open = True
        else:
            keywords |= known
    positional = sum(not isinstance(argument, ast.Starred) for argument in node.args)
    return Call(path, node.lineno, positional, frozenset(keywords), is_open)


def _keys(value: ast.expr) -> set[str] | None:
    """Return the keys of a dict literal or of ``dict(a=…)``; None if they do not show."""
    if isinstance(value, ast.Dict):
        found: set[str] = set()
        for key, inner in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                found.add(key.value)
                continue
            below = _keys(inner) if key is None else None
            if below is None:
                return None
            found |= below
        return found
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dict":
        names = [keyword.arg for keyword in value.keywords]
        if not value.args and all(names):
            return {str(name) for name in names}
    return None


def _dictionaries(function: ast.AST) -> dict[str, set[str] | None]:
    """Return the keys of the local dictionaries of a function, later stores included."""
    found: dict[str, set[str] | None] = {}
    for node in own_nodes(function):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                keys, known = _keys(value), found.get(name, set())
                found[name] = None if keys is None or known is None else known | keys
            case ast.Assign(
                targets=[ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key)))]
            ):
                known = found.get(name)
                if known is not None:
                    known.add(key)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="update")):
                added = [keyword.arg for keyword in node.keywords]
                known = found.get(name)
                if known is not None and not node.args and all(added):
                    known |= {str(one) for one in added}
                else:
                    found[name] = None
    return found
