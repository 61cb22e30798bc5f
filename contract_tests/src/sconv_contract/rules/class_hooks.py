"""SCV2xx, the class: whether each hook is there, once, and carries this project's marker."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from sconv.messages import did_you_mean

from ..findings import Finding, Where
from ..source.hook_specs import Hook
from ..source.methods import Method, own_nodes
from ..source.resolve import ClassRef
from .rule import Rule
from .subjects import ClassSubject, implemented, where_of

__all__ = ["RULES"]

_ATTRIBUTES: Final = ("forward_metadata", "pool")


class UnknownHook(Rule[ClassSubject]):
    """Every marked method is named like a hook, or says which by specname.

    pluggy registers a misspelt hook and never calls it.
    """

    id = "SCV201"
    name = "unknown hook"
    example = "@hookimpl\ndef update_mamba_state_after_mtp_verfy(self, ...): ..."
    fix = "Rename the method to the hook's name."
    scope = ClassSubject

    def check(self, subject: ClassSubject) -> Iterator[Finding]:
        for hook, variants in subject.implemented:
            if hook not in subject.hooks:
                yield self.found(
                    where_of(variants[0]),
                    f"{variants[0].name}() implements a hook {hook!r} that does not exist"
                    f"{did_you_mean(hook, subject.hooks)}",
                    hook=hook,
                )


class MissingMarker(Rule[ClassSubject]):
    """Every implementation carries @sconv.hookimpl, overrides included.

    An unmarked method is invisible: a subclass that overrides a marked method without the marker
    removes the hook.
    """

    id = "SCV202"
    name = "marker missing"
    example = "class Npu(Base):\n    def short_conv(self, ...): ...  # Base.short_conv was marked"
    fix = "Mark it with @sconv.hookimpl."
    scope = ClassSubject

    def check(self, subject: ClassSubject) -> Iterator[Finding]:
        for order, methods in subject.with_hooks:
            for hook in subject.hooks.values():
                for method in methods.get(hook.name, ()):
                    if not (method.marked or method.unknown or _elsewhere(hook, methods)):
                        what = _unmarked(subject, method, hook, order)
                        yield self.found(where_of(method), f"{hook.name} {what}", hook=hook.name)


class AbsentHook(Rule[ClassSubject]):
    """A backend implements every required hook and has pool and a writable forward_metadata.

    The engine calls every one of them; a missing commit leaves the state of rejected tokens.
    """

    id = "SCV207"
    name = "hook or attribute absent"
    example = "class Npu: ...  # no update_mamba_state_after_mtp_verify"
    fix = "Implement the hook, or inherit it from sconv.plugin.TorchBackend."
    scope = ClassSubject
    foreign = True

    def check(self, subject: ClassSubject) -> Iterator[Finding]:
        if not subject.whole or subject.unseen:
            return
        where, name_of_class = subject.where, subject.ref.node.name
        for order, methods in subject.with_hooks:
            known = implemented(methods)
            for name, hook in subject.hooks.items():
                unmarked = any(not method.marked for method in methods.get(name, ()))
                if hook.required and name not in known and not unmarked:
                    yield self.found(
                        where,
                        f"class {name_of_class} does not implement {name}"
                        f"{did_you_mean(name, [*methods, *known])}; it is called with:"
                        f" {hook.call}",
                        hook=name,
                    )
            if "short_conv" in subject.hooks:
                yield from self._attributes(order, methods, where)

    def _attributes(
        self, order: Sequence[ClassRef], methods: Mapping[str, list[Method]], where: Where
    ) -> Iterator[Finding]:
        assigned = {name for ref in order for name in _assigned(ref.node)}
        for name in _ATTRIBUTES:
            variants = methods.get(name, [])
            if not variants and name not in assigned:
                yield self.found(
                    where,
                    f"class {order[0].node.name} has no attribute {name!r}",
                    fix="Set it in __init__.",
                )
            for method in variants:
                is_set = name != "pool" and method.kind == "property"
                if is_set and not _has_setter(order, name):
                    yield self.found(
                        where_of(method),
                        f"{name!r} is a property without a setter, and a hybrid sets it",
                        fix="Give it a setter.",
                    )


class ImplementedTwice(Rule[ClassSubject]):
    """One class implements a hook once.

    Of two implementations one is called, depending on the order of registration.
    """

    id = "SCV208"
    name = "hook implemented twice"
    example = '@hookimpl(specname="warmup")\ndef compile(self): ...  # beside warmup itself'
    fix = "Keep one of them."
    scope = ClassSubject

    def check(self, subject: ClassSubject) -> Iterator[Finding]:
        for hook, variants in subject.implemented:
            names = dict.fromkeys(method.name for method in variants)
            if hook in subject.hooks and len(names) > 1:
                yield self.found(
                    where_of(variants[-1]),
                    f"{hook} is implemented by {' and '.join(names)}",
                    hook=hook,
                )


class MarkerOption(Rule[ClassSubject]):
    """The marker of an implementation has no wrapper, hookwrapper or optionalhook.

    wrapper is for observers; optionalhook hides a misspelt name from every check.
    """

    id = "SCV209"
    name = "marker option"
    example = "@hookimpl(optionalhook=True)\ndef warm_up(self): ..."
    fix = "Remove the option."
    scope = ClassSubject

    def check(self, subject: ClassSubject) -> Iterator[Finding]:
        for hook, variants in subject.implemented:
            for method in variants if hook in subject.hooks else ():
                for option in ("wrapper", "hookwrapper", "optionalhook"):
                    if method.options.get(option):
                        what = f"{hook} is marked with {option}"
                        yield self.found(where_of(method), what, hook=hook)


RULES: Final = (
    UnknownHook(),
    MissingMarker(),
    AbsentHook(),
    ImplementedTwice(),
    MarkerOption(),
)


def _elsewhere(hook: Hook, methods: Mapping[str, list[Method]]) -> bool:
    """Whether another attribute implements a hook, by specname."""
    return any(method.name != hook.name for method in implemented(methods).get(hook.name, ()))


def _unmarked(subject: ClassSubject, method: Method, hook: Hook, order: Sequence[ClassRef]) -> str:
    """Say why a method that is named like a hook is not one."""
    if method.project is not None:
        return f"is marked for the pluggy project {method.project!r}"
    if method.lost:
        return "lost its marker to a decorator without functools.wraps above it"
    for base in order:
        inherited = subject.run.members.own(base).get(hook.name, ())
        if base.node is not method.owner.node and any(one.marked for one in inherited):
            return f"overrides {base.node.name}.{hook.name} and lost its marker"
    return "is not marked, so nothing would call it"


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
