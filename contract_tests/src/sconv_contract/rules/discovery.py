"""From an entry point to the plugin object, its BackendInfo, and what its factory makes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias

from sconv import BackendInfo, Capabilities
from sconv.messages import did_you_mean

from ..findings import Finding, Where
from ..source.methods import Function, own_nodes
from ..source.resolve import ClassRef, Found, Place, Project
from ..target import EntryPoint
from .rule import Rule
from .subjects import Run
from .unverifiable import question

__all__ = ["DeclaredBackend", "Description", "Discovered", "Factory", "Trouble", "told"]

Own: TypeAlias = tuple[str, ClassRef] | None

_INFO: Final = frozenset({"sconv.BackendInfo", "sconv.hookspecs.BackendInfo"})

_FOLLOWED: Final = (
    "Let each return call a class by its name: if spec.kernel_size < 4: return Small(spec=spec, …);"
    " return Large(spec=spec, …)."
)


@dataclass(frozen=True)
class Trouble:
    """What is wrong, or cannot be followed, on the way.

    Attributes:
        where: The place.
        text: What is there.
        is_open: It may be right, and is only not seen.
        fix: What to do, where the rule's own advice is not enough.
    """

    where: Where
    text: str
    is_open: bool = False
    fix: str = ""


@dataclass
class Description:
    """What a plugin's BackendInfo call says.

    Attributes:
        call: The call.
        place: Where it stands.
        fields: Its arguments by name.
        capabilities: Calls of Capabilities that it may be given, with their places.
    """

    call: ast.Call
    place: Place
    fields: Mapping[str, ast.expr]
    capabilities: list[tuple[ast.Call, Place]]

    @property
    def where(self) -> Where:
        """The place of the call."""
        return Where.of(self.place.source.path, self.call)


@dataclass
class Factory:
    """What a description's factory makes: classes, and what is wrong on the way to them."""

    description: Description
    classes: list[ClassRef] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)


@dataclass(frozen=True)
class DeclaredBackend:
    """A backend that an entry point declares, followed as far as its source shows."""

    run: Run
    point: EntryPoint

    @property
    def where(self) -> Where:
        """The line that declares it."""
        return Where(self.point.path, self.point.line)

    @cached_property
    def plugin(self) -> tuple[list[ClassRef], list[Trouble]]:
        """The classes whose instances the entry point may name, and what is wrong with it."""
        return _plugin(self.run.project, self.point, self.where)

    @cached_property
    def descriptions(self) -> list[Description]:
        """What its ``sconv_backend`` methods may return."""
        return [one for one in self._returned if isinstance(one, Description)]

    @property
    def undescribed(self) -> list[Trouble]:
        """What they return instead, or what cannot be followed."""
        return [one for one in self._returned if isinstance(one, Trouble)]

    @cached_property
    def _returned(self) -> list[Description | Trouble]:
        project, members = self.run.project, self.run.members
        return [
            found
            for plugin in self.plugin[0]
            for variants in members.of(project.mro(plugin)[0][0]).values()
            for method in variants
            if method.marked and method.hook == "sconv_backend"
            if method.function is not None and method.place is not None
            for found in _descriptions(project, method.function, method.place)
        ]

    @cached_property
    def factories(self) -> list[Factory]:
        """What the factory of each description makes."""
        return [_factory(self.run.project, one) for one in self.descriptions]


@dataclass(frozen=True)
class Discovered:
    """The modules and the probe that discovering a backend imports and calls."""

    backend: DeclaredBackend


def told(rule: Rule[Any], run: Run, trouble: Trouble, *scopes: type[Any]) -> Finding:
    """Return a trouble as a breach of a rule, or as a question that leaves rules open."""
    if trouble.is_open:
        return question(run, trouble.where, trouble.text, *scopes, fix=trouble.fix)
    return rule.found(trouble.where, trouble.text, fix=trouble.fix)


def _plugin(
    project: Project, point: EntryPoint, where: Where
) -> tuple[list[ClassRef], list[Trouble]]:
    declared = f"{point.name} = {point.value!r}"
    module, colon, attribute = point.value.partition("[")[0].partition(":")
    module, attribute = module.strip(), attribute.strip()
    if not colon or not attribute:
        return [], [Trouble(where, f"{declared} is not of the form 'module:attr'")]
    source = project.source(module)
    if source is None:
        why, is_open = _no_source(project, module)
        return [], [Trouble(where, f"{declared}: {why}", is_open)]
    classes: list[ClassRef] = []
    troubles: list[Trouble] = []
    for found in project.find(f"{module}.{attribute}"):
        problem, refs, is_open = _instance_of(project, found, 0)
        classes += refs
        if problem:
            near = did_you_mean(attribute, source.scope) if found.node is None else ""
            near = "" if is_open else near
            troubles.append(Trouble(where, f"{declared}: {problem}{near}", is_open))
    return classes, troubles


def _descriptions(
    project: Project, function: Function, place: Place
) -> Iterator[Description | Trouble]:
    """Yield what a ``sconv_backend`` method may return."""
    where = Where.of(place.source.path, function)
    inside = place.inside(function)
    returns = [node for node in own_nodes(function) if isinstance(node, ast.Return)]
    values = [node.value for node in returns]
    if isinstance(function, ast.Lambda):
        values = [function.body]
    if not values or any(value is None for value in values):
        yield Trouble(where, "sconv_backend() returns no BackendInfo")
    for value in values:
        for found in project.evaluate(value, inside) if value is not None else ():
            call = found.node
            if (
                isinstance(call, ast.Call)
                and found.place is not None
                and project.paths(call.func, found.place) & _INFO
            ):
                yield _description(project, call, found.place)
            elif isinstance(call, ast.Constant | ast.Dict | ast.Tuple | ast.List):
                yield Trouble(where, f"sconv_backend() returns {ast.unparse(call)}")
            else:
                assert value is not None
                text = f"sconv_backend() returns {ast.unparse(value)}, which is not followed"
                yield Trouble(where, text, is_open=True)


