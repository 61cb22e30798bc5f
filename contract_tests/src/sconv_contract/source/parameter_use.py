"""Whether a function reads a parameter, or only accepts it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Final

from .methods import Function

__all__ = ["is_read", "is_read_by_key", "is_stub", "parameters_of"]

#: What the host knows of a tensor without one of its values. A pointer is handed to a kernel, which
#: reads them.
_ABOUT: Final = frozenset(
    {
        "device", "dim", "dtype", "element_size", "get_device", "is_contiguous", "is_cuda",
        "itemsize", "layout", "nbytes", "ndim", "ndimension", "nelement", "numel", "shape", "size",
        "stride",
    }
)  # fmt: skip
_ASKING: Final = frozenset({"callable", "id", "isinstance", "len", "type"})


def parameters_of(arguments: ast.arguments) -> list[ast.arg]:
    """Return all parameters, ``*args`` and ``**kwargs`` included."""
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return every + [one for one in (arguments.vararg, arguments.kwarg) if one is not None]


def is_stub(function: Function) -> bool:
    """Whether a function only declares: it is abstract, or has a docstring or ``...`` alone."""
    for decorator in getattr(function, "decorator_list", ()):
        name = decorator.attr if isinstance(decorator, ast.Attribute) else ast.unparse(decorator)
        if name in ("abstractmethod", "overload"):
            return True
    return not isinstance(function, ast.Lambda) and not _body(function)


def is_read_by_key(function: Function, name: str) -> bool:
    """Return whether a function reads an argument that it takes in ``**kwargs``.

    Handing the whole dictionary on is reading.
    """
    variadic = function.args.kwarg
    if variadic is None:
        return False
    keys, uses = set(), 0
    for node in ast.walk(function):
        match node:
            case (
                ast.Subscript(value=ast.Name(id=owner), slice=ast.Constant(value=key))
                | ast.Call(
                    func=ast.Attribute(value=ast.Name(id=owner), attr="get" | "pop"),
                    args=[ast.Constant(value=key), *_],
                )
            ) if owner == variadic.arg:
                keys.add(key)
                uses -= 1
            case ast.Name(id=owner, ctx=ast.Load()) if owner == variadic.arg:
                uses += 1
    return uses > 0 or name in keys


def _only_raises(function: Function) -> bool:
    body = [] if isinstance(function, ast.Lambda) else _body(function)
    return len(body) == 1 and isinstance(body[0], ast.Raise)


def _body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    """Return what a function does, docstrings and ``...`` left out."""
    return [
        statement
        for statement in function.body
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
    ]


def is_read(function: Function, name: str) -> bool:
    """Return whether a body reads a parameter.

    ``del name``, a bare ``name`` and ``_ = name`` are not reads, nor is reading what was assigned
    to the name first, nor a question that no value answers: its shape, its length, if it is None.
    A body that does nothing but raise loses no argument without a word.
    """
    if _only_raises(function):
        return True
    return _reads(function, name, frozenset())


def _reads(function: Function, name: str, seen: frozenset[str]) -> bool:
    if not seen and _is_overwritten(function, name):
        return False
    body: Sequence[ast.AST] = [function.body] if isinstance(function, ast.Lambda) else function.body
    pending = list(body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Expr) and _is_name(node.value, name):
            continue
        if isinstance(node, ast.Assign) and _is_name(node.value, name):
            for target in node.targets:
                if not isinstance(target, ast.Name):
                    return True
                if target.id not in seen | {name} and _reads(function, target.id, seen | {name}):
                    return True
            continue
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            return True
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and any(
            argument.arg == name for argument in parameters_of(node.args)
        ):
            continue  # a parameter of its own
        if not _asks_about(node, name):
            pending.extend(ast.iter_child_nodes(node))
    return False


def _asks_about(node: ast.AST, name: str) -> bool:
    """Whether an expression asks about what a name holds, and for none of its values."""
    match node:
        case ast.Attribute(value=ast.Name(id=owner), attr=attribute):
            return owner == name and attribute in _ABOUT
        case ast.Call(func=ast.Name(id=asking), args=[ast.Name(id=asked), *_]):
            return asked == name and asking in _ASKING
        case ast.Compare(left=left, comparators=[right], ops=[ast.Is() | ast.IsNot()]):
            return (_is_name(left, name) and _is_none(right)) or (
                _is_name(right, name) and _is_none(left)
            )
        case _:
            return False


def _values_of(statement: ast.stmt, name: str) -> Iterator[ast.Name]:
    """Yield where a statement reads a name for more than to ask about it."""
    pending: list[ast.AST] = [statement]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            yield node
        if not _asks_about(node, name):
            pending.extend(ast.iter_child_nodes(node))


def _is_overwritten(function: Function, name: str) -> bool:
    """Whether a parameter certainly gets another value, or is deleted, before it is read."""
    if isinstance(function, ast.Lambda):
        return False
    for statement in function.body:
        if any(_values_of(statement, name)):
            return False
        match statement:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                if any(_is_name(target, name) for target in targets):
                    return True
            case ast.AnnAssign(target=target, value=ast.expr()):
                if _is_name(target, name):
                    return True
            case ast.Expr() | ast.Assert():
                continue
            case _:
                return False
    return False


def _is_name(node: ast.AST | None, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
