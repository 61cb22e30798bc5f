"""What a call does in recorded code, and where it leads."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from .decorators import wrappers_of
from .kinds import HOST, SELF, TENSORS, object_kind
from .members import members
from .methods import Function, Method, Wrapper
from .operators import TENSOR_LIKE, Operators
from .resolve import ClassRef, Found, Place
from .shapes import annotated

if TYPE_CHECKING:
    from .expressions import Expressions

__all__ = ["Calls"]


class Calls:
    """Evaluates the calls of one function."""

    def __init__(self, expressions: Expressions) -> None:
        """Evaluate arguments with ``expressions``, and report where they do."""
        self.expressions = expressions
        self.recorded, self.frame = expressions.recorded, expressions.frame
        self.operators = Operators(expressions)

    def call(self, node: ast.Call) -> str:
        """Return the kind of a call's result, reporting what it does."""
        kinds = [self._value(argument) for argument in node.args]
        named = {keyword.arg or "**": self._value(keyword.value) for keyword in node.keywords}
        function = self._called(node.func)
        if isinstance(function, ast.Attribute):
            if _is_super(function.value):
                return self._methods(self._inherited(function.attr), kinds, named, SELF)
            owner = self._value(function.value)
            shape = self.recorded.shape(owner)
            if shape is not None:
                variants = shape.methods.get(function.attr, [])
                if function.attr in shape.attributes:
                    return self._object(shape.attributes[function.attr], kinds, named)
                return self._methods(variants, kinds, named, owner)
            if owner in (*TENSOR_LIKE, TENSORS):
                return self.operators.method(node, function, owner, kinds)
        if isinstance(function, ast.Name | ast.Call):
            kind = self._value(function)
            if self.recorded.shape(kind) is not None:
                return self._object(kind, kinds, named)
        found = self.recorded.project.evaluate(function, self.frame.inside)
        paths = {one.path for one in found}
        if "functools.partial" in paths and node.args:
            # It will be called with these arguments, and perhaps with more.
            made = ast.Call(func=node.args[0], args=node.args[1:], keywords=node.keywords)
            return self.call(ast.copy_location(made, node))
        if self.operators.outside(node, paths, [*kinds, *named.values()]):
            return HOST
        torch_names = {path.rpartition(".")[2] for path in paths if path.startswith("torch.")}
        if torch_names:
            return self.operators.torch(node, torch_names, kinds, named)
        if isinstance(function, ast.Name) and f"builtins.{function.id}" in paths:
            return self.operators.builtin(node, function.id, kinds)
        if isinstance(function, ast.Attribute):
            self.operators.unknown(node, function, found, [*kinds, *named.values()])
        result = HOST
        for one in found:
            if one.place is None or isinstance(function, ast.Subscript):
                continue  # kernel[grid](...) is no Python
            if isinstance(one.node, ast.FunctionDef | ast.Lambda):
                result = self._function(one.node, one.place, kinds, named, result)
            elif isinstance(one.node, ast.ClassDef):
                result = self._constructor(one, kinds, named)
        return result

    def methods(self, variants: list[Method], owner: str) -> str:
        """Follow functions that reading an attribute runs; return the kind of their result."""
        return self._methods(variants, [], {}, owner)

    def context(self, kind: str) -> str:
        """Follow what a ``with`` on an object of this kind runs; return what it enters with."""
        shape = self.recorded.shape(kind)
        if shape is None:
            return kind
        self._methods(shape.methods.get("__exit__", []), [], {}, kind)
        return self._methods(shape.methods.get("__enter__", []), [], {}, kind)

    def _called(self, function: ast.expr) -> ast.expr:
        """Return the attribute behind a local name for a method, or behind getattr."""
        match function:
            case ast.Name(id=name) if name in self.frame.methods:
                return self.frame.methods[name]
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name))]):
                attribute = ast.Attribute(value=owner, attr=name, ctx=ast.Load())
                return ast.copy_location(attribute, function)
            case _:
                return function

    def _value(self, node: ast.expr | None) -> str:
        return self.expressions.value(node)

    def _methods(
        self,
        variants: list[Method],
        kinds: list[str],
        named: dict[str, str],
        owner: str,
    ) -> str:
        """Follow a call of a method, whichever of its variants it is."""
        result = HOST
        for method in variants:
            if method.function is None or method.place is None or method.kind == "class":
                continue
            bound = None if method.kind == "staticmethod" else owner
            around = [*method.wrappers, Wrapper(method.function, method.place)]
            result = self._run(around, kinds, named, method.owner, bound, result)
        return result

    def _run(
        self,
        functions: list[Wrapper],
        kinds: list[str],
        named: dict[str, str],
        owner: ClassRef | None,
        bound: str | None,
        result: str,
    ) -> str:
        """Follow a function and what is wrapped around it; return the kind of the result."""
        for function, place in functions:
            passed = _arguments(function, kinds, named, bound=bound is not None)
            depth = self.frame.depth + 1
            kind = self.recorded.run(function, place, passed, owner, depth, bound=bound)
            result = kind if kind != HOST else result
        return result

    def _object(self, kind: str, kinds: list[str], named: dict[str, str]) -> str:
        """Follow the call of an object."""
        shape = self.recorded.shape(kind)
        variants = [] if shape is None else shape.methods.get("__call__", [])
        return self._methods(variants, kinds, named, kind)

    def _inherited(self, name: str) -> list[Method]:
        owner = self.frame.owner
        order = self.recorded.backend.order
        nodes = [ref.node for ref in order]
        if owner is None or owner.node not in nodes:
            return []
        below: list[ClassRef] = list(order[nodes.index(owner.node) + 1 :])
        return members(self.recorded.project, below).get(name, [])

    def _function(
        self,
        function: Function,
        place: Place,
        kinds: list[str],
        named: dict[str, str],
        result: str,
    ) -> str:
        if not self.recorded.reported(place.source.path):
            # Other packages' functions are theirs to check; only the result matters here.
            promised = annotated(self.recorded.project, getattr(function, "returns", None), place)
            return promised if promised != HOST else result
        if any(self._compiles(one, place) for one in getattr(function, "decorator_list", [])):
            return result
        around = wrappers_of(self.recorded.project, function, place)
        functions = [*around, Wrapper(function, place)]
        return self._run(functions, kinds, named, None, None, result)

    def _compiles(self, decorator: ast.expr, place: Place) -> bool:
        """Whether a decorator makes a device kernel of a function, so that it is no Python."""
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        paths = self.recorded.project.paths(target, place)
        return any(path.rpartition(".")[2] in ("jit", "kernel", "prim_func") for path in paths)

    def _constructor(self, found: Found, kinds: list[str], named: dict[str, str]) -> str:
        kind = object_kind(found.path)
        shape = self.recorded.shape(kind)
        own = found.place is not None and self.recorded.reported(found.place.source.path)
        if shape is not None and own:
            self._methods(shape.methods.get("__init__", []), kinds, named, kind)
        return kind


def _arguments(
    function: Function, kinds: list[str], named: dict[str, str], *, bound: bool
) -> dict[str, str]:
    names = [one.arg for one in [*function.args.posonlyargs, *function.args.args]][int(bound) :]
    passed = dict(zip(names, kinds, strict=False))
    known = {*names, *(one.arg for one in function.args.kwonlyargs)}
    return passed | {name: kind for name, kind in named.items() if name in known}


def _is_super(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    )
