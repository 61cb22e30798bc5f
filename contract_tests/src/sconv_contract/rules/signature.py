"""SCV1xx: whether a method receives, and reads, what a hook is called with.

The check at load (:mod:`sconv.discovery.signatures`) asks the same of the running function.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Final

from sconv.messages import did_you_mean

from ..contract import Hook
from ..findings import Finding
from ..methods import Function, Method, own_nodes
from ..reads import is_read, parameters_of
from .rule import Rule, Where

__all__ = ["OPEN", "RULES", "check"]

MISSING: Final = Rule(
    "SCV101",
    "missing parameter",
    "An implementation names every parameter of its hook.",
    "pluggy passes a method only the parameters that it names, so one that lacks req_pool_indices"
    " commits to slots that may belong to other requests by then, and nothing says so.",
    "@hookimpl\ndef init_graph_state(self, max_bs): ...  # max_num_tokens is missing",
    "Add the parameter.",
)
UNKNOWN: Final = Rule(
    "SCV102",
    "unknown parameter",
    "An implementation names no parameter that its hook does not have.",
    "Without a default the plugin is refused; with one, the parameter keeps its default for ever,"
    " which is how a misspelt name loses its value without a word.",
    "@hookimpl\ndef init_graph_state(self, max_bs, max_tokens): ...  # it is max_num_tokens",
    "Rename the parameter to the hook's, or remove it.",
)
DEFAULTED: Final = Rule(
    "SCV103",
    "default on a parameter",
    "No parameter of an implementation has a default.",
    "Defaults belong to the caller. pluggy up to 1.6 never passes a parameter that has one.",
    "@hookimpl\ndef init_forward_metadata_out_graph(self, forward_batch, in_capture=False): ...",
    "Remove the default: every argument is always passed.",
)
KEYWORD: Final = Rule(
    "SCV104",
    "keyword-only or positional-only parameter",
    "Every parameter can be passed by position and by name.",
    "pluggy does not see keyword-only parameters, and a positional-only one cannot be passed by"
    " name.",
    "@hookimpl\ndef init_graph_state(self, max_bs, *, max_num_tokens): ...",
    "Remove the * or the / from the parameter list.",
)
VARIADIC: Final = Rule(
    "SCV105",
    "*args or **kwargs",
    "An implementation takes no *args and no **kwargs.",
    "pluggy passes neither: such a method is called with nothing in them.",
    "@hookimpl\ndef update_mamba_state_after_mtp_verify(self, *args, **kwargs): ...",
    "Name every parameter instead.",
)
UNUSED: Final = Rule(
    "SCV106",
    "must-use parameter never read",
    "A parameter that the contract marks must-use is read; asking for its shape, or if it is None,"
    " is not reading it.",
    "A commit that ignores req_pool_indices writes to the slots that the last forward left behind;"
    " by then they may belong to other requests.",
    "@hookimpl\ndef update_mamba_state_after_mtp_verify(self, ..., req_pool_indices):\n"
    "    del req_pool_indices  # accepted for parity",
    "Look the rows' slots up from the parameter, at the time of the call.",
)
ASYNC: Final = Rule(
    "SCV107",
    "async or generator",
    "An implementation is a plain function: not async, and without yield.",
    "Nobody awaits or iterates what a hook returns, so none of the body would run.",
    "@hookimpl\nasync def warmup(self): ...",
    "Make it a plain def that returns its result.",
)
NOT_A_METHOD: Final = Rule(
    "SCV108",
    "not a plain method",
    "A hook is implemented by a plain method whose first parameter is the object.",
    "A staticmethod, a property or a method without self receives the wrong first argument, or is"
    " not callable at all.",
    "@staticmethod\n@hookimpl\ndef warmup(): ...",
    "Make it a plain method with self.",
)
HIDDEN: Final = Rule(
    "SCV109",
    "decorator changes the parameters",
    "A decorator around an implementation passes on what it is given.",
    "A wrapper that takes other parameters than the method fails when the hook is called, or hides"
    " the method's own.",
    "def traced(function):\n    @functools.wraps(function)\n    def wrapper(self, max_bs): ...\n\n"
    "    return wrapper",
    "Let the wrapper take (*args, **kwargs) and use functools.wraps.",
)

RULES: Final = (
    MISSING,
    UNKNOWN,
    DEFAULTED,
    KEYWORD,
    VARIADIC,
    UNUSED,
    ASYNC,
    NOT_A_METHOD,
    HIDDEN,
)

#: The rules that stay open where a method cannot be followed.
OPEN: Final = tuple(rule.id for rule in RULES)


def check(method: Method, hook: Hook) -> Iterator[Finding]:
    """Check one marked method against its hook."""
    if method.kind != "method" or method.function is None:
        where = Where.of(method.owner.place.source.path, method.statement)
        yield NOT_A_METHOD.found(
            where,
            f"{hook.name} is a {method.kind}, not a plain method",
            hook=hook.name,
        )
        return
    assert method.place is not None
    where = Where.of(method.place.source.path, method.function)
    names = _named(method.function.args)
    if method.hidden_by and sorted(names) != sorted(hook.parameters):
        yield HIDDEN.found(
            where,
            f"{hook.name} is hidden behind {method.hidden_by}({ast.unparse(method.function.args)}),"
            " the function of a decorator without functools.wraps",
            fix="Put @functools.wraps(function) above the decorator's inner function.",
            hook=hook.name,
        )
        return
    yield from _kind(method.function, hook, where)
    yield from _parameters(method.function, hook, where)
    for wrapper in method.wrappers:
        if not _passes_on(wrapper.function, names):
            yield HIDDEN.found(
                where,
                f"{hook.name} is called through a wrapper that takes"
                f" ({ast.unparse(wrapper.function.args)}), not ({', '.join(names)})",
                hook=hook.name,
            )
    for name in hook.must_use:
        if name in names and not is_read(method.function, name):
            yield UNUSED.found(
                where, f"{hook.name} accepts {name!r} and never reads its value", hook=hook.name
            )


def _kind(function: Function, hook: Hook, where: Where) -> Iterator[Finding]:
    if isinstance(function, ast.AsyncFunctionDef):
        yield ASYNC.found(where, f"{hook.name} is async, and nothing awaits it", hook=hook.name)
    elif any(isinstance(node, ast.Yield | ast.YieldFrom) for node in own_nodes(function)):
        yield ASYNC.found(
            where, f"{hook.name} has a yield, so that a call runs none of it", hook=hook.name
        )


def _parameters(function: Function, hook: Hook, where: Where) -> Iterator[Finding]:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    first = positional[0].arg if positional else None
    if first is None and arguments.vararg is None:
        yield NOT_A_METHOD.found(where, f"{hook.name} has no self", hook=hook.name)
    elif first in hook.parameters:
        yield NOT_A_METHOD.found(
            where,
            f"{hook.name} has no self: its first parameter {first!r} receives the object",
            fix="Add self.",
            hook=hook.name,
        )
    given = {argument.arg for argument in parameters_of(arguments)}
    if first is not None and first not in hook.parameters:
        given.discard(first)
        positional = positional[1:]
    missing = [name for name in hook.parameters if name not in given]
    meant = set()
    variadic = [one.arg for one in (arguments.vararg, arguments.kwarg) if one is not None]
    for name in variadic:
        stars = "*" if arguments.vararg and name == arguments.vararg.arg else "**"
        yield VARIADIC.found(
            where,
            f"{hook.name} takes {stars}{name}, which receives nothing; it is called with:"
            f" {hook.call}",
            hook=hook.name,
        )
    defaults = _with_default(arguments)
    for argument in [*positional, *arguments.kwonlyargs]:
        name = argument.arg
        if name not in hook.parameters:
            silent = ", and would silently keep its default" if name in defaults else ""
            near = did_you_mean(name, missing)
            meant |= {other for other in missing if repr(other) in near}
            yield UNKNOWN.found(
                where,
                f"{hook.name} has no parameter {name!r}{silent}{near};"
                f" it is called with: {hook.call}",
                hook=hook.name,
            )
            continue
        if argument in arguments.kwonlyargs or argument in arguments.posonlyargs:
            word = "keyword" if argument in arguments.kwonlyargs else "positional"
            yield KEYWORD.found(
                where, f"{hook.name}: parameter {name!r} is {word}-only", hook=hook.name
            )
        if name in defaults:
            yield DEFAULTED.found(
                where, f"{hook.name}: parameter {name!r} has a default", hook=hook.name
            )
    # What a misspelt name or *args stand for is told above.
    missing = [] if variadic else [name for name in missing if name not in meant]
    if missing:
        word = "parameter" if len(missing) == 1 else "parameters"
        yield MISSING.found(
            where,
            f"{hook.name} lacks the {word} {', '.join(map(repr, missing))}; it is called with:"
            f" {hook.call}",
            hook=hook.name,
        )


def _passes_on(wrapper: Function, names: Sequence[str]) -> bool:
    """Whether a wrapper takes what the function below it takes, by position and by name."""
    arguments = wrapper.args
    required = [
        one
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    if required or arguments.posonlyargs:
        return False
    own = [one.arg for one in arguments.args][1:]
    variadic = arguments.vararg is not None and arguments.kwarg is not None
    expected = list(names)
    return own == expected or (variadic and own == expected[: len(own)])


def _named(arguments: ast.arguments) -> list[str]:
    """The parameters by name, self left out."""
    every = [one.arg for one in [*arguments.posonlyargs, *arguments.args]][1:]
    return every + [one.arg for one in arguments.kwonlyargs]


def _with_default(arguments: ast.arguments) -> set[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    count = len(arguments.defaults)
    names = {one.arg for one in positional[len(positional) - count :]} if count else set()
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return names | {one.arg for one, default in pairs if default is not None}
