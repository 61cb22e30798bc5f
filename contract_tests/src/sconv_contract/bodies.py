"""Follows the code that a graph records and says where it would not record.

It knows which values are tensors: parameters, fields of a batch and of metadata, results of torch.
A value that it does not know is no tensor to it, so that it stays silent where it would guess; the
calls that are wrong on anything (``.item()``) are reported everywhere.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .contract import Hook
from .findings import Finding
from .frames import Frame
from .kinds import HOST, SELF, class_of, of_annotation
from .methods import Function, Method
from .resolve import ClassRef, Place, Project
from .rules.rule import Rule, Where
from .shapes import Shape, annotated, shape_of
from .statements import Statements

__all__ = ["Recorded"]

_MAX_DEPTH: Final = 12


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
        for wrapper in method.wrappers:
            self.run(wrapper.function, wrapper.place, kinds, method.owner, 0, bound=SELF)
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
        statements = Statements(self, frame)
        if isinstance(function, ast.Lambda):
            frame.result = statements.expressions.value(function.body)
        else:
            statements.run(function.body)
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
