"""What an object of a class has, for code that is followed: methods, and kinds of attributes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..source.members import Members
from ..source.methods import Method, own_nodes
from ..source.resolve import ClassRef, Place, Project
from .tensor_calls import ALLOCATING
from .value_kinds import HOST, TENSOR, class_of, object_kind, of_annotation

__all__ = ["Shape", "Shapes", "allocates", "annotated"]


@dataclass(frozen=True, slots=True)
class Shape:
    """One class, seen from its methods.

    Attributes:
        order: The class and its bases.
        methods: What each attribute may be.
        attributes: The kinds of attributes that its methods set.
    """

    order: Sequence[ClassRef]
    methods: Mapping[str, list[Method]]
    attributes: Mapping[str, str]


class Shapes:
    """The shapes of the classes of one target; each is made once."""

    def __init__(self, members: Members) -> None:
        """Ask ``members`` what the classes define."""
        self.members, self.project = members, members.project
        self._of_path: dict[str, Shape | None] = {}
        self._set_by: dict[ast.ClassDef, dict[str, str]] = {}

    def of(self, order: Sequence[ClassRef]) -> Shape:
        """Return the shape of a class with this method resolution order."""
        attributes: dict[str, str] = {}
        for ref in order:
            attributes = self._attributes(ref) | attributes
        return Shape(order, self.members.of(order), attributes)

    def of_kind(self, kind: str) -> Shape | None:
        """Return what an object of this kind has, or None if its class is not known."""
        path = class_of(kind)
        if path is None:
            return None
        if path not in self._of_path:
            self._of_path[path] = None
            for found in self.project.find(path):
                if isinstance(found.node, ast.ClassDef) and found.place is not None:
                    ref = ClassRef(path, found.node, found.place)
                    self._of_path[path] = self.of(self.project.mro(ref)[0][0])
        return self._of_path[path]

    def _attributes(self, ref: ClassRef) -> dict[str, str]:
        """Return the kinds of attributes that one class's body and methods set."""
        if ref.node not in self._set_by:
            known: dict[str, str] = {}
            for name, kind in _attributes(self.project, ref):
                if kind != HOST:
                    known.setdefault(name, kind)
            self._set_by[ref.node] = known
        return self._set_by[ref.node]


def annotated(project: Project, annotation: ast.expr | None, place: Place) -> str:
    """Return the kind that an annotation promises."""
    if annotation is None:
        return HOST
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            annotation = ast.parse(annotation.value, mode="eval").body
        except SyntaxError:
            return HOST
    kind = of_annotation(ast.unparse(annotation))
    if kind != HOST:
        return kind
    if isinstance(annotation, ast.BinOp):
        left = annotated(project, annotation.left, place)
        return left if left != HOST else annotated(project, annotation.right, place)
    if not isinstance(annotation, ast.Name | ast.Attribute):
        return HOST
    for found in project.evaluate(annotation, place):
        if isinstance(found.node, ast.ClassDef):
            return object_kind(found.path)
    return HOST


def allocates(value: ast.expr | None) -> bool:
    """Whether an expression is a call that makes a tensor out of nothing."""
    if not isinstance(value, ast.Call):
        return False
    name = value.func.attr if isinstance(value.func, ast.Attribute) else ""
    return name in ALLOCATING


def _attributes(project: Project, ref: ClassRef) -> Iterator[tuple[str, str]]:
    for statement in ref.node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, annotated(project, statement.annotation, ref.place)
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            yield name, _assigned(project, statement.value, {}, ref.inside)
        if not isinstance(statement, ast.FunctionDef):
            continue
        inside = ref.inside.inside(statement)
        arguments = [*statement.args.args, *statement.args.kwonlyargs]
        given = {one.arg: annotated(project, one.annotation, ref.place) for one in arguments}
        for node in own_nodes(statement):
            match node:
                case ast.Assign(targets=[ast.Attribute(attr=name)], value=value):
                    yield name, _assigned(project, value, given, inside)
                case ast.AnnAssign(target=ast.Attribute(attr=name), annotation=annotation):
                    yield name, annotated(project, annotation, inside)


def _assigned(project: Project, value: ast.expr, given: Mapping[str, str], inside: Place) -> str:
    match value:
        case ast.Name(id=name):
            return given.get(name, HOST)
        case ast.Call(func=function):
            if allocates(value):
                return TENSOR
            for found in project.evaluate(function, inside):
                if isinstance(found.node, ast.ClassDef):
                    return object_kind(found.path)
    return HOST
