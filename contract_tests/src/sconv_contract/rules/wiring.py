"""SCV2xx, the class: whether each hook is there, once, and carries this project's marker."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from sconv.messages import did_you_mean

from ..contract import Hook
from ..findings import Finding
from ..members import members
from ..methods import Method, own_nodes
from ..resolve import ClassRef, Project
from . import ingraph, signature
from .rule import Rule, Where

__all__ = ["OPEN", "RULES", "UNVERIFIABLE", "check_class", "marks_hooks"]

UNKNOWN_HOOK: Final = Rule(
    "SCV201",
    "unknown hook",
    "Every marked method is named like a hook, or says which by specname.",
    "pluggy registers a misspelt hook and never calls it.",
    "@hookimpl\ndef update_mamba_state_after_mtp_verfy(self, ...): ...",
    "Rename the method to the hook's name.",
)
MARKER: Final = Rule(
    "SCV202",
    "marker missing",
    "Every implementation carries @sconv.hookimpl, overrides included.",
    "An unmarked method is invisible: a subclass that overrides a marked method without the marker"
    " removes the hook.",
    "class Npu(Base):\n    def short_conv(self, ...): ...  # Base.short_conv was marked",
    "Mark it with @sconv.hookimpl.",
)
UNVERIFIABLE: Final = Rule(
    "SCV206",
    "unverifiable",
    "Everything that decides whether the contract is kept can be read from the source.",
    "A base class, a decorator or a name that cannot be followed may break any rule; what cannot be"
    " seen is not counted as kept.",
    'setattr(Npu, "warmup", build())',
    "Define it with def in a class that can be seen, or install the package that it comes from.",
)
ABSENT: Final = Rule(
    "SCV207",
    "hook or attribute absent",
    "A backend implements every required hook and has pool and a writable forward_metadata.",
    "The engine calls every one of them; a missing commit leaves the state of rejected tokens.",
    "class Npu: ...  # no update_mamba_state_after_mtp_verify",
    "Implement the hook, or inherit it from sconv.plugin.TorchBackend.",
)
TWICE: Final = Rule(
    "SCV208",
    "hook implemented twice",
    "One class implements a hook once.",
    "Of two implementations one is called, depending on the order of registration.",
    '@hookimpl(specname="warmup")\ndef compile(self): ...  # beside warmup itself',
    "Keep one of them.",
)
OPTIONS: Final = Rule(
    "SCV209",
    "marker option",
    "The marker of an implementation has no wrapper, hookwrapper or optionalhook.",
    "wrapper is for observers; optionalhook hides a misspelt name from every check.",
    "@hookimpl(optionalhook=True)\ndef warm_up(self): ...",
    "Remove the option.",
)

RULES: Final = (UNKNOWN_HOOK, MARKER, UNVERIFIABLE, ABSENT, TWICE, OPTIONS)

#: What stays unanswered about a class that cannot be followed, recorded code included.
OPEN: Final = (
    *signature.OPEN,
    *("SCV201", "SCV202", "SCV207", "SCV208", "SCV209"),
    *(rule.id for rule in ingraph.RULES),
)

_ATTRIBUTES: Final = ("forward_metadata", "pool")


def marks_hooks(methods: Mapping[str, list[Method]]) -> bool:
    """Whether a class has a method with this project's marker."""
    return any(one.marked for variants in methods.values() for one in variants)


def check_class(
    project: Project, ref: ClassRef, hooks: Mapping[str, Hook], *, whole: bool, attributes: bool
) -> Iterator[Finding]:
    """Check one class in every shape that its conditional bases give it.

    Args:
        project: Where it was found.
        ref: The class.
        hooks: What it may implement.
        whole: It is what the contract asks for, not a part of it such as a mixin.
        attributes: It also needs the attributes of a backend.
    """
    orders, unseen = project.mro(ref)
    where = Where.of(ref.place.source.path, ref.node)
    seen: set[Finding] = set()
    for mro in orders:
        for found in _one_shape(project, ref, mro, hooks, where, unseen, whole, attributes):
            if found not in seen:
                seen.add(found)
                yield found
    # A class with no hook in sight is some helper: what its bases are is not our question.
    concerns = whole or any(marks_hooks(members(project, mro)) for mro in orders)
    for base in unseen if concerns else ():
        yield UNVERIFIABLE.found(
            where,
            f"class {ref.node.name}: its base {base} cannot be seen, so hooks that it may bring or"
            " change are not checked",
            fix=f"Install the distribution of {base} beside this one, or add its folder with"
            " --search-path.",
            leaves_open=OPEN,
        )


