"""Whether a function reads a parameter, or only accepts it."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from .methods import Function

__all__ = ["is_read", "parameters_of"]


def parameters_of(arguments: ast.arguments) -> list[ast.arg]:
    """Return all parameters, ``*args`` and ``**kwargs`` included."""
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return every + [one for one in (arguments.vararg, arguments.kwarg) if one is not None]


def _only_raises(function: Function) -> bool:
    if isinstance(function, ast.Lambda):
        return False
    body = [statement for statement in function.body if not _is_docstring(statement)]
    return len(body) == 1 and isinstance(body[0], ast.Raise)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def is_read(function: Function, name: str) -> bool:
    """Return whether a body reads a parameter.

    ``del name``, a bare ``name`` and ``_ = name`` are not reads, nor is reading what was assigned
    to the name first. A body that does nothing but raise loses no argument without a word.
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
        pending.extend(ast.iter_child_nodes(node))
    return False


def _is_overwritten(function: Function, name: str) -> bool:
    """Whether a parameter certainly gets another value, or is deleted, before it is read."""
    if isinstance(function, ast.Lambda):
        return False
    for statement in function.body:
        loads = any(
            isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
            for node in ast.walk(statement)
        )
        if loads:
            return False
        match statement:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                if any(_is_name(target, name) for target in targets):
                    return True
            case ast.AnnAssign(target=target, value=ast.expr()):
                if _is_name(target, name):
                    return True
            case ast.Expr():
                continue
            case _:
                return False
    return False


def _is_name(node: ast.AST | None, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
