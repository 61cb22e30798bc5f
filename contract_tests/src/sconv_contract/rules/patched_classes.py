"""SCV206: classes that cannot be followed, and what changes one while or after it is made."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from ..findings import Finding, Where
from ..source.decorators import is_marker, returned
from ..source.files import Mentions
from ..source.hook_specs import DISCOVERY, STEP
from ..source.methods import is_setter, own_nodes
from ..source.modules import is_opaque
from ..source.resolve import ClassRef, Found, Place, Project, Source
from .subjects import ClassSubject, Implementation, Module, Unread, where_of
from .unverifiable import CLASS, Unverifiable, question

__all__ = ["RULES"]

_HOOKS: Final = STEP.keys() | DISCOVERY.keys()

#: What stands on a line that sets or deletes one: a hook's name, or the function that does it.
_SETTING: Final = (*_HOOKS, "setattr", "delattr")

#: Packages whose class decorators leave methods as they are.
_PLAIN: Final = frozenset({"attr", "attrs", "typing_extensions"})

_SCOPES: Final = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LEAVES: Final = (ast.expr_context, ast.operator, ast.cmpop, ast.Constant, ast.Name)

_MAX_DEPTH: Final = 4


class OpenClasses(Unverifiable):
    """What leaves questions about a class open, and marked functions of no class that is seen."""

    scope = ClassSubject | Module | Unread

    def check(self, subject: ClassSubject | Module | Unread) -> Iterator[Finding]:
        """Yield the questions of a class, of a module, or of a file that is too large."""
        match subject:
            case ClassSubject():
                yield from _methods_not_followed(subject)
                if subject.has_hooks:
                    yield from _bases_not_seen(subject)
                    yield from _orders_not_followed(subject)
                    yield from _made_otherwise(subject)
            case Module():
                yield from _stray_marks(subject)
                yield from _changed_afterwards(subject)
            case Unread(run=run, path=path, problem=problem) if problem.is_too_large:
                scopes = [scope for rule in run.rules for scope in rule.scopes]
                text, fix = f"{path.name} {problem}", "Split it, or leave generated data out of it."
                yield question(run, Where(path), text, *scopes, fix=fix)


RULES: Final = (OpenClasses(),)


def _methods_not_followed(subject: ClassSubject) -> Iterator[Finding]:
    for _, methods in subject.with_hooks:
        for variants in methods.values():
            for method in variants:
                hook = method.hook if method.marked else method.name
                if method.unknown and hook in subject.hooks:
                    text = f"{hook}: {method.unknown}"
                    yield question(subject.run, where_of(method), text, *CLASS, hook=hook)


def _bases_not_seen(subject: ClassSubject) -> Iterator[Finding]:
    for base in subject.unseen:
        yield question(
            subject.run,
            subject.where,
            f"class {subject.ref.node.name}: its base {base} cannot be seen, so hooks that it may"
            " bring or change are not checked",
            *CLASS,
            fix=f"Install the distribution of {base} beside this one, or add its folder with"
            " --search-path.",
        )


def _orders_not_followed(subject: ClassSubject) -> Iterator[Finding]:
    if subject.run.project.cut(subject.ref):
        yield question(
            subject.run,
            subject.where,
            f"class {subject.ref.node.name}: its conditional bases have too many combinations, of"
            " which one alone is checked",
            *CLASS,
            fix="Decide in one place which classes it builds on.",
        )


def _made_otherwise(subject: ClassSubject) -> Iterator[Finding]:
    """Report decorators, metaclasses and ``__init_subclass__`` that may change a class's hooks."""
    project = subject.run.project
    bases = {base.node: base for order, _ in subject.variants for base in order}
    for base in bases.values():
        if is_opaque(base.path):
            continue
        where = Where.of(base.place.source.path, base.node)
        for decorator in base.node.decorator_list:
            target = decorator.func if isinstance(decorator, ast.Call) else decorator
            called = isinstance(decorator, ast.Call)
            for found in project.evaluate(target, base.place.at(base.node)):
                if not _keeps_hooks(project, found, called=called):
                    yield _changes(subject, where, f"the class decorator @{ast.unparse(target)}")
        for keyword in base.node.keywords:
            if keyword.arg == "metaclass":
                for found in project.evaluate(keyword.value, base.place.at(base.node)):
                    if not _is_plain_metaclass(project, found):
                        shown = ast.unparse(keyword.value)
                        yield _changes(subject, where, f"the metaclass {shown}")
        known = project.scope(base.node).get("__init_subclass__")
        for statement in known.definitions if known is not None else ():
            if not isinstance(statement, ast.FunctionDef) or _changes_argument(
                project, statement, base.inside, 0
            ):
                yield _changes(subject, where, f"{base.node.name}.__init_subclass__")


def _changes(subject: ClassSubject, where: Where, what: str) -> Finding:
    return question(
        subject.run,
        where,
        f"class {subject.ref.node.name}: {what} may change its hooks",
        *CLASS,
        fix="Write the hooks with def in the class, and let what makes it leave them alone.",
    )


