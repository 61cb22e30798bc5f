"""What decorators make of a method: its marker, wrappers around it, or nobody knows what."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any, Final

from sconv.hookspecs import PROJECT_NAME

from .methods import Function, Method, Wrapper, own_nodes
from .resolve import Place, Project

__all__ = ["apply", "decorated", "is_marker", "returned", "wrappers_of"]

_MARKERS: Final = {"sconv.hookimpl", "sconv.hookspecs.hookimpl"}

_KINDS: Final = {
    "builtins.staticmethod": "staticmethod",
    "builtins.classmethod": "classmethod",
    "builtins.property": "property",
    "functools.cached_property": "cached_property",
    "functools.cache": "cached function",
    "functools.lru_cache": "cached function",
    "functools.partialmethod": "partialmethod",
    "functools.partial": "partial",
    "functools.singledispatchmethod": "singledispatchmethod",
}

#: Decorators that leave the way a function is called as it was.
_TRANSPARENT: Final = {
    "abc.abstractmethod",
    "torch.no_grad",
    "torch.enable_grad",
    "torch.inference_mode",
    "torch.set_grad_enabled",
    "torch.compiler.disable",
    "torch.compiler.allow_in_graph",
    "torch._dynamo.disable",
    "torch._disable_dynamo",
    "torch.profiler.record_function",
    "torch.autograd.profiler.record_function",
    "typing.final",
    "typing.no_type_check",
    "typing.overload",
    "typing.override",
    "typing_extensions.deprecated",
    "typing_extensions.final",
    "typing_extensions.overload",
    "typing_extensions.override",
}


def decorated(project: Project, method: Method) -> Method:
    """Return a method as it is after the decorators of its function."""
    assert isinstance(method.function, ast.FunctionDef | ast.AsyncFunctionDef)
    assert method.place is not None
    place, decorators = method.place.at(method.function), method.function.decorator_list
    for decorator in reversed(decorators):
        method = apply(project, decorator, place, method, decorator)
    return method


def apply(
    project: Project, decorator: ast.expr, place: Place, method: Method, shown: ast.expr
) -> Method:
    """Return a method as it is after one decorator."""
    marker = _marker(project, decorator, place)
    if marker is not None:
        name, options = marker
        if isinstance(shown, ast.Call) and shown.func is decorator:
            options = options | _literals(project, shown.keywords, place)
        if "?" in options:
            return replace(method, unknown=f"the options of @{ast.unparse(decorator)} are computed")
        return replace(method, project=name, options=options)
    called = isinstance(decorator, ast.Call)
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    for found in project.evaluate(target, place):
        if found.path in _KINDS:
            return replace(method, kind=_KINDS[found.path])
        if found.path in _TRANSPARENT:
            return method
        if isinstance(target, ast.Attribute) and target.attr in ("setter", "getter", "deleter"):
            return replace(method, kind="property")
        if isinstance(found.node, ast.FunctionDef) and found.place is not None:
            return _through(project, found.node, found.place, method, factory=called)
    return replace(method, unknown=f"the decorator @{ast.unparse(target)} cannot be followed")


def _through(
    project: Project, decorator: ast.FunctionDef, place: Place, method: Method, *, factory: bool
) -> Method:
    """Apply a decorator that is a function whose source is here."""
    decorator, inside, result = _innermost(project, decorator, place, factory=factory)
    given = [*decorator.args.posonlyargs, *decorator.args.args]
    if result == "parameter" and given:
        return method
    if not isinstance(result, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return replace(method, unknown=f"the decorator {decorator.name} cannot be followed")
    if _uses_wraps(project, result, inside):
        return replace(method, wrappers=(Wrapper(result, inside), *method.wrappers))
    return replace(
        method,
        function=result,
        place=inside,
        wrappers=(),
        lost=method.lost or method.project is not None,
        hidden_by=getattr(result, "name", "<lambda>"),
        project=None,
        options={},
    )


def wrappers_of(project: Project, function: Function, place: Place) -> list[Wrapper]:
    """Return the functions that decorators put around one, outermost first, as far as they show."""
    around = []
    for decorator in getattr(function, "decorator_list", ()):
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        for found in project.evaluate(target, place):
            if isinstance(found.node, ast.FunctionDef) and found.place is not None:
                factory = isinstance(decorator, ast.Call)
                _, inside, result = _innermost(project, found.node, found.place, factory=factory)
                if isinstance(result, ast.FunctionDef | ast.Lambda):
                    around.append(Wrapper(result, inside))
    return around


def _innermost(
    project: Project, decorator: ast.FunctionDef, place: Place, *, factory: bool
) -> tuple[ast.FunctionDef, Place, Any]:
    """Return the function that decorates, the place of its body, and what it returns."""
    inside = place.inside(decorator)
    result = returned(project, decorator, inside)
    if factory and isinstance(result, ast.FunctionDef):
        decorator, inside = result, inside.inside(result)
        result = returned(project, decorator, inside)
    return decorator, inside, result


def returned(project: Project, function: ast.FunctionDef, inside: Place) -> Any:
    """Return what a decorator returns: a function's node, ``"parameter"`` for its own, or None."""
    results = [node.value for node in own_nodes(function) if isinstance(node, ast.Return)]
    if len(results) != 1 or results[0] is None:
        return None
    value = results[0]
    if isinstance(value, ast.Call) and project.paths(value.func, inside) & {"functools.wraps"}:
        return None
    if isinstance(value, ast.Lambda):
        return value
    if not isinstance(value, ast.Name):
        return None
    names = {one.arg for one in [*function.args.posonlyargs, *function.args.args]}
    if value.id in names:
        return "parameter"
    found = project.lookup(value.id, inside)
    return found[0].node if len(found) == 1 else None


def is_marker(project: Project, decorator: ast.expr, place: Place) -> bool:
    """Whether an expression is this project's hook marker, with options or without."""
    marker = _marker(project, decorator, place)
    return marker is not None and marker[0] == PROJECT_NAME


def _uses_wraps(project: Project, wrapper: Function, place: Place) -> bool:
    return any(
        isinstance(decorator, ast.Call)
        and project.paths(decorator.func, place) & {"functools.wraps"}
        for decorator in getattr(wrapper, "decorator_list", [])
    )


def _marker(
    project: Project, decorator: ast.expr, place: Place, depth: int = 0
) -> tuple[str, dict[str, Any]] | None:
    """Return the pluggy project and the options if an expression is a hook marker."""
    if depth > 4:
        return None
    for found in project.evaluate(decorator, place):
        if found.path in _MARKERS:
            return PROJECT_NAME, {}
        if not isinstance(found.node, ast.Call) or found.place is None:
            continue
        paths = project.paths(found.node.func, found.place)
        if "pluggy.HookimplMarker" in paths:
            try:
                return project.constant(found.node.args[0], found.place), {}
            except (ValueError, IndexError):
                return "?", {}
        inner = _marker(project, found.node.func, found.place, depth + 1)
        if inner is not None and not found.node.args:
            return inner[0], _literals(project, found.node.keywords, found.place)
    return None


def _literals(project: Project, keywords: list[ast.keyword], place: Place) -> dict[str, Any]:
    """Return literal keyword arguments; ``"?"`` is among the keys if one is computed."""
    values: dict[str, Any] = {}
    for keyword in keywords:
        try:
            values[keyword.arg or "?"] = project.constant(keyword.value, place)
        except ValueError:
            values["?"] = None
    return values