def _description(project: Project, call: ast.Call, place: Place) -> Description | Trouble:
    if any(keyword.arg is None for keyword in call.keywords) or any(
        isinstance(argument, ast.Starred) for argument in call.args
    ):
        text = "BackendInfo takes * or **, so that its fields cannot be read"
        return Trouble(Where.of(place.source.path, call), text, is_open=True)
    fields = dict(zip(BackendInfo.__dataclass_fields__, call.args, strict=False))
    fields |= {str(keyword.arg): keyword.value for keyword in call.keywords}
    given = fields.get("capabilities")
    capabilities = [
        (found.node, found.place)
        for found in (project.evaluate(given, place) if given is not None else ())
        if isinstance(found.node, ast.Call) and found.place is not None
    ]
    return Description(call, place, fields, capabilities)


def literal_capabilities(project: Project, description: Description) -> dict[str, Any]:
    """Return the capabilities whose values the source shows, by name."""
    known = Capabilities.__dataclass_fields__
    values: dict[str, Any] = {}
    for call, place in description.capabilities:
        for name, expression in given_capabilities(call).items():
            if name in known:
                with suppress(ValueError):
                    values[name] = project.constant(expression, place)
    return values


def given_capabilities(call: ast.Call) -> dict[str, ast.expr]:
    """Return the arguments of a call of Capabilities by name."""
    given = dict(zip(Capabilities.__dataclass_fields__, call.args, strict=False))
    return given | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def _factory(project: Project, description: Description) -> Factory:
    """Follow a description's factory."""
    where, made = description.where, Factory(description)
    try:
        value = project.constant(description.fields["factory"], description.place)
    except (ValueError, KeyError):
        return made
    module, colon, attribute = str(value).partition(":")
    if not isinstance(value, str) or not colon or not attribute or not module:
        text = f"the factory {value!r} is not of the form 'module:attr'"
        made.troubles.append(Trouble(where, text))
        return made
    source = project.source(module)
    if source is None:
        why, is_open = _no_source(project, module)
        made.troubles.append(Trouble(where, f"the factory {value!r}: {why}", is_open))
        return made
    for found in project.find(f"{module}.{attribute}"):
        unknown = False
        match found.node:
            case ast.ClassDef() as node if found.place is not None:
                made.classes.append(ClassRef(found.path, node, found.place))
            case ast.FunctionDef() as node if found.place is not None:
                own = _class_of(project, node, f"{module}.{attribute}")
                text = _refusal(node, bound=own is not None)
                if text:
                    place = Where.of(found.place.source.path, node)
                    made.troubles.append(Trouble(place, f"the factory {value!r} {text}"))
                more, unknown = _returned_classes(project, node, found.place, own=own)
                made.classes += more
            case ast.AsyncFunctionDef() as node if found.place is not None:
                place = Where.of(found.place.source.path, node)
                made.troubles.append(Trouble(place, f"the factory {value!r} is async"))
            case ast.Constant() | ast.Dict() | ast.List() | ast.Tuple() | ast.Module():
                made.troubles.append(Trouble(where, f"the factory {value!r} is not callable"))
            case None if found.path == f"{module}.{attribute}" and _lacks(project, found):
                near = did_you_mean(attribute, source.scope)
                text = f"the factory {value!r}: there is no {attribute!r} in {module}{near}"
                made.troubles.append(Trouble(where, text))
            case _:
                unknown = True
        if unknown:
            text = f"what the factory {value!r} returns cannot be followed"
            made.troubles.append(Trouble(where, text, is_open=True, fix=_FOLLOWED))
    return made


def _class_of(project: Project, node: ast.FunctionDef, path: str) -> tuple[str, ClassRef] | None:
    """Return what a classmethod calls the class that it is called on, and that class."""
    parameters = [*node.args.posonlyargs, *node.args.args]
    if not parameters or not any(ast.unparse(one) == "classmethod" for one in node.decorator_list):
        return None
    for found in project.find(path.rpartition(".")[0]):
        if isinstance(found.node, ast.ClassDef) and found.place is not None:
            return parameters[0].arg, ClassRef(found.path, found.node, found.place)
    return None


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


def _lacks(project: Project, found: Found) -> bool:
    """Whether a module that is read certainly has no such attribute."""
    module = found.path.rpartition(".")[0]
    source = project.source(module) if module and found.place is None else None
    # A module may compute what it is asked for (PEP 562).
    return source is not None and "__getattr__" not in source.scope


def _no_source(project: Project, module: str) -> tuple[str, bool]:
    """Return why a module has no source, and whether it may be right all the same."""
    if any(_answers_to(path, module) for path in project.unreadable):
        return f"the module {module!r} cannot be read", True
    if project.compiled(module):
        return f"the module {module!r} is compiled, and its source is not here", True
    return f"there is no module {module!r}", False


def _answers_to(path: Path, module: str) -> bool:
    name = module.rpartition(".")[2]
    return path.stem == name or (path.stem == "__init__" and path.parent.name == name)


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
        case None if _lacks(project, found):
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
            more, unknown = _returned_classes(project, found.node, found.place, depth + 1)
            classes, unseen = classes + more, unseen or unknown
        else:
            unseen = True
    return classes, unseen or not classes


def _returned_classes(
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
