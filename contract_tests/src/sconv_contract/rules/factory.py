"""SCV211: the factory, and the classes of what it makes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from sconv import Capabilities
from sconv.messages import did_you_mean

from ..findings import Finding
from ..resolve import ClassRef, Project
from .description import FACTORY, INFO, Description
from .entry import lacks, no_source, returned_classes
from .rule import Where
from .wiring import OPEN, UNVERIFIABLE

__all__ = ["factory_classes", "layouts"]

_FOLLOWED: Final = (
    "Let each return call a class by its name: if spec.kernel_size < 4: return Small(spec=spec, …);"
    " return Large(spec=spec, …)."
)


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
        why, is_open = no_source(project, module)
        text = f"the factory {value!r}: {why}"
        if is_open:
            return [], [UNVERIFIABLE.found(where, text, leaves_open=OPEN)]
        return [], [FACTORY.found(where, text)]
    classes: list[ClassRef] = []
    problems: list[Finding] = []
    for found in project.find(f"{module}.{attribute}"):
        unknown = False
        match found.node:
            case ast.ClassDef() as node if found.place is not None:
                classes.append(ClassRef(found.path, node, found.place))
            case ast.FunctionDef() as node if found.place is not None:
                own = _class_of(project, node, f"{module}.{attribute}")
                text = _refusal(node, bound=own is not None)
                if text:
                    place = Where.of(found.place.source.path, node)
                    problems.append(FACTORY.found(place, f"the factory {value!r} {text}"))
                more, unknown = returned_classes(project, node, found.place, own=own)
                classes += more
            case ast.AsyncFunctionDef() as node if found.place is not None:
                place = Where.of(found.place.source.path, node)
                problems.append(FACTORY.found(place, f"the factory {value!r} is async"))
            case ast.Constant() | ast.Dict() | ast.List() | ast.Tuple() | ast.Module():
                problems.append(FACTORY.found(where, f"the factory {value!r} is not callable"))
            case None if found.path == f"{module}.{attribute}" and lacks(project, found):
                near = did_you_mean(attribute, source.scope)
                text = f"the factory {value!r}: there is no {attribute!r} in {module}{near}"
                problems.append(FACTORY.found(where, text))
            case _:
                unknown = True
        if unknown:
            text = f"what the factory {value!r} returns cannot be followed"
            problems.append(UNVERIFIABLE.found(where, text, fix=_FOLLOWED, leaves_open=OPEN))
    return classes, problems


def _class_of(project: Project, node: ast.FunctionDef, path: str) -> tuple[str, ClassRef] | None:
    """Return what a classmethod calls the class that it is called on, and that class."""
    parameters = [*node.args.posonlyargs, *node.args.args]
    if not parameters or not any(ast.unparse(one) == "classmethod" for one in node.decorator_list):
        return None
    for found in project.find(path.rpartition(".")[0]):
        if isinstance(found.node, ast.ClassDef) and found.place is not None:
            return parameters[0].arg, ClassRef(found.path, found.node, found.place)
    return None


def layouts(project: Project, ref: ClassRef, description: Description) -> Iterator[Finding]:
    """Compare the window layouts that a class keeps with those that its plugin declares."""
    declared = description.capabilities.get("window_layouts", Capabilities().window_layouts)
    for base in project.mro(ref)[0][0]:
        known = project.scope(base.node).get("window_layouts")
        if known is None:
            continue
        value = getattr(known.definitions[-1], "value", None)
        try:
            kept = tuple(project.constant(value, base.inside)) if value is not None else None
        except (TypeError, ValueError):
            return
        if kept is None or not declared:
            return
        if declared[0] != kept[0] or not set(declared) <= set(kept):
            yield INFO.found(
                description.where,
                f"Capabilities.window_layouts is {tuple(declared)}, and {ref.node.name} keeps"
                f" {kept}",
                fix="Declare what the class keeps, first choice first.",
            )
        return


def _refusal(node: ast.FunctionDef, *, bound: bool) -> str:
    """Say why a call with spec, device and pool by name fails, or "".

    Args:
        node: The function.
        bound: Its first parameter receives a class.
    """
    arguments = node.args
    only, plain = arguments.posonlyargs, arguments.args
    if bound:
        only, plain = (only[1:], plain) if only else (only, plain[1:])
    named = {one.arg for one in [*plain, *arguments.kwonlyargs]}
    passed = ("spec", "device", "pool")
    missing = [name for name in passed if name not in named]
    if missing and arguments.kwarg is None:
        return f"does not take {', '.join(missing)}; it is called with: {', '.join(passed)}"
    required = [one.arg for one in plain[: len(plain) - len(arguments.defaults)]]
    required += [one.arg for one in only]
    required += [
        one.arg
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    extra = [name for name in required if name not in passed]
    return f"needs {', '.join(extra)} too; it is called with: {', '.join(passed)}" if extra else ""
