"""Whether a function would receive, and use, what a hook is called with.

pluggy answers this too kindly: it passes a function the parameters that it happens to name, and so
lets one go that names too few, that misspells one which has a default, or that takes ``**kwargs``.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter
from types import CodeType, FunctionType, MethodType
from typing import Any, Final

from ..messages import did_you_mean

__all__ = ["call_problems", "definition", "is_read", "unwrapped"]

_FAST: Final = re.compile(r"(LOAD|STORE|DELETE)_FAST")
_FROM_CELL: Final = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_SILENT: Final = frozenset({"NOP", "EXTENDED_ARG", "CACHE"})


def call_problems(
    function: Callable[..., Any], expected: Sequence[str], *, bound: bool, partly: bool = False
) -> Iterator[str]:
    """Say, one by one, why a call with the expected arguments goes wrong.

    Args:
        function: A plain function, decorated or not.
        expected: The names that a call passes.
        bound: Whether the first parameter receives the object.
        partly: Whether naming only some of the expected parameters is fine.
    """
    *wrappers, inner = _levels(function)
    try:
        parameters = list(inspect.signature(inner, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):
        yield f"the signature of {inner!r} cannot be read: define it with def"
        return
    if bound:
        if not parameters or parameters[0].name in expected:
            yield "the parameter self is missing, and the first one receives the object: add self"
        elif parameters[0].kind is not Parameter.VAR_POSITIONAL:
            del parameters[0]
    missing = [name for name in expected if name not in {given.name for given in parameters}]
    for given in parameters:
        yield from _parameter_problems(given, expected, missing)
    if len(missing) == 1 and not partly:
        yield f"parameter {missing[0]!r} is missing: add it"
    elif missing and not partly:
        yield f"parameters {', '.join(map(repr, missing))} are missing: add them"
    for wrapper in wrappers:
        if not _passes_on(wrapper, [given.name for given in parameters], bound=bound):
            yield (
                f"its decorator hides the parameters behind {definition(wrapper)}: let the wrapper"
                " take (*args, **kwargs)"
            )


def unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function below all decorators that used ``functools.wraps``."""
    return _levels(function)[-1]


def definition(function: Callable[..., Any]) -> str:
    """Return ``name(parameters) at file:line``, without annotations."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return repr(function)
    bare = [given.replace(annotation=Parameter.empty) for given in signature.parameters.values()]
    shown = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    code = getattr(function, "__code__", None)
    where = f" at {code.co_filename}:{code.co_firstlineno}" if code else ""
    return f"{getattr(function, '__name__', function)}{shown}{where}"


def is_read(function: Callable[..., Any], name: str) -> bool:
    """Return whether the body reads a parameter, as far as its bytecode tells.

    ``del name``, a bare ``name`` and ``_ = name`` are not reads, nor is reading what was assigned
    to the name first. What is not Python counts as reading: it cannot be known. So does a body that
    only raises: it loses no argument without a word.
    """
    code = getattr(unwrapped(function), "__code__", None)
    if not isinstance(code, CodeType) or _only_raises(code):
        return True
    return _reads(code, name, frozenset())


def _only_raises(code: CodeType) -> bool:
    names = {instruction.opname for instruction in dis.get_instructions(code)}
    return "RAISE_VARARGS" in names and names.isdisjoint(("RETURN_CONST", "RETURN_VALUE"))


def _levels(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The function and what it wraps, outermost first, each without its binding."""
    levels: list[Callable[..., Any]] = []
    level: Any = function
    while level is not None and level not in levels:
        levels.append(level.__func__ if isinstance(level, MethodType) else level)
        level = getattr(levels[-1], "__wrapped__", None)
    return levels


def _parameter_problems(
    given: Parameter, expected: Sequence[str], missing: Sequence[str]
) -> Iterator[str]:
    name = given.name
    defaulted = given.default is not Parameter.empty
    if given.kind is Parameter.VAR_POSITIONAL or given.kind is Parameter.VAR_KEYWORD:
        yield f"parameter '{given}' receives nothing: name every parameter instead"
    elif name not in expected:
        silent = ", and would silently keep its default" if defaulted else ""
        yield (
            f"parameter {name!r} is unknown{silent}: rename or remove it"
            f"{did_you_mean(name, missing)}"
        )
    else:
        if given.kind is Parameter.KEYWORD_ONLY:
            yield f"parameter {name!r} is keyword-only: move it before the *"
        if given.kind is Parameter.POSITIONAL_ONLY:
            yield f"parameter {name!r} is positional-only: remove the /"
        if defaulted:
            yield (
                f"parameter {name!r} has a default: remove it, every argument is always passed and"
                " the defaults are the caller's"
            )


def _passes_on(wrapper: Callable[..., Any], names: Sequence[str], *, bound: bool) -> bool:
    """Whether a wrapper takes what the function below it takes, by position and by name."""
    if not isinstance(wrapper, FunctionType):
        return True
    parameters = list(inspect.signature(wrapper, follow_wrapped=False).parameters.values())
    kinds = {given.kind for given in parameters}
    named = [given.name for given in parameters if given.kind is Parameter.POSITIONAL_OR_KEYWORD]
    variadic = {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD} <= kinds
    own = [given for given in parameters if given.kind is Parameter.KEYWORD_ONLY]
    if any(given.default is Parameter.empty for given in own):
        return False
    if Parameter.POSITIONAL_ONLY in kinds:
        return False
    if bound and named:
        del named[0]
    return named == list(names) or (variadic and named == list(names)[: len(named)])


def _reads(code: CodeType, name: str, seen: frozenset[str]) -> bool:
    if name in code.co_cellvars or name in code.co_freevars:
        if any(i.opname in _FROM_CELL and i.argval == name for i in dis.get_instructions(code)):
            return True
        inner = (const for const in code.co_consts if isinstance(const, CodeType))
        return any(_reads(const, name, seen) for const in inner if name in const.co_freevars)
    steps = list(_steps(code))
    if not seen and not code.co_exceptiontable and _is_overwritten(steps, name):
        return False
    for (operation, operand), following in zip(steps, [*steps[1:], ("", "")], strict=True):
        if operation != "LOAD" or operand != name or following[0] == "POP_TOP":
            continue
        # Handing the value to a variable that nobody reads is how a linter is told to be quiet.
        if following[0] != "STORE":
            return True
        alias = following[1]
        if alias not in seen and _reads(code, alias, seen | {name}):
            return True
    return False


def _is_overwritten(steps: Sequence[tuple[str, str]], name: str) -> bool:
    """Whether a parameter certainly gets another value before anything reads it."""
    for operation, operand in steps:
        if operand == name:
            return operation != "LOAD"
        if "JUMP" in operation or operation in ("FOR_ITER", "SEND"):
            return False
    return False


def _steps(code: CodeType) -> Iterator[tuple[str, str]]:
    """Yield ``(LOAD|STORE|DELETE, variable)`` for accesses to locals, else ``(opname, "")``.

    From 3.13 on one instruction may be two accesses, with the pair of variables as its argument.
    """
    for instruction in dis.get_instructions(code):
        accesses = _FAST.findall(instruction.opname)
        if instruction.opname == "LOAD_FAST_AND_CLEAR":
            # An inlined comprehension sets a variable of the same name aside; nobody reads it.
            yield instruction.opname, ""
        elif accesses:
            names = instruction.argval
            yield from zip(accesses, names if isinstance(names, tuple) else (names,), strict=True)
        elif instruction.opname not in _SILENT:
            yield instruction.opname, ""
