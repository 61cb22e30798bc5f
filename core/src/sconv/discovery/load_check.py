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

from ..errors import ContractError
from ..hookspecs import (
    CONTRACT_VERSION,
    MUST_USE,
    OPTIONAL_HOOKS,
    PROJECT_NAME,
    BackendInfo,
    DiscoverySpec,
    StepSpec,
)
from ..messages import did_you_mean
from .signatures import call_problems, definition, is_read, unwrapped

__all__ = ["bind", "check_discovery", "check_implementation", "check_observer", "step_hooks"]

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


def step_hooks() -> Collection[str]:
    """Return the names of the step hooks."""
    return _STEP.keys()


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


def bind(
    implementation: object, info: BackendInfo
) -> tuple[dict[str, Callable[..., Any]], pluggy.PluginManager]:
    """Check an implementation and register it against the step hooks.

    Returns:
        Its bound method for each hook that it has, and the manager that it is registered in, for
        observers. The methods are called by name: an implementation may order its parameters as it
        likes.

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
    found = {name: getattr(manager.hook, name).get_hookimpls() for name in _STEP}
    return {name: impls[0].function for name, impls in found.items() if impls}, manager


def _refuse(problems: list[str], what: str) -> None:
    if problems:
        lines = "\n".join(problems).splitlines()
        count = sum(line.startswith("- ") for line in lines)
        raise ContractError("\n".join([f"{what}, {count} problem(s):", *lines]))


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
    unmarked: set[str] = set()
    for attribute in dir(candidate):
        options = _options(inspect.getattr_static(candidate, attribute, None))
        if options is not None:
            marked[options.get("specname") or attribute].append(attribute)
        elif not attribute.startswith("_"):
            unmarked.add(attribute)
    for hook, attributes in marked.items():
        if hook not in role.hooks:
            near = did_you_mean(hook, role.hooks)
            yield f"- hook {hook!r} of {attributes[0]}() does not exist: rename it{near}"
        elif len(attributes) > 1:
            yield f"- hook {hook!r} is implemented by {' and '.join(attributes)}: keep one"
        else:
            yield from _method_item(candidate, hook, attributes[0], role)
    for hook in role.hooks:
        if hook in marked:
            continue
        if hook in unmarked:
            yield _lost_marker(candidate, hook, role)
        elif hook in role.required:
            near = did_you_mean(hook, [*unmarked, *marked])
            yield f"- hook {hook!r} is not implemented{near}; {_call(hook, role)}"
    if role.observes and not marked and not unmarked & role.hooks.keys():
        yield f"- it observes nothing: mark a method named like a hook with {_marker(role)}"


def _method_item(candidate: object, hook: str, attribute: str, role: _Role) -> Iterator[str]:
    """All that is wrong with one method, as one item."""
    static = inspect.getattr_static(candidate, attribute)
    function = _function(static)
    problems = list(_option_problems(_options(static) or {}, role))
    if function is None or isinstance(static, staticmethod | classmethod | property):
        problems.append(f"it is a {type(static).__name__}: make it a plain method")
    else:
        on_instance = attribute in getattr(candidate, "__dict__", {})
        bound = isinstance(static, MethodType) or not on_instance
        problems += _kind_problems(function, role)
        problems += call_problems(function, role.hooks[hook], bound=bound, partly=role.observes)
        problems += _unused(function, role.must_use.get(hook, ()))
    if problems:
        lines = [f"- hook {hook!r}: {problem}" for problem in problems]
        if function is not None:
            lines.append(f"    defined: {definition(unwrapped(function))}")
            lines += [f"    {hint}" for hint in _replaced(function, attribute)]
        yield "\n".join([*lines, f"    {_call(hook, role)}"])


def _option_problems(options: Mapping[str, Any], role: _Role) -> Iterator[str]:
    if role.observes and not options.get("wrapper"):
        yield f"it would answer in the backend's place: mark it with {_marker(role)}"
    if not role.observes and (options.get("wrapper") or options.get("hookwrapper")):
        yield f"it is marked as a wrapper, which is for observers: mark it with {_marker(role)}"
    if options.get("optionalhook"):
        yield "it is marked with optionalhook, which hides a wrong name: remove that option"


def _kind_problems(function: Callable[..., Any], role: _Role) -> Iterator[str]:
    inner = unwrapped(function)
    if inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner):
        yield "it is async, and nothing awaits it: make it a plain def"
    elif role.observes and not inspect.isgeneratorfunction(function):
        yield "it has no yield: give it one, whose value is the call's result, and return that"
    elif not role.observes and inspect.isgeneratorfunction(inner):
        yield "its body has a yield, so that a call runs none of it: remove the yield"


def _unused(function: Callable[..., Any], names: Collection[str]) -> Iterator[str]:
    code = getattr(unwrapped(function), "__code__", None)
    accepted = code.co_varnames[: code.co_argcount] if code is not None else ()
    for name in names:
        if name in accepted and not is_read(function, name):
            yield (
                f"parameter {name!r} is accepted and never read: use it, or the call changes the"
                " state of the wrong rows"
            )


def _lost_marker(candidate: object, hook: str, role: _Role) -> str:
    static = inspect.getattr_static(candidate, hook)
    function = _function(static)
    marks = {key.removesuffix("_impl") for key in getattr(function, "__dict__", {})}
    projects = sorted(marks - set(getattr(function, "__dict__", {})))
    bases = [
        base.__name__
        for base in type(candidate).__mro__
        if _options(vars(base).get(hook)) is not None
    ]
    if function is None:
        what = f"is a {type(static).__name__}: make it a plain method, marked with"
    elif projects:
        what = f"is marked for the pluggy project {projects[0]!r}: mark it with"
    elif bases:
        what = f"overrides {bases[0]}.{hook} and lost its marker: mark the override too, with"
    else:
        what = "is not marked, so nothing would call it: mark it with"
    lines = [f"- hook {hook!r} {what} {_marker(role)}"]
    if function is not None:
        lines.append(f"    defined: {definition(unwrapped(function))}")
        lines += [f"    {hint}" for hint in _replaced(function, hook)]
    return "\n".join([*lines, f"    {_call(hook, role)}"])


def _replaced(function: Callable[..., Any], attribute: str) -> Iterator[str]:
    name = getattr(unwrapped(function), "__name__", attribute)
    if name not in (attribute, "<lambda>"):
        yield f"if {name!r} is a decorator's wrapper, give it functools.wraps"


def _call(hook: str, role: _Role) -> str:
    return f"called with: {', '.join(role.hooks[hook]) or 'nothing'}"


def _marker(role: _Role) -> str:
    return "@sconv.hookimpl(wrapper=True)" if role.observes else "@sconv.hookimpl"


def _options(static: object) -> Mapping[str, Any] | None:
    """The options of this project's marker, however the function is wrapped; None if unmarked."""
    for holder in (static, _function(static)):
        options = inspect.getattr_static(holder, _MARK, None)
        if isinstance(options, dict):
            return options
    return None


def _function(static: object) -> Callable[..., Any] | None:
    if isinstance(static, property):
        static = static.fget
    elif isinstance(static, staticmethod | classmethod | MethodType):
        static = static.__func__
    return static if isinstance(static, FunctionType) else None
