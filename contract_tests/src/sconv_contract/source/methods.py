"""What a method of a class is to the checks: its function, its marker, and what is around it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sconv.hookspecs import PROJECT_NAME

from .symbols import ClassRef, Place

__all__ = ["Function", "Method", "Wrapper", "is_setter", "own_nodes"]

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Wrapper(NamedTuple):
    """A decorator's function around another, and where it stands."""

    function: Function
    place: Place


@dataclass(frozen=True, slots=True)
class Method:
    """One thing that an attribute of a class may be.

    Attributes:
        name: The attribute.
        owner: The class that defines it.
        statement: Where, for line numbers.
        function: What runs in the end; None if it is no function that can be seen.
        place: Where that function stands.
        wrappers: Decorators' functions around it that used ``functools.wraps``, outermost first.
        kind: ``"method"``, or what it is instead.
        project: The pluggy project whose marker it has; None = unmarked.
        options: The marker's options.
        lost: A decorator without ``functools.wraps`` dropped the marker.
        hidden_by: The function that such a decorator put in its place, or "".
        unknown: Why it cannot be followed, or "".
    """

    name: str
    owner: ClassRef
    statement: ast.stmt
    function: Function | None = None
    place: Place | None = None
    wrappers: tuple[Wrapper, ...] = ()
    kind: str = "method"
    project: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    lost: bool = False
    hidden_by: str = ""
    unknown: str = ""

    @property
    def marked(self) -> bool:
        """Whether it carries this project's marker."""
        return self.project == PROJECT_NAME

    @property
    def hook(self) -> str:
        """The hook that it implements, if it is marked."""
        name = self.options.get("specname")
        return name if isinstance(name, str) and name else self.name


def is_setter(function: ast.expr) -> bool:
    """Whether what is called is setattr or delattr, in any of their spellings."""
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("__delattr__", "__setattr__", "delattr", "setattr")


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a body that run when it is called: not those of functions within."""
    if isinstance(function, ast.Lambda):
        pending: list[ast.AST] = [function.body]
    else:
        pending = list(reversed(getattr(function, "body", [])))
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        pending.extend(reversed(list(ast.iter_child_nodes(node))))
