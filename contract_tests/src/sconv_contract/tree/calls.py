"""Calls of a hook in an engine's source: what each passes, as far as the source shows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..source.files import Mentions
from ..source.methods import own_nodes
from .dictionary_keys import Keys, dictionaries, keys_of

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
    lines = Mentions(raw, [word])
    pending: list[tuple[ast.AST, ast.AST]] = [(tree, tree)]
    while pending:
        node, function = pending.pop()
        yield node, function
        scoped = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        inside = node if scoped else function
        pending += [(one, inside) for one in ast.iter_child_nodes(node) if lines.in_span(one)]


def calls_in(tree: ast.Module, raw: bytes, path: Path, hook: str) -> Iterator[Call]:
    """Yield the calls of a hook in a module, those on ``super()`` left out.

    A call on super passes on what its own caller passed, and is checked where that one is. A call
    through a local name for the method counts, and so does ``functools.partial``.
    """
    found = _Calls(tree, path, hook)
    names: dict[ast.AST, set[str]] = {}
    for node, function in mentions(tree, raw, hook):
        match node:
            case ast.Call(func=called) if _names(called, hook):
                yield found.call(node, function)
            case ast.Call(args=[target, *_]) if _is_partial(node.func) and _names(target, hook):
                yield found.partial(node, function)
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _names(value, hook):
                names.setdefault(function, set()).add(name)
    for function, known in names.items():
        for node in own_nodes(function):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) in known:
                yield found.call(node, function)


class _Calls:
    """Reads what the calls of one module pass."""

    def __init__(self, tree: ast.Module, path: Path, hook: str) -> None:
        self._path, self._hook = path, hook
        self._module = dictionaries(tree, {})
        self._known: dict[ast.AST, dict[str, Keys]] = {tree: self._module}

    def call(self, node: ast.Call, function: ast.AST) -> Call:
        given = node.args
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        # Base.hook(self, …) names the object that every other call has in front of the dot.
        if given and _is_self(given[0]) and owner is not None and not _is_self(owner):
            given = given[1:]
        return self._made(node, given, function, more=False)

    def partial(self, node: ast.Call, function: ast.AST) -> Call:
        return self._made(node, node.args[1:], function, more=True)

    def _made(self, node: ast.Call, given: list[ast.expr], function: ast.AST, more: bool) -> Call:
        if function not in self._known:
            self._known[function] = dictionaries(function, self._module)
        keys = Keys(is_open=more or any(isinstance(one, ast.Starred) for one in given))
        for keyword in node.keywords:
            if keyword.arg is not None:
                keys |= Keys(frozenset({keyword.arg}))
            else:
                keys |= keys_of(keyword.value, self._known[function])
        positional = sum(not isinstance(argument, ast.Starred) for argument in given)
        return Call(self._path, node.lineno, positional, keys.names, keys.is_open)


def _names(function: ast.expr, hook: str) -> bool:
    match function:
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
            return False
        case ast.Attribute(attr=name):
            return name == hook
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=name), *_]):
            return bool(name == hook)
        case _:
            return False


def _is_partial(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name == "partial"


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
