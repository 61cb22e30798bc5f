"""From a class to its methods: markers, decorators, aliases, and what a caller really calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sconv.hookspecs import PROJECT_NAME

from .resolve import ClassRef, Found, Place, Project

__all__ = ["Function", "Method", "is_marker", "members", "own_nodes"]

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

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
    wrappers: tuple[Function, ...] = ()
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


def members(project: Project, mro: Sequence[ClassRef]) -> dict[str, list[Method]]:
    """Return everything that each attribute of a class may be, inherited ones included.

    An attribute that is defined in one branch alone may also be the inherited one.
    """
    scopes = [(ref, project.scope(ref.node)) for ref in mro]
    found: dict[str, list[Method]] = {}
    for name in dict.fromkeys(name for _, scope in scopes for name in scope):
        every: list[Method] = []
        for ref, scope in scopes:
            if name not in scope:
                continue
            for statement in scope[name].definitions:
                every += _of_statement(project, name, ref, statement)
            if scope[name].certain:
                break
        found[name] = every
    return found


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


def _of_statement(project: Project, name: str, ref: ClassRef, statement: ast.stmt) -> list[Method]:
    start = Method(name, ref, statement)
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return [_decorated(project, replace(start, function=statement, place=ref.inside))]
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
            return _of_value(project, start, value, 0)
        case ast.ClassDef():
            return [replace(start, kind="class")]
        case _:
            found = project.lookup(name, ref.inside)
            return [_of_found(project, start, one, 0) for one in found]


def _of_value(project: Project, start: Method, value: ast.expr, depth: int) -> list[Method]:
    """Follow ``name = value`` in a class body."""
    if depth > 8:
        return [replace(start, kind="value", unknown=f"{ast.unparse(value)} leads nowhere")]
    inside = start.owner.inside.at(start.statement)
    match value:
        case ast.Lambda():
            return [replace(start, function=value, place=inside)]
        case ast.Name() | ast.Attribute() | ast.IfExp():
            return [
                _of_found(project, start, found, depth) for found in project.evaluate(value, inside)
            ]
        case ast.Call(func=func, args=[inner, *_]):
            return [
                _apply(project, func, inside, one, value)
                for one in _of_value(project, start, inner, depth + 1)
            ]
        case ast.Constant() | ast.Tuple() | ast.List() | ast.Dict() | ast.Set():
            return [replace(start, kind="value")]
        case _:
            return [replace(start, kind="value", unknown=f"{ast.unparse(value)} is not followed")]


def _of_found(project: Project, start: Method, found: Found, depth: int) -> Method:
    match found.node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            assert found.place is not None
            return _decorated(project, replace(start, function=found.node, place=found.place))
        case ast.Lambda():
            return replace(start, function=found.node, place=found.place)
        case ast.ClassDef():
            return replace(start, kind="class")
        case ast.Call() as call if found.place is not None:
            return _of_value(project, start, call, depth + 1)[0]
        case ast.Constant():
            return replace(start, kind="value")
        case None:
            return replace(start, kind="value", unknown=f"{found.path} cannot be seen")
        case _:
            return replace(start, kind="value", unknown=f"{found.path} is not followed")


def _decorated(project: Project, method: Method) -> Method:
    assert isinstance(method.function, ast.FunctionDef | ast.AsyncFunctionDef)
    assert method.place is not None
    place, decorators = method.place.at(method.function), method.function.decorator_list
    for decorator in reversed(decorators):
        method = _apply(project, decorator, place, method, decorator)
    return method


def _apply(
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
    inside = place.inside(decorator)
    result = _returned(project, decorator, inside)
    if factory and isinstance(result, ast.FunctionDef):
        decorator, inside = result, inside.inside(result)
        result = _returned(project, decorator, inside)
    given = [*decorator.args.posonlyargs, *decorator.args.args]
    if result == "parameter" and given:
        return method
    if not isinstance(result, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return replace(method, unknown=f"the decorator {decorator.name} cannot be followed")
    if _uses_wraps(project, result, inside):
        return replace(method, wrappers=(result, *method.wrappers))
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


def _returned(project: Project, function: ast.FunctionDef, inside: Place) -> Any:
    """What a decorator returns: the function node, ``"parameter"`` for its own, else None."""
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