def _one_shape(
    project: Project,
    ref: ClassRef,
    mro: Sequence[ClassRef],
    hooks: Mapping[str, Hook],
    where: Where,
    unseen: Sequence[str],
    whole: bool,
    attributes: bool,
) -> Iterator[Finding]:
    methods = members(project, mro)
    if not whole and not marks_hooks(methods):
        return
    implemented: dict[str, list[Method]] = {}
    for variants in methods.values():
        for method in variants:
            if method.marked:
                implemented.setdefault(method.hook, []).append(method)
    for called, variants in implemented.items():
        if called in hooks:
            yield from _implementations(hooks[called], variants)
        else:
            yield _unknown_hook(variants[0], called, hooks)
    for name, hook in hooks.items():
        unmarked = [method for method in methods.get(name, ()) if not method.marked]
        for method in unmarked:
            yield from _unmarked(method, hook, methods, mro, project)
        if name not in implemented and not unmarked and hook.required and whole and not unseen:
            near = did_you_mean(name, [*methods, *implemented])
            yield ABSENT.found(
                where,
                f"class {ref.node.name} does not implement {name}{near}; it is called with:"
                f" {hook.call}",
                hook=name,
            )
    if attributes and whole and not unseen:
        yield from _attributes(mro, methods, where)


def _implementations(hook: Hook, variants: Sequence[Method]) -> Iterator[Finding]:
    names = dict.fromkeys(method.name for method in variants)
    if len(names) > 1:
        yield TWICE.found(
            _where(variants[-1]),
            f"{hook.name} is implemented by {' and '.join(names)}",
            hook=hook.name,
        )
    for method in variants:
        for option in ("wrapper", "hookwrapper", "optionalhook"):
            if method.options.get(option):
                yield OPTIONS.found(
                    _where(method), f"{hook.name} is marked with {option}", hook=hook.name
                )
        if method.unknown:
            yield _open(method, hook)
        elif not (method.options.get("wrapper") or method.options.get("hookwrapper")):
            yield from signature.check(method, hook)


def _unmarked(
    method: Method,
    hook: Hook,
    methods: Mapping[str, list[Method]],
    mro: Sequence[ClassRef],
    project: Project,
) -> Iterator[Finding]:
    if method.unknown:
        yield _open(method, hook)
        return
    elsewhere = any(
        one.marked and one.hook == hook.name and name != hook.name
        for name, each in methods.items()
        for one in each
    )
    if elsewhere:
        return  # another attribute implements the hook, by specname
    if method.project is not None:
        what = f"is marked for the pluggy project {method.project!r}"
    elif method.lost:
        what = "lost its marker to a decorator without functools.wraps above it"
    else:
        marked_in = [
            base.node.name
            for base in mro
            if base.node is not method.owner.node
            and any(one.marked for one in members(project, [base]).get(hook.name, ()))
        ]
        what = (
            f"overrides {marked_in[0]}.{hook.name} and lost its marker"
            if marked_in
            else "is not marked, so nothing would call it"
        )
    yield MARKER.found(_where(method), f"{hook.name} {what}", hook=hook.name)


def _unknown_hook(method: Method, hook: str, hooks: Mapping[str, Hook]) -> Finding:
    return UNKNOWN_HOOK.found(
        _where(method),
        f"{method.name}() implements a hook {hook!r} that does not exist"
        f"{did_you_mean(hook, hooks)}",
        hook=hook,
    )


def _open(method: Method, hook: Hook) -> Finding:
    return UNVERIFIABLE.found(
        _where(method), f"{hook.name}: {method.unknown}", hook=hook.name, leaves_open=OPEN
    )


def _attributes(
    mro: Sequence[ClassRef], methods: Mapping[str, list[Method]], where: Where
) -> Iterator[Finding]:
    assigned = {name for ref in mro for name in _assigned(ref.node)}
    for name in _ATTRIBUTES:
        variants = methods.get(name, [])
        if not variants and name not in assigned:
            yield ABSENT.found(
                where,
                f"class {mro[0].node.name} has no attribute {name!r}",
                fix="Set it in __init__.",
            )
        for method in variants:
            settable = name == "pool" or method.kind != "property" or _has_setter(mro, name)
            if not settable:
                yield ABSENT.found(
                    _where(method),
                    f"{name!r} is a property without a setter, and a hybrid sets it",
                    fix="Give it a setter.",
                )


def _assigned(node: ast.ClassDef) -> Iterator[str]:
    """Attributes that methods set on self, and annotations and slots of the class body."""
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            yield statement.targets[0].id
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = next((argument.arg for argument in statement.args.args), None)
        for inner in own_nodes(statement):
            if (
                isinstance(inner, ast.Attribute)
                and isinstance(inner.ctx, ast.Store)
                and isinstance(inner.value, ast.Name)
                and inner.value.id == first
            ):
                yield inner.attr


def _has_setter(mro: Sequence[ClassRef], name: str) -> bool:
    return any(
        isinstance(decorator, ast.Attribute) and decorator.attr == "setter"
        for ref in mro
        for node in ref.node.body
        if isinstance(node, ast.FunctionDef) and node.name == name
        for decorator in node.decorator_list
    )


def _where(method: Method) -> Where:
    if method.function is not None and method.place is not None:
        return Where.of(method.place.source.path, method.function)
    return Where.of(method.owner.place.source.path, method.statement)
