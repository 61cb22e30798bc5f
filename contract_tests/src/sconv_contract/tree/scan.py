"""``sconv verify --tree DIR --hook NAME``: every definition of a hook against every call of it.

The files are searched as bytes first, and only those that hold the name are parsed, so that a whole
engine takes seconds. Nothing is left out: neither folders named after hardware, nor folders without
``__init__.py``, nor files that do not parse.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..findings import Finding, Report, Where
from ..rules import RULES
from ..source.files import SourceError, parse, walk
from ..source.hook_specs import STEP
from ..source.methods import Function, is_setter
from ..source.parameter_use import is_read, is_read_by_key, is_stub
from ..source.scopes import blocks, live
from ..target import TargetError
from .call_mismatch import forwarded_to, kind_problem, reasons
from .calls import Call, calls_in, mentions

__all__ = ["scan_tree"]

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


def scan_tree(root: Path, hook: str) -> Report:
    """Compare all definitions of a method with all calls of it in a source tree.

    Raises:
        TargetError: There is no such folder, or no class in it defines the hook.
    """
    if not os.path.isdir(root):
        raise TargetError(f"{root} is no folder")
    definitions: list[_Definition] = []
    calls: list[Call] = []
    findings: list[Finding] = []
    files = 0
    for path in walk(root):
        files += 1
        try:
            raw = path.read_bytes()
        except OSError as exc:
            findings.append(RULES["SCV210"].found(Where(path), f"cannot be read: {exc}"))
            continue
        if hook.encode() not in raw:
            continue
        try:
            tree = parse(raw)
        except SourceError as exc:
            findings.append(RULES["SCV210"].found(Where(path, exc.line), f"{path.name} {exc}"))
            continue
        module: dict[str, Function] = {
            node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)
        }
        definitions += _definitions(tree.body, path, hook, "", module)
        calls += calls_in(tree, raw, path, hook)
        findings += _afterwards(tree, raw, path, hook)
    if not definitions and not findings:
        raise TargetError(f"none of the {files} files of {root} defines a method {hook!r}")
    for definition in definitions:
        findings += _check(definition, hook, calls)
    classes = {(one.path, one.owner) for one in definitions}
    return Report(
        target=str(root),
        rules=_RULES,
        findings=sorted(dict.fromkeys(findings)),
        subjects=[
            f"{len(definitions)} definitions of {hook} in {len(classes)} classes",
            f"{len(calls)} calls of it, in {files} files",
        ],
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


def _check(definition: _Definition, hook: str, calls: Sequence[Call]) -> Iterator[Finding]:
    where, owner, function = definition.where, definition.owner, definition.function
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
            yield from _refusals(definition, target, hook, calls, f" (through {inner})")
    yield from _refusals(definition, function, hook, calls, "")
    if hook in STEP and not is_stub(function):
        yield from _dropped(definition, function, hook)


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


def _refusals(
    definition: _Definition, function: Function, hook: str, calls: Sequence[Call], through: str
) -> Iterator[Finding]:
    """Report what a definition refuses, once each, with the calls that it refuses."""
    # Thousands of calls have a few shapes, and an engine may have as many definitions.
    shapes: dict[tuple[int, frozenset[str], bool], list[Call]] = {}
    for call in calls:
        shapes.setdefault((call.positional, call.keywords, call.open), []).append(call)
    told: dict[tuple[str, str, str], list[Call]] = {}
    for alike in shapes.values():
        for reason in reasons(function, alike[0]):
            told.setdefault(reason, []).extend(alike)
    for (rule, text, fix), refused in told.items():
        shown = ", ".join(str(call) for call in refused[:3])
        more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
        yield RULES[rule].found(
            definition.where,
            f"{definition.owner}.{hook}{through} {text}: the call at {shown}{more}",
            fix=fix,
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
