"""What rules are asked about: a declared backend, a class, one hook of it, a module, a file."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..findings import Where
from ..graph_scan.evaluator import Breach, Evaluator
from ..graph_scan.shapes import Shapes
from ..source.files import SourceError
from ..source.hook_specs import IN_GRAPH, STEP, Hook
from ..source.members import Members
from ..source.methods import Function, Method
from ..source.parameter_use import parameters_of
from ..source.resolve import ClassRef, Project, Source
from ..target import Target
from .rule import Rule

__all__ = ["ClassSubject", "Implementation", "Module", "Recording", "Run", "Undeclared", "Unread"]


@dataclass
class Run:
    """One check of one target, which every subject belongs to.

    Attributes:
        target: What is checked.
        project: Where names are looked up.
        rules: Those that are asked.
        files: The target's Python files.
        checked: Classes and functions that a rule was asked about.
        hooked: The classes among them that have hooks.
    """

    target: Target
    project: Project
    rules: Sequence[Rule[Any]]
    files: set[Path] = field(default_factory=set)
    checked: set[ast.AST] = field(default_factory=set)
    hooked: set[ast.AST] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.members = Members(self.project)
        self.shapes = Shapes(self.members)

    def about(self, *scopes: type[Any]) -> tuple[str, ...]:
        """Return the ids of the rules that such subjects answer."""
        return tuple(
            rule.id
            for rule in self.rules
            if not rule.is_question and not set(scopes).isdisjoint(rule.scopes)
        )

    def is_ours(self, path: Path) -> bool:
        """Whether a file is the target's, so that its author can repair it."""
        return path in self.files or path in (self.target.pyproject, self.target.base)


@dataclass(frozen=True)
class Undeclared:
    """A distribution that declares no backend."""

    run: Run


@dataclass(frozen=True)
class ClassSubject:
    """A class.

    Attributes:
        run: The check.
        ref: The class.
        hooks: What it may implement.
        whole: It is what the contract asks for, not a part of it such as a mixin.
    """

    run: Run
    ref: ClassRef
    hooks: Mapping[str, Hook]
    whole: bool

    @property
    def where(self) -> Where:
        """The place of the class."""
        return Where.of(self.ref.place.source.path, self.ref.node)

    @property
    def unseen(self) -> list[str]:
        """Bases that cannot be seen."""
        return self.run.project.mro(self.ref)[1]

    @cached_property
    def variants(self) -> list[tuple[Sequence[ClassRef], dict[str, list[Method]]]]:
        """Its order and its attributes, for every choice of conditional bases."""
        return [(order, self.run.members.of(order)) for order in self.run.project.mro(self.ref)[0]]

    @property
    def has_hooks(self) -> bool:
        """Whether it is asked for hooks, or a method of it carries this project's marker."""
        return self.whole or any(_marks_hooks(methods) for _, methods in self.variants)

    @cached_property
    def with_hooks(self) -> list[tuple[Sequence[ClassRef], dict[str, list[Method]]]]:
        """The variants that have hooks: without any, a class is some helper, and not checked."""
        return [one for one in self.variants if self.whole or _marks_hooks(one[1])]

    @property
    def implemented(self) -> Iterator[tuple[str, list[Method]]]:
        """The names that its marked methods implement, each with these methods."""
        for _, methods in self.with_hooks:
            yield from implemented(methods).items()

    def implementations(self) -> Iterator[Implementation]:
        """Yield its implementations of hooks, as far as they can be followed."""
        seen: set[tuple[str, int]] = set()
        for hook, variants in self.implemented:
            for method in variants if hook in self.hooks else ():
                observes = method.options.get("wrapper") or method.options.get("hookwrapper")
                if method.unknown or observes or (hook, id(method)) in seen:
                    continue
                seen.add((hook, id(method)))
                yield Implementation(self.hooks[hook], method)


