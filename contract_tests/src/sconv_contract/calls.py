"""What a call does in recorded code, and where it leads."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

from .kinds import HOST, MASK, SELF, TENSOR, TENSORS, object_kind
from .members import members
from .methods import Function, Method
from .resolve import ClassRef, Found, Place
from .rules import ingraph
from .shapes import annotated
from .tensor_calls import (
    ALLOCATING,
    BOOLEAN,
    DYNAMIC,
    HOST_FUNCTIONS,
    HOST_METHODS,
    LOGGING,
    SEQUENCES,
    SYNCING_FUNCTIONS,
    SYNCING_METHODS,
)

if TYPE_CHECKING:
    from .bodies import Frame, Recorded

__all__ = ["Calls"]

_TENSOR_LIKE: Final = (TENSOR, MASK)

#: Built-ins that ask a tensor for its value.
_ASKING: Final = frozenset({"bool", "complex", "float", "int", "range", "round"})
_COMPARING: Final = frozenset({"all", "any", "max", "min", "sorted"})
_SHOWING: Final = frozenset({"ascii", "format", "print", "repr", "str"})


class Calls:
    """Evaluates the calls of one function."""

    def __init__(self, recorded: Recorded, frame: Frame) -> None:
        """Report through ``recorded`` what the calls of ``frame`` do."""
        self.recorded = recorded
        self.frame = frame

    def call(self, node: ast.Call) -> str:
        """Return the kind of a call's result, reporting what it does."""
        kinds = [self._value(argument) for argument in node.args]
        named = {keyword.arg or "**": self._value(keyword.value) for keyword in node.keywords}
        function = node.func
        if isinstance(function, ast.Attribute):
            if _is_super(function.value):
                return self._methods(self._inherited(function.attr), node, kinds, named, SELF)
            owner = self._value(function.value)
            shape = self.recorded.shape(owner)
            if shape is not None:
                variants = shape.methods.get(function.attr, [])
                return self._methods(variants, node, kinds, named, owner)
            if owner in (*_TENSOR_LIKE, TENSORS):
                return self._method(node, function, owner, kinds)
        found = self.recorded.project.evaluate(function, self.frame.inside)
        paths = {one.path for one in found}
        torch_names = {path.rpartition(".")[2] for path in paths if path.startswith("torch.")}
        if torch_names:
            return self._torch(node, torch_names, kinds, named)
        if isinstance(function, ast.Name) and f"builtins.{function.id}" in paths:
            return self._builtin(node, function.id, kinds)
        if isinstance(function, ast.Attribute):
            self._unknown_method(node, function, found, [*kinds, *named.values()])
        result = HOST
        for one in found:
            if one.place is None or isinstance(function, ast.Subscript):
                continue  # kernel[grid](...) is no Python
            if isinstance(one.node, ast.FunctionDef | ast.Lambda):
                result = self._function(one.node, one.place, node, kinds, named, result)
            elif isinstance(one.node, ast.ClassDef):
                result = self._constructor(one, node, kinds, named)
        return result

    def output(self, shown: ast.expr, node: ast.AST) -> None:
        """Report an expression that is formatted, if it is a tensor."""
        if self._value(shown) in (*_TENSOR_LIKE, TENSORS):
            message = f"{ast.unparse(shown)} is formatted, which copies the tensor to the host"
            self.recorded.tell(self.frame, ingraph.OUTPUT, node, message)

    def _value(self, node: ast.expr | None) -> str:
        return self.recorded.value(self.frame, node, self)

    def _sync(self, node: ast.AST, what: str) -> None:
        message = f"{what} makes the host wait for a value of the device"
        self.recorded.tell(self.frame, ingraph.SYNC, node, message)

    def _dynamic(self, node: ast.AST, what: str) -> str:
        message = f"{what} has a shape that depends on values"
        self.recorded.tell(self.frame, ingraph.DYNAMIC_SHAPE, node, message)
        return TENSOR

    def _allocation(self, node: ast.AST, what: str) -> str:
        # Elsewhere a result is new memory by nature, and lives in the graph's own pool.
        if self.recorded.hook.name == "init_forward_metadata_in_graph":
            message = f"{what} allocates"
            self.recorded.tell(self.frame, ingraph.ALLOCATION, node, message)
        return TENSOR

    def _method(self, node: ast.Call, function: ast.Attribute, owner: str, kinds: list[str]) -> str:
        name, shown = function.attr, ast.unparse(node)
        if owner == TENSORS:
            return HOST if name not in ("pop", "copy") else TENSOR
        if name in SYNCING_METHODS or name in SYNCING_FUNCTIONS:
            self._sync(node, shown)
            return TENSOR if name == "cpu" else HOST
        if name == "to" and _names_cpu(node):
            self._sync(node, shown)
        elif name in DYNAMIC or (name == "repeat_interleave" and _counts_values(node, kinds)):
            return self._dynamic(node, shown)
        elif name in ALLOCATING:
            return self._allocation(node, shown)
        if name in HOST_METHODS:
            return HOST
        if name in SEQUENCES:
            return TENSORS
        return MASK if name in BOOLEAN or (name == "to" and _names_bool(node)) else TENSOR

    def _torch(
        self, node: ast.Call, names: set[str], kinds: list[str], named: dict[str, str]
    ) -> str:
        shown = ast.unparse(node.func)
        if names & SYNCING_FUNCTIONS:
            self._sync(node, f"{shown}()")
            return HOST
        if names & DYNAMIC or ("where" in names and len(node.args) + len(node.keywords) == 1):
            return self._dynamic(node, f"{shown}()")
        if "repeat_interleave" in names and _counts_values(node, kinds[1:]):
            return self._dynamic(node, f"{shown}()")
        if names & ALLOCATING:
            return self._allocation(node, f"{shown}()")
        if names & SEQUENCES:
            return TENSORS
        if names & HOST_FUNCTIONS:
            return HOST
        if names & BOOLEAN:
            return MASK
        touched = {*kinds, *named.values()} & {*_TENSOR_LIKE, TENSORS}
        return TENSOR if touched else HOST

    def _builtin(self, node: ast.Call, name: str, kinds: list[str]) -> str:
        tensors = [
            argument
            for argument, kind in zip(node.args, kinds, strict=True)
            if kind in _TENSOR_LIKE
        ]
        if name in _ASKING and tensors:
            message = f"{ast.unparse(node)} asks a tensor for its value"
            self.recorded.tell(self.frame, ingraph.BRANCH, node, message)
        elif name in _COMPARING and tensors:
            message = f"{ast.unparse(node)} compares the values of a tensor in Python"
            self.recorded.tell(self.frame, ingraph.BRANCH, node, message)
        elif name in _SHOWING:
            for argument in node.args:
                self.output(argument, node)
        elif name in ("list", "tuple", "reversed", "enumerate", "zip") and (
            tensors or TENSORS in kinds
        ):
            return TENSORS
        elif (name == "sum" and TENSORS in kinds) or (name == "abs" and tensors):
            return TENSOR
        return HOST

    def _unknown_method(
        self, node: ast.Call, function: ast.Attribute, found: list[Found], kinds: list[str]
    ) -> None:
        """A call on something that is not known: some are wrong on anything."""
        name = function.attr
        if any(one.node is not None for one in found):
            return
        if name in SYNCING_METHODS and not node.args:
            self._sync(node, ast.unparse(node))
        elif name == "nonzero" and not node.args:
            self._dynamic(node, ast.unparse(node))
        elif name == "to" and _names_cpu(node):
            self._sync(node, ast.unparse(node))
        elif name in LOGGING and any(kind in (*_TENSOR_LIKE, TENSORS) for kind in kinds):
            message = f"{ast.unparse(node)} formats a tensor, which copies it to the host"
            self.recorded.tell(self.frame, ingraph.OUTPUT, node, message)

    def _methods(
        self,
        variants: list[Method],
        node: ast.Call,
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
            passed = _arguments(method.function, kinds, named, bound=bound is not None)
            kind = self.recorded.run(
                method.function,
                method.place,
                passed,
                method.owner,
                self.frame.depth + 1,
                bound=bound,
            )
            result = kind if kind != HOST else result
        return result

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
        node: ast.Call,
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
        passed = _arguments(function, kinds, named, bound=False)
        depth = self.frame.depth + 1
        kind = self.recorded.run(function, place, passed, None, depth, bound=None)
        return kind if kind != HOST else result

    def _compiles(self, decorator: ast.expr, place: Place) -> bool:
        """Whether a decorator makes a device kernel of a function, so that it is no Python."""
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        paths = self.recorded.project.paths(target, place)
        return any(path.rpartition(".")[2] in ("jit", "kernel", "prim_func") for path in paths)

    def _constructor(
        self, found: Found, node: ast.Call, kinds: list[str], named: dict[str, str]
    ) -> str:
        kind = object_kind(found.path)
        shape = self.recorded.shape(kind)
        own = found.place is not None and self.recorded.reported(found.place.source.path)
        if shape is not None and own:
            self._methods(shape.methods.get("__init__", []), node, kinds, named, kind)
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


def _names_cpu(node: ast.Call) -> bool:
    given = [*node.args, *(one.value for one in node.keywords if one.arg == "device")]
    for argument in given:
        if isinstance(argument, ast.Call) and argument.args:
            argument = argument.args[0]
        if isinstance(argument, ast.Constant) and argument.value == "cpu":
            return True
    return False


def _names_bool(node: ast.Call) -> bool:
    given = [*node.args, *(one.value for one in node.keywords if one.arg == "dtype")]
    return any(isinstance(one, ast.Attribute) and one.attr == "bool" for one in given)


def _counts_values(node: ast.Call, kinds: list[str]) -> bool:
    known = any(keyword.arg == "output_size" for keyword in node.keywords)
    return not known and any(kind in _TENSOR_LIKE for kind in kinds)
