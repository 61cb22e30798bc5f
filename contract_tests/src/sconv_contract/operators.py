"""What calls of torch, of tensors' methods and of built-ins do in recorded code."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

from .kinds import HOST, MASK, TENSOR, TENSORS
from .resolve import Found
from .rules import ingraph
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
    from .expressions import Expressions

__all__ = ["TENSOR_LIKE", "Operators"]

TENSOR_LIKE: Final = (TENSOR, MASK)

#: Built-ins that ask a tensor for its value.
_ASKING: Final = frozenset({"bool", "complex", "float", "int", "range", "round"})
#: The same, in the module operator.
_OPERATORS: Final = frozenset(
    f"operator.{name}" for name in ("contains", "countOf", "index", "indexOf", "not_", "truth")
)
_FORMATTING: Final = LOGGING | {"format"}
_MAPPING: Final = frozenset({"filter", "map"})
_COMPARING: Final = frozenset({"all", "any", "max", "min", "sorted"})
_SHOWING: Final = frozenset({"ascii", "format", "print", "repr", "str"})


class Operators:
    """Says what calls that lead into no source do, and what they return."""

    def __init__(self, expressions: Expressions) -> None:
        """Evaluate arguments with ``expressions``, and report where they do."""
        self.expressions = expressions
        self.recorded, self.frame = expressions.recorded, expressions.frame

    def output(self, shown: ast.expr, node: ast.AST) -> None:
        """Report an expression that is formatted, if it is a tensor."""
        if self.expressions.value(shown) in (*TENSOR_LIKE, TENSORS):
            message = f"{ast.unparse(shown)} is formatted, which copies the tensor to the host"
            self.recorded.tell(self.frame, ingraph.OUTPUT, node, message)

    def outside(self, node: ast.Call, paths: set[str], kinds: list[str]) -> bool:
        """Report a tensor that is handed to a library of host numbers."""
        tops = {path.partition(".")[0] for path in paths}
        if not any(kind in (*TENSOR_LIKE, TENSORS) for kind in kinds):
            return False
        if "numpy" in tops:
            self._sync(node, ast.unparse(node))
        elif "math" in tops or paths & _OPERATORS:
            message = f"{ast.unparse(node)} asks a tensor for its value"
            self.recorded.tell(self.frame, ingraph.BRANCH, node, message)
        return bool(tops & {"math", "numpy"} or paths & _OPERATORS)

    def _sync(self, node: ast.AST, what: str) -> None:
        message = f"{what} makes the host wait for a value of the device"
        self.recorded.tell(self.frame, ingraph.SYNC, node, message)

    def _upload(self, node: ast.AST, what: str) -> None:
        message = f"{what} copies values of the host to the device, and waits for that"
        self.recorded.tell(self.frame, ingraph.SYNC, node, message)

    def _is_literal(self, node: ast.Call) -> bool:
        """Whether a tensor is made of Python values that the source shows."""
        given = node.args[:1] or [one.value for one in node.keywords if one.arg == "data"]
        literal = ast.Constant | ast.List | ast.ListComp | ast.Tuple | ast.UnaryOp
        return any(
            isinstance(found.node, literal)
            for argument in given
            for found in self.recorded.project.evaluate(argument, self.frame.inside)
        ) and not any(self.expressions.value(one) in (*TENSOR_LIKE, TENSORS) for one in given)

    def _goes_to_a_device(self, node: ast.Call) -> bool:
        named = any(one.arg == "device" for one in node.keywords)
        return named and self._is_literal(node) and not self._names_cpu(node)

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

    def method(self, node: ast.Call, function: ast.Attribute, owner: str, kinds: list[str]) -> str:
        """Return the kind of what a method of a tensor, or of a sequence of some, returns."""
        name, shown = function.attr, ast.unparse(node)
        if owner == TENSORS:
            return HOST if name not in ("pop", "copy") else TENSOR
        if name in SYNCING_METHODS or name in SYNCING_FUNCTIONS:
            self._sync(node, shown)
            return TENSOR if name == "cpu" else HOST
        if name == "to" and self._names_cpu(node):
            self._sync(node, shown)
        elif name in DYNAMIC or (name == "repeat_interleave" and _counts_values(node, kinds)):
            return self._dynamic(node, shown)
        elif name in ALLOCATING:
            if name == "new_tensor" and self._is_literal(node):
                self._upload(node, shown)
                return TENSOR
            return self._allocation(node, shown)
        if name in HOST_METHODS:
            return HOST
        if name in SEQUENCES:
            return TENSORS
        return MASK if name in BOOLEAN or (name == "to" and _names_bool(node)) else TENSOR

    def _names_cpu(self, node: ast.Call) -> bool:
        given = [*node.args, *(one.value for one in node.keywords if one.arg == "device")]
        for argument in given:
            for found in self.recorded.project.evaluate(argument, self.frame.inside):
                device = found.node
                if isinstance(device, ast.Call) and device.args:
                    device = device.args[0]
                if isinstance(device, ast.Constant) and device.value == "cpu":
                    return True
        return False

    def torch(
        self, node: ast.Call, names: set[str], kinds: list[str], named: dict[str, str]
    ) -> str:
        """Return the kind of what a function of torch returns."""
        shown = ast.unparse(node.func)
        if names & SYNCING_FUNCTIONS:
            self._sync(node, f"{shown}()")
            return HOST
        if names & DYNAMIC or ("where" in names and len(node.args) + len(node.keywords) == 1):
            return self._dynamic(node, f"{shown}()")
        if "repeat_interleave" in names and _counts_values(node, kinds[1:]):
            return self._dynamic(node, f"{shown}()")
        if names & {"as_tensor", "tensor"} and self._goes_to_a_device(node):
            self._upload(node, f"{shown}()")
            return TENSOR
        if names & ALLOCATING:
            return self._allocation(node, f"{shown}()")
        if names & SEQUENCES:
            return TENSORS
        if names & HOST_FUNCTIONS:
            return HOST
        if names & BOOLEAN:
            return MASK
        touched = {*kinds, *named.values()} & {*TENSOR_LIKE, TENSORS}
        return TENSOR if touched else HOST

    def builtin(self, node: ast.Call, name: str, kinds: list[str]) -> str:
        """Return the kind of what a built-in returns."""
        tensors = [
            argument for argument, kind in zip(node.args, kinds, strict=True) if kind in TENSOR_LIKE
        ]
        if name in _ASKING and tensors:
            message = f"{ast.unparse(node)} asks a tensor for its value"
            self.recorded.tell(self.frame, ingraph.BRANCH, node, message)
        elif (name in _COMPARING and tensors) or (name in _MAPPING and _asks_each(node, kinds)):
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

    def unknown(
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
        elif name == "to" and self._names_cpu(node):
            self._sync(node, ast.unparse(node))
        elif name in (*LOGGING, "format") and any(
            kind in (*TENSOR_LIKE, TENSORS) for kind in kinds
        ):
            message = f"{ast.unparse(node)} formats a tensor, which copies it to the host"
            self.recorded.tell(self.frame, ingraph.OUTPUT, node, message)


def _names_bool(node: ast.Call) -> bool:
    given = [*node.args, *(one.value for one in node.keywords if one.arg == "dtype")]
    return any(isinstance(one, ast.Attribute) and one.attr == "bool" for one in given)


def _asks_each(node: ast.Call, kinds: list[str]) -> bool:
    """Whether ``map`` or ``filter`` asks each element of a tensor for its value."""
    function = node.args[0] if node.args else None
    name = getattr(function, "id", None if isinstance(function, ast.Constant) else "")
    asks = name is None or name in _ASKING
    return asks and any(kind in (*TENSOR_LIKE, TENSORS) for kind in kinds[1:])


def _counts_values(node: ast.Call, kinds: list[str]) -> bool:
    known = any(keyword.arg == "output_size" for keyword in node.keywords)
    return not known and any(kind in TENSOR_LIKE for kind in kinds)