def _changed_afterwards(subject: Module) -> Iterator[Finding]:
    """Report attributes that are set or deleted from outside of a class's body."""
    run, source = subject.run, subject.source
    for node, place in _nodes(source, Mentions(source.raw, _SETTING)):
        name: object = None
        target: ast.expr | None = None
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            name, target = node.attr, node.value
        elif isinstance(node, ast.Call) and _sets(node):
            target, given = node.args[0], node.args[1]
            name = given.value if isinstance(given, ast.Constant) else "?"
        if target is None or (name not in _HOOKS and name != "?"):
            continue
        classes = _classes_of(run.project, target, place)
        # Any name may be a hook's, and a hook's name may be any object's: one of both must show.
        if (name == "?" and classes & run.hooked) or (
            name != "?" and not (classes and classes <= subject.unhooked)
        ):
            shown = name if name != "?" else f"an attribute of {ast.unparse(target)}"
            yield question(
                run,
                Where.of(source.path, node),
                f"{shown} is set or deleted after its class was made",
                *CLASS,
                hook=str(name) if name in _HOOKS else "",
            )


def _stray_marks(subject: Module) -> Iterator[Finding]:
    """Report marked functions that belong to no class that was checked."""
    run, source = subject.run, subject.source
    for node, place in source.statements:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node in run.checked:
            continue
        inside_class = bool(place.chain) and isinstance(place.chain[-1], ast.ClassDef)
        if inside_class and place.chain[-1] in run.checked:
            continue
        if any(is_marker(run.project, one, place) for one in node.decorator_list):
            what = "a class that is not followed" if inside_class else "no class"
            yield question(
                run,
                Where.of(source.path, node),
                f"{node.name} is marked as a hook and belongs to {what}",
                Implementation,
                hook=node.name,
            )


def _keeps_hooks(project: Project, decorator: Found, *, called: bool) -> bool:
    """Whether a class decorator certainly returns its class with the hooks that it had."""
    if is_opaque(decorator.path) or decorator.path.partition(".")[0] in _PLAIN:
        return True
    function, place = decorator.node, decorator.place
    if not isinstance(function, ast.FunctionDef) or place is None:
        return False
    inside = place.inside(function)
    if called:
        inner = returned(project, function, inside)
        if not isinstance(inner, ast.FunctionDef):
            return False
        function, place, inside = inner, inside, inside.inside(inner)
    is_same = returned(project, function, inside) == "parameter"
    return is_same and not _changes_argument(project, function, place, 0)


def _changes_argument(
    project: Project, function: ast.FunctionDef, place: Place, depth: int
) -> bool:
    """Whether a function may set attributes of its first argument, by names that do not show."""
    if not function.args.args:
        return True
    name, inside = function.args.args[0].arg, place.inside(function)
    for node in own_nodes(function):
        if not isinstance(node, ast.Call):
            continue
        if _sets(node) and _is_name(node.args[0], name):
            given = node.args[1]
            if not isinstance(given, ast.Constant) or given.value in _HOOKS:
                return True
        elif node.args and _is_name(node.args[0], name):
            for found in project.evaluate(node.func, inside):
                if (
                    isinstance(found.node, ast.FunctionDef)
                    and found.place is not None
                    and (
                        depth > _MAX_DEPTH
                        or _changes_argument(project, found.node, found.place, depth + 1)
                    )
                ):
                    return True
    return False


def _is_plain_metaclass(project: Project, found: Found) -> bool:
    if not isinstance(found.node, ast.ClassDef) or found.place is None:
        return is_opaque(found.path) or found.path.startswith("builtins.")
    makes = ("__new__", "__init__", "__call__", "__prepare__")
    ref = ClassRef(found.path, found.node, found.place)
    orders, unseen = project.mro(ref)
    return not unseen and not any(
        name in project.scope(base.node) for order in orders for base in order for name in makes
    )


def _classes_of(project: Project, target: ast.expr, place: Place) -> set[ast.AST]:
    """Return the classes that an expression may be, or be an object of."""
    if len(place.chain) > 1 and isinstance(target, ast.Name):
        owner, method = place.chain[-2], place.chain[-1]
        given = getattr(getattr(method, "args", None), "args", [])
        if isinstance(owner, ast.ClassDef) and given and given[0].arg == target.id:
            return {owner}
    classes: set[ast.AST] = set()
    for found in project.evaluate(target, place):
        if isinstance(found.node, ast.ClassDef):
            classes.add(found.node)
        elif isinstance(found.node, ast.Call) and found.place is not None:
            made = project.evaluate(found.node.func, found.place)
            classes |= {one.node for one in made if isinstance(one.node, ast.ClassDef)}
    return classes


def _sets(node: ast.Call) -> bool:
    return len(node.args) > 1 and is_setter(node.func)


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _nodes(source: Source, mentions: Mentions) -> Iterator[tuple[ast.AST, Place]]:
    pending: list[tuple[ast.AST, Place]] = [(source.tree, Place(source))]
    while pending:
        above, outer = pending.pop()
        scoped = isinstance(above, _SCOPES)
        inner = outer.inside(above) if scoped else outer
        for node in ast.iter_child_nodes(above):
            if isinstance(node, _LEAVES) or (isinstance(node, ast.AnnAssign) and not node.value):
                continue  # an annotation alone sets nothing
            if not mentions.in_span(node):
                continue
            yield node, inner
            pending.append((node, inner))
