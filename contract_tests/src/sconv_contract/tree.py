"""``sconv verify --tree DIR --hook NAME``: every definition of a hook against every call of it.

The files are searched as bytes first, and only those that hold the name are parsed, so that a whole
engine takes seconds. Nothing is left out: neither folders named after hardware, nor folders without
``__init__.py``, nor files that do not parse.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .contract import STEP
from .findings import Finding, Report
from .methods import Function, own_nodes
from .reads import is_read
from .rules import RULES
from .rules.rule import Where
from .scopes import blocks, live
from .source import SourceError, parse, walk
from .target import TargetError
from .tree_calls import Call, calls_in, mentions

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
    if not root.is_dir():
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
    problem = _kind(function)
    if problem is not None:
        rule, text = problem
        yield RULES[rule].found(where, f"{owner}.{hook} {text}", hook=hook)
        return
    inner = _forwarded(function, hook)
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
    for name in STEP[hook].must_use if hook in STEP else ():
        named = {one.arg for one in [*function.args.args, *function.args.kwonlyargs]}
        if name in named and not is_read(function, name):
            yield RULES["SCV106"].found(
                where, f"{owner}.{hook} accepts {name!r} and never reads it", hook=hook
            )


def _kind(function: Function) -> tuple[str, str] | None:
    if isinstance(function, ast.AsyncFunctionDef):
        return "SCV107", "is async, and a plain call runs none of it"
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in own_nodes(function)):
        return "SCV107", "has a yield, so that a call runs none of it"
    names = _decorators(function)
    if names & {"property", "cached_property"}:
        return "SCV108", "is a property, so that the call calls what it returns"
    arguments = function.args
    takes_one = arguments.args or arguments.posonlyargs or arguments.vararg
    if not takes_one and "staticmethod" not in names:
        return "SCV108", "has no self"
    return None


def _decorators(function: Function) -> set[str]:
    every = getattr(function, "decorator_list", [])
    return {decorator.id for decorator in every if isinstance(decorator, ast.Name)}


def _refusals(
    definition: _Definition, function: Function, hook: str, calls: Sequence[Call], through: str
) -> Iterator[Finding]:
    """Report what a definition refuses, once each, with the calls that it refuses."""
    # Thousands of calls have a few shapes, and an engine may have as many definitions.
    shapes: dict[tuple[int, frozenset[str], bool], list[Call]] = {}
    for call in calls:
        shapes.setdefault((call.positional, call.keywords, call.open), []).append(call)
    reasons: dict[tuple[str, str, str], list[Call]] = {}
    for alike in shapes.values():
        for reason in _reasons(function, alike[0]):
            reasons.setdefault(reason, []).extend(alike)
    for (rule, text, fix), refused in reasons.items():
        shown = ", ".join(str(call) for call in refused[:3])
        more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
        yield RULES[rule].found(
            definition.where,
            f"{definition.owner}.{hook}{through} {text}: the call at {shown}{more}",
            fix=fix,
            hook=hook,
        )


def _reasons(function: Function, call: Call) -> Iterator[tuple[str, str, str]]:
    """Say why a definition would not accept a call: rule, text, fix."""
    arguments = function.args
    static = "staticmethod" in _decorators(function)
    names = [one.arg for one in [*arguments.posonlyargs, *arguments.args]]
    positional = names if static else names[1:]
    by_position = positional[: call.positional]
    if not static and names and names[0] in call.keywords:
        yield "SCV108", f"has no self: {names[0]!r} receives the object", "Add self."
        return
    only_position = {one.arg for one in arguments.posonlyargs}
    keyword_only = [one.arg for one in arguments.kwonlyargs]
    accepted = {*positional, *keyword_only} - only_position
    if call.positional > len(positional) and arguments.vararg is None:
        yield (
            "SCV101",
            f"takes {len(positional)} arguments by position, not {call.positional}",
            "Add the parameters that it lacks.",
        )
    for name in sorted(call.keywords):
        if name in only_position:
            yield "SCV104", f"has {name!r} positional-only", "Remove the /."
        elif name not in accepted and arguments.kwarg is None:
            yield "SCV101", f"lacks the parameter {name!r}", "Add the parameter."
        elif name in by_position:
            yield "SCV101", f"gets {name!r} by position and by name", "Order the parameters alike."
    count = len(arguments.defaults)
    required = positional[: len(positional) - count] if count else positional
    required = [name for name in required if name not in by_position]
    required += [
        one.arg
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    for name in required:
        if name not in call.keywords and not call.open:
            yield (
                "SCV102",
                f"needs {name!r}, which is not passed",
                "Remove the parameter, or let every call pass it.",
            )


def _forwarded(function: Function, hook: str) -> str | None:
    """Return the function that gets this one's ``**kwargs``; None if it is the hook elsewhere."""
    if function.args.kwarg is None:
        return None
    name = function.args.kwarg.arg
    for node in own_nodes(function):
        if not isinstance(node, ast.Call):
            continue
        for keyword in node.keywords:
            if keyword.arg is None and isinstance(keyword.value, ast.Name):
                if keyword.value.id != name:
                    continue
                target = node.func
                inner = target.attr if isinstance(target, ast.Attribute) else None
                inner = target.id if isinstance(target, ast.Name) else inner
                # Another object's hook is among the definitions that are checked.
                return None if inner == hook else inner or ast.unparse(target)
    return None


def _afterwards(tree: ast.Module, raw: bytes, path: Path, hook: str) -> Iterator[Finding]:
    for node, _ in mentions(tree, raw, hook):
        match node:
            case ast.Call(func=ast.Name(id="setattr"), args=[_, ast.Constant(value=name), *_]):
                found = name == hook
            case ast.Assign(targets=[ast.Attribute(attr=name)]):
                found = name == hook
            case _:
                continue
        if found:
            yield RULES["SCV206"].found(
                Where.of(path, node),
                f"{hook} is set on something after its class was made",
                hook=hook,
                leaves_open=("SCV101",),
            )
