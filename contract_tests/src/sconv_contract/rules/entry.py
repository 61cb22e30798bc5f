"""SCV203: the entry point and the object that it names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

from sconv.discovery.installed import canonical
from sconv.discovery.name_conflicts import OWNERS, RESERVED
from sconv.messages import did_you_mean

from ..findings import Finding
from ..methods import Function, own_nodes
from ..resolve import ClassRef, Found, Place, Project
from ..target import EntryPoint
from .rule import Rule, Where
from .wiring import UNVERIFIABLE

__all__ = ["ENTRY_POINT", "OPEN", "RULES", "entry_point", "lacks", "no_source", "returned_classes"]

ENTRY_POINT: Final = Rule(
    "SCV203",
    "entry point",
    "The entry point names an object of a class with sconv_backend, under a name of its own.",
    "A plugin whose entry point does not resolve is listed as broken, and nothing else of it runs.",
    '[project.entry-points."sconv.backends"]\nnpu = "sconv_npu.plugin:NpuPlugin"  # a class',
    "Let it name an instance: plugin = NpuPlugin().",
)
RULES: Final = (ENTRY_POINT,)

Own: TypeAlias = tuple[str, ClassRef] | None

#: What stays unanswered about a plugin object that cannot be followed.
OPEN: Final = ("SCV203", "SCV205", "SCV211", "SCV212", "SCV213")


def entry_point(
    project: Project, point: EntryPoint, distribution: str
) -> tuple[list[ClassRef], list[Finding]]:
    """Return the classes whose instances an entry point may name, and what is wrong with it."""
    where = Where(point.path, point.line)
    problems = [ENTRY_POINT.found(where, text) for text in _name_problems(point, distribution)]
    module, colon, attribute = point.value.partition("[")[0].partition(":")
    module, attribute = module.strip(), attribute.strip()
    if not colon or not attribute:
        text = f"{point.name} = {point.value!r} is not of the form 'module:attr'"
        return [], [*problems, ENTRY_POINT.found(where, text)]
    source = project.source(module)
    if source is None:
        why, is_open = no_source(project, module)
        text = f"{point.name} = {point.value!r}: {why}"
        if is_open:
            return [], [*problems, UNVERIFIABLE.found(where, text, leaves_open=OPEN)]
        return [], [*problems, ENTRY_POINT.found(where, text)]
    classes: list[ClassRef] = []
    for found in project.find(f"{module}.{attribute}"):
        problem, refs, is_open = _instance_of(project, found, 0)
        classes += refs
        if problem and is_open:
            text = f"{point.name} = {point.value!r}: {problem}"
            problems.append(UNVERIFIABLE.found(where, text, leaves_open=OPEN))
        elif problem:
            near = did_you_mean(attribute, source.scope) if found.node is None else ""
            text = f"{point.name} = {point.value!r}: {problem}{near}"
            problems.append(ENTRY_POINT.found(where, text))
    return classes, problems


def lacks(project: Project, found: Found) -> bool:
    """Whether a module that is read certainly has no such attribute."""
    module = found.path.rpartition(".")[0]
    source = project.source(module) if module and found.place is None else None
    # A module may compute what it is asked for (PEP 562).
    return source is not None and "__getattr__" not in source.scope


def no_source(project: Project, module: str) -> tuple[str, bool]:
    """Return why a module has no source, and whether it may be right all the same."""
    if any(_answers_to(path, module) for path in project.unreadable):
        return f"the module {module!r} cannot be read", True
    if project.compiled(module):
        return f"the module {module!r} is compiled, and its source is not here", True
    return f"there is no module {module!r}", False


def _answers_to(path: Path, module: str) -> bool:
    name = module.rpartition(".")[2]
    return path.stem == name or (path.stem == "__init__" and path.parent.name == name)


def _name_problems(point: EntryPoint, distribution: str) -> Iterator[str]:
    if point.name in RESERVED:
        yield f"the name {point.name!r} is reserved"
    owner = OWNERS.get(point.name)
    if owner and distribution and canonical(distribution) != owner:
        yield f"the name {point.name!r} belongs to {owner}"


def _instance_of(project: Project, found: Found, depth: int) -> tuple[str, list[ClassRef], bool]:
    """Return what is wrong with a plugin object, its classes, and whether that is only unknown."""
    match found.node:
        case ast.ClassDef():
            return f"{found.node.name} is a class, not an instance of one", [], False
        case ast.Module():
            return "it is a module, not an instance of a class with sconv_backend", [], False
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            return "it is a function, not an instance of a class with sconv_backend", [], False
        case ast.Constant() | ast.Dict() | ast.List() | ast.Tuple() | ast.Set():
            return "it is a plain value, not an instance of a class", [], False
        case ast.Call() as call if found.place is not None:
            classes, unseen = _constructed(project, call, found.place, depth)
            if unseen:
                return f"{ast.unparse(call)} cannot be followed", classes, True
            return "", classes, False
        case None if lacks(project, found):
            return f"there is no {found.path.rpartition('.')[2]!r} in it", [], False
        case _:
            return f"{found.path} cannot be followed", [], True


def _constructed(
    project: Project, call: ast.Call, place: Place, depth: int, own: Own = None
) -> tuple[list[ClassRef], bool]:
    """Return the classes that a call may make an instance of, and whether some are unknown."""
    if own is not None and isinstance(call.func, ast.Name) and call.func.id == own[0]:
        return [own[1]], False
    classes: list[ClassRef] = []
    unseen = False
    for found in project.evaluate(call.func, place) if depth < 6 else []:
        if isinstance(found.node, ast.ClassDef) and found.place is not None:
            classes.append(ClassRef(found.path, found.node, found.place))
        elif isinstance(found.node, ast.FunctionDef | ast.Lambda) and found.place is not None:
            more, unknown = returned_classes(project, found.node, found.place, depth + 1)
            classes, unseen = classes + more, unseen or unknown
        else:
            unseen = True
    return classes, unseen or not classes


def returned_classes(
    project: Project, function: Function, place: Place, depth: int = 0, own: Own = None
) -> tuple[list[ClassRef], bool]:
    """Return the classes of what a function returns, and whether some are unknown.

    Args:
        project: Where it was found.
        function: The function.
        place: Where it stands.
        depth: Of the calls that led to it.
        own: For a classmethod, the name of its first parameter and the class that it is called on.
    """
    inside = place.inside(function)
    values: list[ast.expr] = (
        [function.body]
        if isinstance(function, ast.Lambda)
        else [
            node.value
            for node in own_nodes(function)
            if isinstance(node, ast.Return) and node.value is not None
        ]
    )
    classes: list[ClassRef] = []
    unseen = not values
    for value in values:
        for found in project.evaluate(value, inside):
            if isinstance(found.node, ast.Call) and found.place is not None:
                more, unknown = _constructed(project, found.node, found.place, depth + 1, own)
                classes, unseen = classes + more, unseen or unknown
            else:
                unseen = True
    return classes, unseen
