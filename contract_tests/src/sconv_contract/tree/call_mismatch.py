"""Why a definition of a hook would not accept a call of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..source.methods import Function, own_nodes
from .calls import Call

__all__ = ["forwarded_to", "kind_problem", "reasons"]


def kind_problem(function: Function) -> tuple[str, str] | None:
    """Return the rule and the text for what is no plain method, or None."""
    if isinstance(function, ast.AsyncFunctionDef):
        return "SCV107", "is async, and a plain call runs none of it"
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in own_nodes(function)):
        return "SCV107", "has a yield, so that a call runs none of it"
    names = _decorators(function)
    if names & {"property", "cached_property"}:
        return "SCV108", "is a property, so that the call calls what it returns"
    arguments = function.args
    takes_one = arguments.args or arguments.posonlyargs or arguments.vararg
    if not takes_one and "staticmethod" not in names:
        return "SCV108", "has no self"
    return None


def _decorators(function: Function) -> set[str]:
    every = getattr(function, "decorator_list", [])
    return {decorator.id for decorator in every if isinstance(decorator, ast.Name)}


def reasons(function: Function, call: Call) -> Iterator[tuple[str, str, str]]:
    """Say why a definition would not accept a call: rule, text, fix."""
    arguments = function.args
    static = "staticmethod" in _decorators(function)
    names = [one.arg for one in [*arguments.posonlyargs, *arguments.args]]
    positional = names if static else names[1:]
    by_position = positional[: call.positional]
    if not static and names and names[0] in call.keywords:
        yield "SCV108", f"has no self: {names[0]!r} receives the object", "Add self."
        return
    only_position = {one.arg for one in arguments.posonlyargs}
    keyword_only = [one.arg for one in arguments.kwonlyargs]
    accepted = {*positional, *keyword_only} - only_position
    if call.positional > len(positional) and arguments.vararg is None:
        yield (
            "SCV101",
            f"takes {len(positional)} arguments by position, not {call.positional}",
            "Add the parameters that it lacks.",
        )
    for name in sorted(call.keywords):
        if name in only_position:
            yield "SCV104", f"has {name!r} positional-only", "Remove the /."
        elif name not in accepted and arguments.kwarg is None:
            yield "SCV101", f"lacks the parameter {name!r}", "Add the parameter."
        elif name in by_position:
            yield "SCV101", f"gets {name!r} by position and by name", "Order the parameters alike."
    count = len(arguments.defaults)
    required = positional[: len(positional) - count] if count else positional
    required = [name for name in required if name not in by_position]
    required += [
        one.arg
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    for name in required:
        if name not in call.keywords and not call.open:
            yield (
                "SCV102",
                f"needs {name!r}, which is not passed",
                "Remove the parameter, or let every call pass it.",
            )


def forwarded_to(function: Function, hook: str) -> str | None:
    """Return the function that gets this one's ``**kwargs``; None if it is the hook elsewhere."""
    if function.args.kwarg is None:
        return None
    name = function.args.kwarg.arg
    for node in own_nodes(function):
        if not isinstance(node, ast.Call):
            continue
        for keyword in node.keywords:
            if keyword.arg is None and isinstance(keyword.value, ast.Name):
                if keyword.value.id != name:
                    continue
                target = node.func
                inner = target.attr if isinstance(target, ast.Attribute) else None
                inner = target.id if isinstance(target, ast.Name) else inner
                # Another object's hook is among the definitions that are checked.
                return None if inner == hook else inner or ast.unparse(target)
    return None
