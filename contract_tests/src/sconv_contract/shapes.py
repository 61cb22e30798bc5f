"""What an object of a class has, for code that is followed: methods, and kinds of attributes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .kinds import HOST, TENSOR, object_kind, of_annotation
from .members import members
from .methods import Method, own_nodes
from .resolve import ClassRef, Place, Project
from .tensor_calls import ALLOCATING

__all__ = ["Shape", "allocates", "annotated", "shape_of"]


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


def shape_of(project: Project, order: Sequence[ClassRef]) -> Shape:
    """Return the shape of a class with this method resolution order."""
    attributes: dict[str, str] = {}
    for ref in order:
        for name, kind in _attributes(project, ref):
            if kind != HOST:
                attributes.setdefault(name, kind)
    return Shape(order, members(project, order), attributes)


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
