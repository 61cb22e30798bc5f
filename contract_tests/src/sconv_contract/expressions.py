"""What the expressions of recorded code are, and which of them no graph records."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from .calls import Calls
from .contract import tensor_fields
from .frames import Frame
from .kinds import BATCH, HOST, MASK, META, SELF, TENSOR, TENSORS, element, join
from .rules import ingraph
from .tensor_calls import VIEWS

if TYPE_CHECKING:
    from .bodies import Recorded

__all__ = ["Expressions"]

_MASK_FIELDS: Final = frozenset({"cache_mask", "has_initial_state", "mamba_track_mask", "writes"})

#: Attributes whose reading runs a function.
_COMPUTED: Final = frozenset({"cached_property", "property"})


class Expressions:
    """Evaluates the expressions of one function."""

    def __init__(self, recorded: Recorded, frame: Frame) -> None:
        """Report through ``recorded`` what the expressions of ``frame`` do."""
        self.recorded, self.frame = recorded, frame
        self.calls = Calls(self)

    def value(self, node: ast.expr | None) -> str:
        """Return the kind of an expression, reporting what it does on the way."""
        match node:
            case None:
                return HOST
            case ast.Name(id=name):
                return self.frame.kinds.get(name, HOST)
            case ast.Attribute(value=owner, attr=name):
                return self._attribute(self.value(owner), name)
            case ast.Subscript():
                return self.subscript(node)
            case ast.Call():
                return self.calls.call(node)
            case ast.BinOp(left=left, right=right):
                kinds = {self.value(left), self.value(right)}
                if isinstance(node.op, ast.Mod) and isinstance(left, ast.Constant | ast.JoinedStr):
                    self.calls.operators.output(right, node)
                    return HOST
                bitwise = isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor)
                if MASK in kinds and bitwise:
                    return MASK
                if kinds == {TENSORS}:
                    return TENSORS
                return TENSOR if kinds & {TENSOR, MASK} else HOST
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self.decide(operand, "not")
                return HOST
            case ast.UnaryOp(operand=operand):
                return self.value(operand)
            case ast.Compare():
                return self._compare(node)
            case ast.BoolOp(values=values):
                for operand in values[:-1]:
                    word = "and" if isinstance(node.op, ast.And) else "or"
                    self.decide(operand, word)
                return self.value(values[-1])
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self.decide(test, "if")
                return join(self.value(body), self.value(orelse))
            case ast.NamedExpr(target=target, value=inner):
                kind = self.value(inner)
                self.bind(target, kind)
                return kind
            case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
                kinds = {self.value(one) for one in elements}
                return TENSORS if kinds & {TENSOR, MASK, TENSORS} else HOST
            case ast.Starred(value=inner) | ast.Await(value=inner):
                return self.value(inner)
            case ast.Yield(value=inner) | ast.YieldFrom(value=inner):
                self.value(inner)
                return HOST
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                self._comprehension(node.generators)
                kind = self.value(node.elt)
                return TENSORS if kind in (TENSOR, MASK) else HOST
            case ast.DictComp():
                self._comprehension(node.generators)
                self.value(node.value)
                return HOST
            case ast.JoinedStr(values=values):
                for part in values:
                    if isinstance(part, ast.FormattedValue):
                        self.calls.operators.output(part.value, node)
                return HOST
            case ast.Dict(values=values):
                for inner in values:
                    self.value(inner)
                return HOST
            case _:
                return HOST

    def decide(self, test: ast.expr, what: str) -> None:
        """Evaluate an expression whose truth Python asks for."""
        if self.value(test) in (TENSOR, MASK):
            message = f"{what} {ast.unparse(test)} decides by the value of a tensor"
            self.recorded.tell(self.frame, ingraph.BRANCH, test, message)

    def subscript(self, node: ast.Subscript) -> str:
        """Return the kind of a part, reporting bounds and masks that are asked for their values."""
        owner = self.value(node.value)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for part in parts:
            if isinstance(part, ast.Slice):
                for bound in (part.lower, part.upper, part.step):
                    if self.value(bound) in (TENSOR, MASK):
                        message = f"the slice bound {ast.unparse(node)} is the value of a tensor"
                        self.recorded.tell(self.frame, ingraph.BRANCH, node, message)
                continue
            kind = self.value(part)
            if kind == MASK and owner in (TENSOR, MASK, HOST) and isinstance(node.ctx, ast.Load):
                message = f"{ast.unparse(node)} has as many rows as the mask has true values"
                self.recorded.tell(self.frame, ingraph.DYNAMIC_SHAPE, node, message)
        if owner == TENSORS:
            return TENSORS if any(isinstance(part, ast.Slice) for part in parts) else TENSOR
        return owner if owner in (TENSOR, MASK) else HOST

    def bind(
        self,
        target: ast.expr,
        kind: str,
        value: ast.expr | None = None,
    ) -> None:
        """Let a target be of a kind; the parts of a tuple are what the parts of its value are."""
        if isinstance(target, ast.Name):
            self.frame.kinds[target.id] = kind
            self.frame.methods.pop(target.id, None)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, kind)
        elif isinstance(target, ast.Tuple | ast.List):
            parts = value.elts if isinstance(value, ast.Tuple | ast.List) else None
            for number, part in enumerate(target.elts):
                if parts is not None and len(parts) == len(target.elts):
                    self.bind(part, self.value(parts[number]))
                else:
                    self.bind(part, element(kind))

    def bind_each(self, target: ast.expr, iterated: ast.expr) -> None:
        """Let the target of a loop be what the elements of ``iterated`` are."""
        kind = self.value(iterated)
        parts = target.elts if isinstance(target, ast.Tuple | ast.List) else []
        match iterated:
            case ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]) if len(parts) == 2:
                self.bind(parts[0], HOST)
                self.bind_each(parts[1], inner)
            case ast.Call(func=ast.Name(id="zip"), args=given) if len(given) == len(parts):
                for part, inner in zip(parts, given, strict=True):
                    self.bind_each(part, inner)
            case _:
                self.bind(target, element(kind))

    def _attribute(self, owner: str, name: str) -> str:
        if owner in (TENSOR, MASK):
            return owner if name in VIEWS else HOST
        if owner == BATCH and name in tensor_fields("ForwardBatch"):
            return MASK if name in _MASK_FIELDS else TENSOR
        if owner == META and name in tensor_fields("ShortConvMetadata"):
            return MASK if name in _MASK_FIELDS else TENSOR
        if owner == SELF and name == "forward_metadata":
            return META
        shape = self.recorded.shape(owner)
        if shape is None:
            return HOST
        computed = [one for one in shape.methods.get(name, ()) if one.kind in _COMPUTED]
        if computed:
            return self.calls.methods(computed, owner)
        return shape.attributes.get(name, HOST)

    def _compare(self, node: ast.Compare) -> str:
        operands = [node.left, *node.comparators]
        kinds = [self.value(operand) for operand in operands]
        tensors = any(kind in (TENSOR, MASK) for kind in kinds)
        if all(isinstance(operator, ast.Is | ast.IsNot) for operator in node.ops):
            return HOST
        if tensors and any(isinstance(operator, ast.In | ast.NotIn) for operator in node.ops):
            message = f"{ast.unparse(node)} compares the values of a tensor in Python"
            self.recorded.tell(self.frame, ingraph.BRANCH, node, message)
            return HOST
        if tensors and len(node.ops) > 1:
            message = f"{ast.unparse(node)} is a chain, which asks for the truth of a tensor"
            self.recorded.tell(self.frame, ingraph.BRANCH, node, message)
        return MASK if tensors else HOST

    def _comprehension(self, generators: Iterable[ast.comprehension]) -> None:
        for generator in generators:
            self.bind_each(generator.target, generator.iter)
            for test in generator.ifs:
                self.decide(test, "if")
