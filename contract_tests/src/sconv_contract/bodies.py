"""Follows the code that a graph records and says where it would not record.

It knows which values are tensors: parameters, fields of a batch and of metadata, results of torch.
A value that it does not know is no tensor to it, so that it stays silent where it would guess; the
calls that are wrong on anything (``.item()``) are reported everywhere.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .calls import Calls
from .contract import Hook, tensor_fields
from .findings import Finding
from .kinds import (
    BATCH,
    HOST,
    MASK,
    META,
    SELF,
    TENSOR,
    TENSORS,
    class_of,
    element,
    join,
    of_annotation,
)
from .methods import Function, Method
from .resolve import ClassRef, Place, Project
from .rules import ingraph
from .rules.rule import Rule, Where
from .shapes import Shape, allocates, annotated, shape_of
from .tensor_calls import VIEWS

__all__ = ["Frame", "Recorded"]

_MAX_DEPTH: Final = 12

_MASK_FIELDS: Final = frozenset({"cache_mask", "has_initial_state", "mamba_track_mask", "writes"})


@dataclass
class Frame:
    """One function on the way.

    Attributes:
        function: Its node.
        place: Where it stands.
        kinds: What each local name is.
        owner: The class that defines it, for super().
        depth: Calls above it.
        result: What it returns, so far.
    """

    function: Function
    place: Place
    kinds: dict[str, str]
    owner: ClassRef | None
    depth: int
    result: str = HOST

    @property
    def inside(self) -> Place:
        """The place of its body."""
        return self.place.inside(self.function)


@dataclass
class Recorded:
    """The code that one in-graph hook of one class reaches.

    Attributes:
        project: Where names are looked up.
        hook: The hook.
        backend: The class that implements it.
        reported: Files that findings may be about: those of the target.
        shapes: Classes that were met, by path; shared by the scans of one target.
    """

    project: Project
    hook: Hook
    backend: Shape
    reported: Callable[[Path], bool]
    shapes: dict[str, Shape | None] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    _done: dict[tuple[int, tuple[tuple[str, str], ...]], str] = field(default_factory=dict)
    _told: set[tuple[str, str, int, int]] = field(default_factory=set)

    def scan(self, method: Method) -> list[Finding]:
        """Follow one implementation of the hook and return what would not record."""
        if method.function is None or method.place is None:
            return []
        kinds = {
            name: of_annotation(annotation) for name, annotation in self.hook.annotations.items()
        }
        self.run(method.function, method.place, kinds, method.owner, 0, bound=SELF)
        return self.findings

    def shape(self, kind: str) -> Shape | None:
        """Return what an object of this kind has, or None if its class is not known."""
        if kind == SELF:
            return self.backend
        path = class_of(kind)
        if path is None:
            return None
        if path not in self.shapes:
            self.shapes[path] = None
            for found in self.project.find(path):
                if isinstance(found.node, ast.ClassDef) and found.place is not None:
                    order = self.project.mro(ClassRef(path, found.node, found.place))[0][0]
                    self.shapes[path] = shape_of(self.project, order)
        return self.shapes[path]

    def run(
        self,
        function: Function,
        place: Place,
        kinds: Mapping[str, str],
        owner: ClassRef | None,
        depth: int,
        *,
        bound: str | None,
    ) -> str:
        """Follow a function whose arguments are of these kinds; return the kind of its result.

        ``bound`` is the kind of the object that its first parameter receives, None = a function.
        """
        known = {name: kind for name, kind in kinds.items() if kind != HOST}
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for argument in every:
            promised = annotated(self.project, argument.annotation, place)
            if promised != HOST:
                known.setdefault(argument.arg, promised)
        if bound is not None and every:
            known[every[0].arg] = bound
        key = (id(function), tuple(sorted(known.items())))
        if key in self._done or depth > _MAX_DEPTH:
            return self._done.get(key, HOST)
        returns = annotated(self.project, getattr(function, "returns", None), place)
        self._done[key] = returns
        frame = Frame(function, place, dict(known), owner, depth)
        calls = Calls(self, frame)
        if isinstance(function, ast.Lambda):
            frame.result = self.value(frame, function.body, calls)
        else:
            self._block(frame, function.body, calls)
        self._done[key] = returns if returns != HOST else frame.result
        return self._done[key]

    def tell(self, frame: Frame, rule: Rule, node: ast.AST, message: str) -> None:
        """Report a finding once, unless the code is not the target's."""
        path = frame.place.source.path
        where = Where.of(path, node)
        key = (rule.id, str(path), where.line, where.column)
        if key in self._told or not self.reported(path):
            return
        self._told.add(key)
        reached = f"{self.hook.name} reaches it" if frame.depth else f"in {self.hook.name}"
        self.findings.append(rule.found(where, f"{message} ({reached})", hook=self.hook.name))

    def decide(self, frame: Frame, test: ast.expr, calls: Calls, what: str) -> None:
        """Evaluate an expression whose truth Python asks for."""
        if self.value(frame, test, calls) in (TENSOR, MASK):
            message = f"{what} {ast.unparse(test)} decides by the value of a tensor"
            self.tell(frame, ingraph.BRANCH, test, message)

    def value(self, frame: Frame, node: ast.expr | None, calls: Calls) -> str:
        """Return the kind of an expression, reporting what it does on the way."""
        match node:
            case None:
                return HOST
            case ast.Name(id=name):
                return frame.kinds.get(name, HOST)
            case ast.Attribute(value=owner, attr=name):
                return self._attribute(self.value(frame, owner, calls), name)
            case ast.Subscript():
                return self._subscript(frame, node, calls)
            case ast.Call():
                return calls.call(node)
            case ast.BinOp(left=left, right=right):
                kinds = {self.value(frame, left, calls), self.value(frame, right, calls)}
                bitwise = isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor)
                if MASK in kinds and bitwise:
                    return MASK
                if kinds == {TENSORS}:
                    return TENSORS
                return TENSOR if kinds & {TENSOR, MASK} else HOST
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self.decide(frame, operand, calls, "not")
                return HOST
            case ast.UnaryOp(operand=operand):
                return self.value(frame, operand, calls)
            case ast.Compare():
                return self._compare(frame, node, calls)
            case ast.BoolOp(values=values):
                for operand in values[:-1]:
                    word = "and" if isinstance(node.op, ast.And) else "or"
                    self.decide(frame, operand, calls, word)
                return self.value(frame, values[-1], calls)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self.decide(frame, test, calls, "if")
                return join(self.value(frame, body, calls), self.value(frame, orelse, calls))
            case ast.NamedExpr(target=target, value=inner):
                kind = self.value(frame, inner, calls)
                frame.kinds[target.id] = kind
                return kind
            case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
                kinds = {self.value(frame, one, calls) for one in elements}
                return TENSORS if kinds & {TENSOR, MASK, TENSORS} else HOST
            case ast.Starred(value=inner) | ast.Await(value=inner):
                return self.value(frame, inner, calls)
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                self._comprehension(frame, node.generators, calls)
                kind = self.value(frame, node.elt, calls)
                return TENSORS if kind in (TENSOR, MASK) else HOST
            case ast.DictComp():
                self._comprehension(frame, node.generators, calls)
                self.value(frame, node.value, calls)
                return HOST
            case ast.JoinedStr(values=values):
                for part in values:
                    if isinstance(part, ast.FormattedValue):
                        calls.output(part.value, node)
                return HOST
            case ast.Dict(values=values):
                for inner in values:
                    self.value(frame, inner, calls)
                return HOST
            case _:
                return HOST

    def _attribute(self, owner: str, name: str) -> str:
        if owner in (TENSOR, MASK):
            return owner if name in VIEWS else HOST
        if owner == BATCH and name in tensor_fields("ForwardBatch"):
            return MASK if name in _MASK_FIELDS else TENSOR
        if owner == META and name in tensor_fields("ShortConvMetadata"):
            return MASK if name in _MASK_FIELDS else TENSOR
        if owner == SELF and name == "forward_metadata":
            return META
        shape = self.shape(owner)
        return HOST if shape is None else shape.attributes.get(name, HOST)

    def _subscript(self, frame: Frame, node: ast.Subscript, calls: Calls) -> str:
        owner = self.value(frame, node.value, calls)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for part in parts:
            if isinstance(part, ast.Slice):
                for bound in (part.lower, part.upper, part.step):
                    if self.value(frame, bound, calls) in (TENSOR, MASK):
                        message = f"the slice bound {ast.unparse(node)} is the value of a tensor"
                        self.tell(frame, ingraph.BRANCH, node, message)
                continue
            kind = self.value(frame, part, calls)
            if kind == MASK and owner in (TENSOR, MASK, HOST) and isinstance(node.ctx, ast.Load):
                message = f"{ast.unparse(node)} has as many rows as the mask has true values"
                self.tell(frame, ingraph.DYNAMIC_SHAPE, node, message)
        if owner == TENSORS:
            return TENSORS if any(isinstance(part, ast.Slice) for part in parts) else TENSOR
        return owner if owner in (TENSOR, MASK) else HOST

    def _compare(self, frame: Frame, node: ast.Compare, calls: Calls) -> str:
        operands = [node.left, *node.comparators]
        kinds = [self.value(frame, operand, calls) for operand in operands]
        tensors = any(kind in (TENSOR, MASK) for kind in kinds)
        if all(isinstance(operator, ast.Is | ast.IsNot) for operator in node.ops):
            return HOST
        if tensors and any(isinstance(operator, ast.In | ast.NotIn) for operator in node.ops):
            message = f"{ast.unparse(node)} compares the values of a tensor in Python"
            self.tell(frame, ingraph.BRANCH, node, message)
            return HOST
        if tensors and len(node.ops) > 1:
            message = f"{ast.unparse(node)} is a chain, which asks for the truth of a tensor"
            self.tell(frame, ingraph.BRANCH, node, message)
        return MASK if tensors else HOST

    def _comprehension(
        self, frame: Frame, generators: Iterable[ast.comprehension], calls: Calls
    ) -> None:
        for generator in generators:
            self._bind(frame, generator.target, element(self.value(frame, generator.iter, calls)))
            for test in generator.ifs:
                self.decide(frame, test, calls, "if")

    def _block(self, frame: Frame, body: Sequence[ast.stmt], calls: Calls) -> None:
        for statement in body:
            self._statement(frame, statement, calls)

    def _statement(self, frame: Frame, node: ast.stmt, calls: Calls) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                kind = self.value(frame, value, calls)
                for target in targets:
                    self._store(frame, target, kind, value, calls)
            case ast.AnnAssign(target=target, value=value, annotation=annotation):
                declared = annotated(self.project, annotation, frame.inside)
                kind = self.value(frame, value, calls)
                self._store(frame, target, kind if kind != HOST else declared, value, calls)
            case ast.AugAssign(target=target, value=value):
                kind = self.value(frame, value, calls)
                if isinstance(target, ast.Name):
                    frame.kinds[target.id] = join(frame.kinds.get(target.id, HOST), kind)
                elif isinstance(target, ast.Subscript):
                    self._store(frame, target, kind, value, calls)
            case ast.Return(value=value):
                frame.result = join(frame.result, self.value(frame, value, calls))
            case ast.Expr(value=value):
                self.value(frame, value, calls)
            case ast.If(test=test) | ast.While(test=test):
                self.decide(frame, test, calls, "while" if isinstance(node, ast.While) else "if")
                self._block(frame, node.body, calls)
                self._block(frame, node.orelse, calls)
            case ast.Assert(test=test):
                self.decide(frame, test, calls, "assert")
            case ast.For(target=target, iter=iterated):
                self._bind(frame, target, element(self.value(frame, iterated, calls)))
                # Twice: what a loop assigns reaches its beginning.
                self._block(frame, node.body, calls)
                self._block(frame, node.body, calls)
                self._block(frame, node.orelse, calls)
            case ast.With(items=items, body=body):
                for item in items:
                    self.value(frame, item.context_expr, calls)
                self._block(frame, body, calls)
            case ast.Try() | ast.TryStar():
                for block in (node.body, node.orelse, node.finalbody):
                    self._block(frame, block, calls)
                for handler in node.handlers:
                    self._block(frame, handler.body, calls)
            case ast.Match(subject=subject, cases=cases):
                self.decide(frame, subject, calls, "match")
                for case in cases:
                    if case.guard is not None:
                        self.decide(frame, case.guard, calls, "if")
                    self._block(frame, case.body, calls)
            case ast.Raise() | ast.Delete() | ast.Global() | ast.Nonlocal() | ast.Pass():
                pass  # an error ends the capture anyhow
            case _:
                pass

    def _store(
        self, frame: Frame, target: ast.expr, kind: str, value: ast.expr | None, calls: Calls
    ) -> None:
        if isinstance(target, ast.Subscript):
            self._masked_store(frame, target, value, kind, calls)
        elif isinstance(target, ast.Attribute):
            owner = self.value(frame, target.value, calls)
            if self.shape(owner) is not None and allocates(value):
                message = f"{ast.unparse(target)} is a new tensor, which outlives the call"
                self.tell(frame, ingraph.ALLOCATION, target, message)
        else:
            self._bind(frame, target, kind, value, calls)

    def _masked_store(
        self,
        frame: Frame,
        target: ast.Subscript,
        value: ast.expr | None,
        kind: str,
        calls: Calls,
    ) -> None:
        """``x[mask] = number`` is a fill; with a tensor the mask's true values are counted."""
        self._subscript(frame, target, calls)
        parts = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
        masks = [part for part in parts if self.value(frame, part, calls) == MASK]
        if masks and kind in (TENSOR, MASK):
            message = f"{ast.unparse(target)} = … counts the true values of the mask"
            self.tell(frame, ingraph.DYNAMIC_SHAPE, target, message)

    def _bind(
        self,
        frame: Frame,
        target: ast.expr,
        kind: str,
        value: ast.expr | None = None,
        calls: Calls | None = None,
    ) -> None:
        if isinstance(target, ast.Name):
            frame.kinds[target.id] = kind
        elif isinstance(target, ast.Starred):
            self._bind(frame, target.value, kind)
        elif isinstance(target, ast.Tuple | ast.List):
            parts = value.elts if isinstance(value, ast.Tuple | ast.List) else None
            for number, part in enumerate(target.elts):
                if parts is not None and calls is not None and len(parts) == len(target.elts):
                    self._bind(frame, part, self.value(frame, parts[number], calls))
                else:
                    self._bind(frame, part, element(kind))
