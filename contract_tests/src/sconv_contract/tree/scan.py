"""``sconv verify --tree DIR --hook NAME``: every definition of a hook against every call of it.

The files are searched as bytes first, and only those that hold the name are parsed, so that a whole
engine takes seconds. Nothing is left out: neither folders named after hardware, nor folders without
``__init__.py``, nor files that do not parse.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ..findings import Finding, Report, Where
from ..rules import RULES
from ..source.files import SourceError, parse, read, walk
from ..source.hook_specs import STEP
from ..source.methods import Function, is_setter
from ..source.parameter_use import is_read, is_read_by_key, is_stub
from ..source.scopes import blocks, live
from ..target import TargetError
from .call_mismatch import forwarded_to, kind_problem, reasons
from .calls import Call, calls_in, mentions

__all__ = ["scan_tree"]

#: Calls that a finding shows, and findings of one definition.
_SHOWN: Final = 3
_MAX_REASONS: Final = 20

_RULES = ("SCV101", "SCV102", "SCV104", "SCV106", "SCV107", "SCV108", "SCV206", "SCV210")


@dataclass(frozen=True, slots=True)
class _Definition:
    """One thing that the hook is in some class."""

    path: Path
    node: ast.AST
    owner: str
    function: Function | None
    siblings: dict[str, Function]

    @property
    def where(self) -> Where:
        return Where.of(self.path, self.node)


@dataclass(frozen=True, slots=True)
class _Parameters:
    """What a definition accepts. Its body is gone: a tree has thousands of them."""

    where: Where
    name: str
    function: Function

    @classmethod
    def of(cls, definition: _Definition, name: str, function: Function) -> _Parameters:
        bare: Function = ast.Lambda(function.args, ast.Constant(None))
        if isinstance(function, ast.FunctionDef):
            bare = ast.FunctionDef(function.name, function.args, [], function.decorator_list)
        return cls(definition.where, name, bare)


@dataclass(slots=True)
class _Alike:
    """Calls that pass the same: the first few, and how many there are."""

    first: list[Call] = field(default_factory=list)
    count: int = 0


def scan_tree(root: Path, hook: str) -> Report:
    """Compare all definitions of a method with all calls of it in a source tree.

    Raises:
        TargetError: There is no such folder, or no class in it defines the hook.
    """
    if not root.is_dir():
        raise TargetError(f"{root} is no folder")
    scan = _Scan(hook)
    files = 0
    for path in walk(root):
        files += 1
        scan.file(path)
    if not scan.classes and not scan.findings:
        raise TargetError(f"none of the {files} files of {root} defines a method {hook!r}")
    for accepted in scan.accepted:
        scan.findings += scan.refusals(accepted)
    calls = sum(alike.count for alike in scan.calls.values())
    return Report(
        target=str(root),
        rules=_RULES,
        findings=sorted(dict.fromkeys(scan.findings)),
        subjects=[
            f"{scan.definitions} definitions of {hook} in {len(scan.classes)} classes",
            f"{calls} calls of it, in {files} files",
        ],
    )


class _Scan:
    """What one walk through a tree finds of one hook."""

    def __init__(self, hook: str) -> None:
        self.hook = hook
        self.findings: list[Finding] = []
        self.definitions = 0
        self.classes: set[tuple[Path, str]] = set()
        self.accepted: list[_Parameters] = []
        self.calls: dict[tuple[int, frozenset[str], bool], _Alike] = {}

    def file(self, path: Path) -> None:
        """Read one file, and forget its syntax tree."""
        try:
            raw = read(path)
            if self.hook.encode() not in raw:
                return
            tree = parse(raw)
        except OSError as exc:
            self.findings.append(RULES["SCV210"].found(Where(path), f"cannot be read: {exc}"))
            return
        except SourceError as exc:
            where, text = Where(path, exc.line), f"{path.name} {exc}"
            rule, leaves_open = ("SCV206", _RULES) if exc.is_too_large else ("SCV210", ())
            self.findings.append(RULES[rule].found(where, text, leaves_open=leaves_open))
            return
        module: dict[str, Function] = {
            node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)
        }
        for definition in _definitions(tree.body, path, self.hook, "", module):
            self.definitions += 1
            self.classes.add((path, definition.owner))
            self.findings += self._definition(definition)
        for call in calls_in(tree, raw, path, self.hook):
            alike = self.calls.setdefault((call.positional, call.keywords, call.open), _Alike())
            alike.count += 1
            if len(alike.first) < _SHOWN:
                alike.first.append(call)
        self.findings += _afterwards(tree, raw, path, self.hook)

    def _definition(self, definition: _Definition) -> Iterator[Finding]:
        """Report what a definition shows by itself, and remember what it accepts."""
        hook, where, owner = self.hook, definition.where, definition.owner
        function = definition.function
        if function is None:
            yield RULES["SCV206"].found(
                where,
                f"{owner}.{hook} is no function that can be followed",
                hook=hook,
                leaves_open=("SCV101",),
            )
            return
        problem = kind_problem(function)
        if problem is not None:
            rule, text = problem
            yield RULES[rule].found(where, f"{owner}.{hook} {text}", hook=hook)
            return
        inner = forwarded_to(function, hook)
        if inner is not None:
            target = definition.siblings.get(inner)
            if target is None:
                yield RULES["SCV206"].found(
                    where,
                    f"{owner}.{hook} hands its **kwargs to {inner}, which cannot be followed",
                    hook=hook,
                    leaves_open=("SCV101",),
                )
            else:
                name = f"{owner}.{hook} (through {inner})"
                self.accepted.append(_Parameters.of(definition, name, target))
        self.accepted.append(_Parameters.of(definition, f"{owner}.{hook}", function))
        if hook in STEP and not is_stub(function):
            yield from _dropped(definition, function, hook)

    def refusals(self, accepted: _Parameters) -> Iterator[Finding]:
        """Report what a definition refuses, once each, with the calls that it refuses."""
        told: dict[tuple[str, str, str], _Alike] = {}
        for alike in self.calls.values():
            for reason in reasons(accepted.function, alike.first[0]):
                refused = told.setdefault(reason, _Alike())
                refused.first += alike.first[: _SHOWN - len(refused.first)]
                refused.count += alike.count
            if len(told) >= _MAX_REASONS:
                break  # where each call passes something else, the first few say it all
        for (rule, text, fix), refused in told.items():
            shown = ", ".join(str(call) for call in refused.first)
            more = f" and {refused.count - _SHOWN} more" if refused.count > _SHOWN else ""
            yield RULES[rule].found(
                accepted.where,
                f"{accepted.name} {text}: the call at {shown}{more}",
                fix=fix,
                hook=self.hook,
            )


def _definitions(
    body: Sequence[ast.stmt], path: Path, hook: str, owner: str, around: dict[str, Function]
) -> Iterator[_Definition]:
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            name = f"{owner}.{statement.name}" if owner else statement.name
            yield from _in_class(statement, path, hook, name, around)
            yield from _definitions(statement.body, path, hook, name, around)
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{owner}.{statement.name}" if owner else statement.name
            yield from _definitions(statement.body, path, hook, inner, around)
        else:
            for block in blocks(statement):
                yield from _definitions(block, path, hook, owner, around)


def _in_class(
    node: ast.ClassDef, path: Path, hook: str, owner: str, around: dict[str, Function]
) -> Iterator[_Definition]:
    scope = live(node.body)
    methods = {
        name: statement
        for name, known in scope.items()
        for statement in known.definitions
        if isinstance(statement, ast.FunctionDef)
    }
    siblings: dict[str, Function] = {**around, **methods}
    for statement in scope[hook].definitions if hook in scope else ():
        function: Function | None = None
        value = getattr(statement, "value", None)
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            function = statement
        elif isinstance(value, ast.Lambda):
            function = value
        elif isinstance(value, ast.Name):
            function = siblings.get(value.id)
        yield _Definition(path, statement, owner, function, siblings)


def _dropped(definition: _Definition, function: Function, hook: str) -> Iterator[Finding]:
    named = {one.arg for one in [*function.args.args, *function.args.kwonlyargs]}
    for name in STEP[hook].must_use:
        is_taken = name in named or function.args.kwarg is not None
        reads = is_read if name in named else is_read_by_key
        if is_taken and not reads(function, name):
            yield RULES["SCV106"].found(
                definition.where,
                f"{definition.owner}.{hook} accepts {name!r} and never reads its value",
                hook=hook,
            )


def _afterwards(tree: ast.Module, raw: bytes, path: Path, hook: str) -> Iterator[Finding]:
    declared: set[ast.AST] = set()
    for node, _ in mentions(tree, raw, hook):
        match node:
            case ast.AnnAssign(target=target, value=None):
                declared.add(target)  # it sets nothing
                continue
            case ast.Call(func=function, args=[_, ast.Constant(value=name), *_]):
                found = name == hook and is_setter(function)
            case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()):
                found = name == hook and node not in declared
            case _:
                continue
        if found:
            yield RULES["SCV206"].found(
                Where.of(path, node),
                f"{hook} is set on something, or deleted, after its class was made",
                hook=hook,
                leaves_open=("SCV101",),
            )