@dataclass(frozen=True)
class Implementation:
    """One implementation of one hook.

    Attributes:
        hook: The hook.
        method: What implements it.
    """

    hook: Hook
    method: Method

    @property
    def is_plain(self) -> bool:
        """Whether it is a plain function, as far as its definition goes."""
        return self.method.kind == "method" and self.method.function is not None

    @property
    def is_hidden(self) -> bool:
        """Whether a decorator's function, with other parameters, stands in its place."""
        if not self.is_plain or not self.method.hidden_by:
            return False
        return sorted(self._named) != sorted(self.hook.parameters)

    @property
    def function(self) -> Function | None:
        """The function that is called, if its parameters are the implementation's own."""
        return self.method.function if self.is_plain and not self.is_hidden else None

    @property
    def where(self) -> Where:
        """The place of what runs."""
        method = self.method
        return where_of(method) if self.is_plain else where_of_statement(method)

    @property
    def arguments(self) -> ast.arguments:
        """The parameters; none where the function cannot be followed."""
        return (
            ast.arguments([], [], None, [], [], None, [])
            if self.function is None
            else (self.function.args)
        )

    @property
    def names(self) -> list[str]:
        """Its parameters by name, self left out."""
        return self._named if self.function is not None else []

    @property
    def _named(self) -> list[str]:
        assert self.method.function is not None
        arguments = self.method.function.args
        every = [one.arg for one in [*arguments.posonlyargs, *arguments.args]][1:]
        return every + [one.arg for one in arguments.kwonlyargs]

    @property
    def first(self) -> str | None:
        """The name of its first parameter, which receives the object."""
        positional = [*self.arguments.posonlyargs, *self.arguments.args]
        return positional[0].arg if positional else None

    @property
    def parameters(self) -> list[ast.arg]:
        """What the hook's arguments are passed to: without self, and without variadic ones."""
        arguments = self.arguments
        positional = [*arguments.posonlyargs, *arguments.args]
        own = positional[1:] if self.first not in self.hook.parameters else positional
        return [*own, *arguments.kwonlyargs]

    @property
    def variadic(self) -> list[str]:
        """``*args`` and ``**kwargs``, with their stars."""
        pairs = (("*", self.arguments.vararg), ("**", self.arguments.kwarg))
        return [f"{stars}{one.arg}" for stars, one in pairs if one is not None]

    @property
    def missing(self) -> list[str]:
        """Parameters of the hook that it does not name."""
        if self.function is None:
            return []
        given = {argument.arg for argument in parameters_of(self.arguments)}
        return [name for name in self.hook.parameters if name not in given]

    @property
    def defaulted(self) -> set[str]:
        """Parameters that have a default."""
        arguments = self.arguments
        positional = [*arguments.posonlyargs, *arguments.args]
        count = len(arguments.defaults)
        names = {one.arg for one in positional[len(positional) - count :]} if count else set()
        pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        return names | {one.arg for one, default in pairs if default is not None}


@dataclass(frozen=True)
class Recording:
    """The code of one backend that a graph records."""

    run: Run
    ref: ClassRef
    core: Path

    @property
    def where(self) -> Where:
        """The place of the class."""
        return Where.of(self.ref.place.source.path, self.ref.node)

    @cached_property
    def breaches(self) -> list[tuple[Hook, Breach]]:
        """What would not record, with the in-graph hook that reaches it."""
        found = []
        for order in self.run.project.mro(self.ref)[0]:
            backend = self.run.shapes.of(order)
            for method in (one for each in backend.methods.values() for one in each):
                if method.marked and method.hook in IN_GRAPH:
                    hook = STEP[method.hook]
                    scan = Evaluator(self.run.shapes, hook, backend, self._is_recorded_here)
                    found += [(hook, breach) for breach in scan.scan(method)]
        return found

    def _is_recorded_here(self, path: Path) -> bool:
        return path in self.run.files and not path.resolve().is_relative_to(self.core)


@dataclass(frozen=True)
class Module:
    """One file of the target, after its classes were checked."""

    run: Run
    source: Source

    @property
    def unhooked(self) -> set[ast.AST]:
        """What was checked and has no hooks."""
        return self.run.checked - self.run.hooked


@dataclass(frozen=True)
class Unread:
    """A file that was not read."""

    run: Run
    path: Path
    problem: SourceError


def implemented(methods: Mapping[str, list[Method]]) -> dict[str, list[Method]]:
    """Return the marked methods of a class by the hook that each implements."""
    found: dict[str, list[Method]] = {}
    for variants in methods.values():
        for method in variants:
            if method.marked:
                found.setdefault(method.hook, []).append(method)
    return found


def where_of(method: Method) -> Where:
    """Return the place of what a method runs, or of its definition where that is not seen."""
    if method.function is not None and method.place is not None:
        return Where.of(method.place.source.path, method.function)
    return where_of_statement(method)


def where_of_statement(method: Method) -> Where:
    """Return the place of a method's definition."""
    return Where.of(method.owner.place.source.path, method.statement)


def _marks_hooks(methods: Mapping[str, list[Method]]) -> bool:
    return any(one.marked for variants in methods.values() for one in variants)
