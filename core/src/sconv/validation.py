"""The strict check of a plugin's objects against the hook specifications.

pluggy would register an implementation that lost a parameter, its marker, or the right name of a
hook; each is a way to lose ``req_pool_indices`` without a word. Here every one of them is refused,
all at once, with what to change.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import pluggy

from .errors import ContractError
from .hookspecs import (
    CONTRACT_VERSION,
    MUST_USE,
    OPTIONAL_HOOKS,
    PROJECT_NAME,
    DiscoverySpec,
    StepSpec,
)
from .plugin import BackendInfo
from .signatures import call_problems, definition, is_read, unwrapped
from .wording import did_you_mean

__all__ = [
    "bind",
    "bound_calls",
    "check_discovery",
    "check_implementation",
    "check_observer",
    "register",
]

_MARK: Final = f"{PROJECT_NAME}_impl"
_ABSENT: Final = object()

#: What an implementation has besides its hooks.
_ATTRIBUTES: Final = ("forward_metadata", "pool")


@dataclass(frozen=True, slots=True)
class _Role:
    """What one kind of object owes.

    Attributes:
        hooks: The parameters of each hook that it may implement.
        required: The hooks that it must implement.
        must_use: By hook, the parameters that it must read.
        observes: It implements hooks as pluggy wrappers, around the one implementation.
    """

    hooks: Mapping[str, tuple[str, ...]]
    required: Collection[str] = ()
    must_use: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    observes: bool = False


def _hooks(spec: type) -> dict[str, tuple[str, ...]]:
    return {
        name: tuple(inspect.signature(function).parameters)[1:]
        for name, function in vars(spec).items()
        if hasattr(function, f"{PROJECT_NAME}_spec")
    }


_STEP: Final = _hooks(StepSpec)
_IMPLEMENTATION: Final = _Role(_STEP, _STEP.keys() - OPTIONAL_HOOKS, MUST_USE)
_OBSERVER: Final = _Role(_STEP, observes=True)
_DISCOVERY: Final = _Role(_hooks(DiscoverySpec), _hooks(DiscoverySpec))


def check_implementation(implementation: object, info: BackendInfo) -> None:
    """Check what a backend's factory returned.

    Raises:
        ContractError: With all problems: for each hook the parameter, the definition found, what a
            call passes, and what to change.
    """
    found = [*_problems(implementation, _IMPLEMENTATION), *_attribute_problems(implementation)]
    _refuse(found, f"{info} does not keep contract {CONTRACT_VERSION[0]}.{CONTRACT_VERSION[1]}")


def check_discovery(plugin: object) -> None:
    """Check the object behind an entry point.

    Raises:
        ContractError: With all problems.
    """
    _refuse(list(_problems(plugin, _DISCOVERY)), "the plugin object does not keep the contract")


def check_observer(observer: object) -> None:
    """Check an object whose methods are to wrap the calls of an implementation.

    Raises:
        ContractError: With all problems.
    """
    _refuse(list(_problems(observer, _OBSERVER)), f"{observer!r} cannot observe a backend")


def register(implementation: object, info: BackendInfo) -> pluggy.PluginManager:
    """Check an implementation and register it against the step hooks.

    Returns:
        A manager of its own, in which observers can be registered as well.

    Raises:
        ContractError: It does not keep the contract.
    """
    check_implementation(implementation, info)
    manager = pluggy.PluginManager(PROJECT_NAME)
    manager.add_hookspecs(StepSpec)
    try:
        manager.register(implementation, name=info.name)
        manager.check_pending()
    except pluggy.PluginValidationError as exc:
        raise ContractError(f"{info}: {exc}") from exc
    return manager


def bound_calls(manager: pluggy.PluginManager) -> dict[str, Callable[..., Any]]:
    """Return the implementation's bound method for each hook that it has.

    Call them by name: an implementation may order its parameters as it likes.
    """
    calls: dict[str, Callable[..., Any]] = {}
    for name in _STEP:
        found = [impl for impl in getattr(manager.hook, name).get_hookimpls() if not impl.wrapper]
        if found:
            calls[name] = found[0].function
    return calls


def bind(implementation: object, info: BackendInfo) -> dict[str, Callable[..., Any]]:
    """Check an implementation and return its bound method for each hook that it has.

    Raises:
        ContractError: It does not keep the contract.
    """
    return bound_calls(register(implementation, info))


def _refuse(problems: list[str], what: str) -> None:
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise ContractError("\n".join([f"{what}, {count}:", *problems]))


def _attribute_problems(implementation: object) -> Iterator[str]:
    for name in _ATTRIBUTES:
        held = inspect.getattr_static(implementation, name, _ABSENT)
        if held is _ABSENT:
            yield f"- attribute {name!r} is missing: add it"
        elif name == "forward_metadata" and isinstance(held, property) and held.fset is None:
            yield f"- attribute {name!r} cannot be set, and a hybrid sets it: give it a setter"


def _problems(candidate: object, role: _Role) -> Iterator[str]:
    if inspect.isclass(candidate) or isinstance(candidate, ModuleType):
        kind = "class" if inspect.isclass(candidate) else "module"
        yield f"- {candidate!r} is a {kind}: give an instance of a class that has the hooks"
        return
    marked: defaultdict[str, list[str]] = defaultdict(list)
    unmarked: list[str] = []
    for attribute in dir(candidate):
        options = _options(inspect.getattr_static(candidate, attribute, None))
        if options is not None:
            marked[options.get("specname") or attribute].append(attribute)
        elif not attribute.startswith("_"):
            unmarked.append(attribute)
    for hook, attributes in marked.items():
        if hook not in role.hooks:
            yield _unknown_hook(candidate, hook, attributes[0], role)
        elif len(attributes) > 1:
            yield f"- hook {hook!r} is implemented by {' and '.join(attributes)}: keep one"
        else:
            yield from _block(candidate, hook, attributes[0], role)
    for hook in role.hooks:
        if hook in marked:
            continue
        if hook in unmarked:
            yield _lost_marker(candidate, hook, role)
        elif hook in role.required:
            near = did_you_mean(hook, [*unmarked, *(marked.keys() - role.hooks.keys())])
            yield f"- hook {hook!r} is not implemented{near}: {_called_with(hook, role)}"
    if role.observes and not marked and not set(unmarked) & role.hooks.keys():
        yield f"- it observes nothing: mark a method named like a hook with {_marker(role)}"


def _block(candidate: object, hook: str, attribute: str, role: _Role) -> Iterator[str]:
    """One item for all that is wrong with one method."""
    problems = list(_method_problems(candidate, hook, attribute, role))
    if problems:
        static = inspect.getattr_static(candidate, attribute)
        lines = [f"- hook {hook!r}: {problem}" for problem in problems]
        lines.append(f"    defined: {definition(unwrapped(_function(static) or static))}")
        lines.append(f"    {_called_with(hook, role)}")
        yield "\n".join(lines)


def _method_problems(candidate: object, hook: str, attribute: str, role: _Role) -> Iterator[str]:
    static = inspect.getattr_static(candidate, attribute)
    options = _options(static) or {}
    if role.observes:
        if not options.get("wrapper"):
            yield f"it would answer in the backend's place: mark it with {_marker(role)}"
    elif options.get("wrapper") or options.get("hookwrapper"):
        yield f"it is marked as a wrapper, which is for observers: mark it with {_marker(role)}"
    if options.get("optionalhook"):
        yield "it is marked with optionalhook, which hides a wrong name: remove the option"
    function = _function(static)
    if function is None or isinstance(static, (staticmethod, classmethod)):
        yield f"it is a {type(static).__name__}: make it a plain method"
        return
    inner = unwrapped(function)
    if getattr(inner, "__name__", attribute) != attribute and inner.__name__ != "<lambda>":
        yield from ()
    yield from _kind_problems(function, role)
    bound = isinstance(static, MethodType) or attribute not in getattr(candidate, "__dict__", {})
    yield from call_problems(function, role.hooks[hook], bound=bound, partly=role.observes)
    named = inspect.signature(inner).parameters
    for name in role.must_use.get(hook, ()):
        if name in named and not is_read(function, name):
            yield f"parameter {name!r} is accepted and never read: use it, or the wrong rows change"
