"""The statements of recorded code, in order: which names are tensors, and what is kept."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .expressions import Expressions
from .frames import Frame
from .kinds import HOST, MASK, TENSOR, join
from .rules import ingraph
from .shapes import allocates, annotated

if TYPE_CHECKING:
    from .bodies import Recorded

__all__ = ["Statements"]


class Statements:
    """Follows the statements of one function."""

    def __init__(self, recorded: Recorded, frame: Frame) -> None:
        """Report through ``recorded`` what the statements of ``frame`` do."""
        self.recorded, self.frame = recorded, frame
        self.expressions = Expressions(recorded, frame)

    def run(self, body: Sequence[ast.stmt]) -> None:
        """Follow a block."""
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                kind = self.expressions.value(value)
                for target in targets:
                    self._store(target, kind, value)
                    if isinstance(target, ast.Name) and isinstance(value, ast.Attribute):
                        self.frame.methods[target.id] = value
            case ast.AnnAssign(target=target, value=value, annotation=annotation):
                declared = annotated(self.recorded.project, annotation, self.frame.inside)
                kind = self.expressions.value(value)
                self._store(target, kind if kind != HOST else declared, value)
            case ast.AugAssign(target=target, value=value):
                kind = self.expressions.value(value)
                if isinstance(target, ast.Name):
                    self.frame.kinds[target.id] = join(self.frame.kinds.get(target.id, HOST), kind)
                elif isinstance(target, ast.Subscript):
                    self._store(target, kind, value)
            case ast.Return(value=value):
                self.frame.result = join(self.frame.result, self.expressions.value(value))
            case ast.Expr(value=value):
                self.expressions.value(value)
            case ast.If(test=test):
                self.expressions.decide(test, "if")
                self._either(node.body, node.orelse)
            case ast.While(test=test):
                self.expressions.decide(test, "while")
                self._loop(node)
            case ast.Assert(test=test):
                self.expressions.decide(test, "assert")
            case ast.For(target=target, iter=iterated):
                self.expressions.bind_each(target, iterated)
                self._loop(node)
            case ast.With(items=items, body=body):
                for item in items:
                    kind = self.expressions.value(item.context_expr)
                    entered = self.expressions.calls.context(kind)
                    if item.optional_vars is not None:
                        self.expressions.bind(item.optional_vars, entered)
                self.run(body)
            case ast.Try() | ast.TryStar():
                self._either([*node.body, *node.orelse], *(one.body for one in node.handlers))
                self.run(node.finalbody)
            case ast.Match(subject=subject, cases=cases):
                self.expressions.decide(subject, "match")
                for case in cases:
                    if case.guard is not None:
                        self.expressions.decide(case.guard, "if")
                self._either(*(case.body for case in cases), [])
            case _:
                pass  # an error, for one, ends the capture anyhow

    def _either(self, *ways: Sequence[ast.stmt]) -> None:
        """Follow blocks of which one runs; a name is afterwards what any of them made of it."""
        before, ends = self.frame.kinds, []
        for way in ways:
            self.frame.kinds = dict(before)
            self.run(way)
            ends.append(self.frame.kinds)
        names = dict.fromkeys(name for end in ends for name in end)
        merged = {}
        for name in names:
            kind = HOST
            for end in ends:
                kind = join(kind, end.get(name, HOST))
            merged[name] = kind
        self.frame.kinds = merged

    def _loop(self, node: ast.For | ast.While) -> None:
        # Twice: what a loop assigns reaches its beginning.
        self.run(node.body)
        self.run(node.body)
        self.run(node.orelse)

    def _store(self, target: ast.expr, kind: str, value: ast.expr | None) -> None:
        if isinstance(target, ast.Subscript):
            self._masked_store(target, value, kind)
        elif isinstance(target, ast.Attribute):
            owner = self.expressions.value(target.value)
            if self.recorded.shape(owner) is not None and (
                allocates(value) or (kind in (TENSOR, MASK) and _computes(value))
            ):
                message = f"{ast.unparse(target)} is a new tensor, which outlives the call"
                self.recorded.tell(self.frame, ingraph.ALLOCATION, target, message)
        else:
            self.expressions.bind(target, kind, value)

    def _masked_store(
        self,
        target: ast.Subscript,
        value: ast.expr | None,
        kind: str,
    ) -> None:
        """``x[mask] = number`` is a fill; with a tensor the mask's true values are counted."""
        self.expressions.subscript(target)
        parts = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
        masks = [part for part in parts if self.expressions.value(part) == MASK]
        if masks and kind in (TENSOR, MASK):
            message = f"{ast.unparse(target)} = … counts the true values of the mask"
            self.recorded.tell(self.frame, ingraph.DYNAMIC_SHAPE, target, message)


def _computes(value: ast.expr | None) -> bool:
    """Whether an expression on tensors has a result of its own, and is no view or alias."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Attribute) and value.func.attr == "clone"
    return isinstance(value, ast.BinOp | ast.Compare | ast.UnaryOp)
