"""SCV211: the factory, and the classes of what it makes."""

from __future__ import annotations

import ast

from sconv.wording import did_you_mean

from ..findings import Finding
from ..resolve import ClassRef, Project
from .description import FACTORY, Description
from .entry import OPEN, returned_classes, unreadable
from .rule import Where
from .wiring import UNVERIFIABLE

__all__ = ["factory_classes"]


def factory_classes(
    project: Project, description: Description
) -> tuple[list[ClassRef], list[Finding]]:
    """Return the classes of what the factory makes, and what is wrong with it."""
    where = description.where
    try:
        value = project.constant(description.fields["factory"], description.place)
    except (ValueError, KeyError):
        return [], []
    module, colon, attribute = str(value).partition(":")
    if not isinstance(value, str) or not colon or not attribute or not module:
        return [], [FACTORY.found(where, f"the factory {value!r} is not of the form 'module:attr'")]
    source = project.source(module)
    if source is None:
        if any(unreadable(path, module) for path in project.unreadable):
            text = f"the module of the factory {value!r} cannot be read"
            return [], [UNVERIFIABLE.found(where, text, leaves_open=OPEN)]
        return [], [FACTORY.found(where, f"the factory {value!r}: there is no module {module!r}")]
    classes: list[ClassRef] = []
    problems: list[Finding] = []
    for found in project.find(f"{module}.{attribute}"):
        unknown = False
        match found.node:
            case ast.ClassDef() as node if found.place is not None:
                classes.append(ClassRef(found.path, node, found.place))
            case ast.FunctionDef() as node if found.place is not None:
                text = _refusal(node)
                if text:
                    place = Where.of(found.place.source.path, node)
                    problems.append(FACTORY.found(place, f"the factory {value!r} {text}"))
                more, unknown = returned_classes(project, node, found.place)
                classes += more
            case ast.AsyncFunctionDef() as node if found.place is not None:
                place = Where.of(found.place.source.path, node)
                problems.append(FACTORY.found(place, f"the factory {value!r} is async"))
            case ast.Constant() | ast.Dict() | ast.List() | ast.Tuple() | ast.Module():
                problems.append(FACTORY.found(where, f"the factory {value!r} is not callable"))
            case None if found.path == f"{module}.{attribute}":
                near = did_you_mean(attribute, source.scope)
                text = f"the factory {value!r}: there is no {attribute!r} in {module}{near}"
                problems.append(FACTORY.found(where, text))
            case _:
                unknown = True
        if unknown:
            text = f"what the factory {value!r} returns cannot be followed"
            problems.append(UNVERIFIABLE.found(where, text, leaves_open=("SCV207",)))
    return classes, problems


def _refusal(node: ast.FunctionDef) -> str:
    """Say why a call with spec, device and pool by name fails, or ""."""
    arguments = node.args
    named = {one.arg for one in [*arguments.args, *arguments.kwonlyargs]}
    passed = ("spec", "device", "pool")
    missing = [name for name in passed if name not in named]
    if missing and arguments.kwarg is None:
        return f"does not take {', '.join(missing)}; it is called with: {', '.join(passed)}"
    count = len(arguments.args) - len(arguments.defaults)
    required = [one.arg for one in arguments.args[:count]]
    required += [one.arg for one in arguments.posonlyargs]
    required += [
        one.arg
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    extra = [name for name in required if name not in passed]
    return f"needs {', '.join(extra)} too; it is called with: {', '.join(passed)}" if extra else ""
