"""SCV1xx: whether a method receives, and reads, what a hook is called with.

The check at load (:mod:`sconv.discovery.signatures`) asks the same of the running function.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Final

from sconv.messages import did_you_mean

from ..findings import Finding
from ..source.methods import Function, own_nodes
from ..source.parameter_use import is_read
from .rule import Rule, Text
from .subjects import Implementation

__all__ = ["RULES"]


class MissingParameter(Rule[Implementation]):
    """Parameters of the hook that an implementation lacks."""

    text = Text(
        "SCV101",
        "missing parameter",
        "An implementation names every parameter of its hook.",
        why="pluggy passes a method only the parameters that it names, so one that lacks"
        " req_pool_indices commits to slots that may belong to other requests by then, and nothing"
        " says so.",
        example="@hookimpl\ndef init_graph_state(self, max_bs): ...  # max_num_tokens is missing",
        fix="Add the parameter.",
    )
    scope = Implementation

    def check(self, one: Implementation) -> Iterator[Finding]:
        """Yield parameters of the hook that an implementation lacks."""
        # What a misspelt name or *args stand for is told by their own rules.
        meant = {name for _, near in _unknown(one) for name in one.missing if repr(name) in near}
        missing = [] if one.variadic else [name for name in one.missing if name not in meant]
        if missing:
            word = "parameter" if len(missing) == 1 else "parameters"
            yield self.found(
                one.where,
                f"{one.hook.name} lacks the {word} {', '.join(map(repr, missing))}; it is called"
                f" with: {one.hook.call}",
                hook=one.hook.name,
            )


class UnknownParameter(Rule[Implementation]):
    """Parameters that the hook does not have."""

    text = Text(
        "SCV102",
        "unknown parameter",
        "An implementation names no parameter that its hook does not have.",
        why="Without a default the plugin is refused; with one, the parameter keeps its default"
        " for ever, which is how a misspelt name silently loses its value.",
        example="@hookimpl\n"
        "def init_graph_state(self, max_bs, max_tokens): ...  # it is max_num_tokens",
        fix="Rename the parameter to the hook's, or remove it.",
    )
    scope = Implementation

    def check(self, one: Implementation) -> Iterator[Finding]:
        """Yield parameters that the hook does not have."""
        for name, near in _unknown(one):
            silent = ", and would silently keep its default" if name in one.defaulted else ""
            yield self.found(
                one.where,
                f"{one.hook.name} has no parameter {name!r}{silent}{near};"
                f" it is called with: {one.hook.call}",
                hook=one.hook.name,
            )


class DefaultedParameter(Rule[Implementation]):
    """Parameters that have a default."""

    text = Text(
        "SCV103",
        "default on a parameter",
        "No parameter of an implementation has a default.",
        why="Defaults belong to the caller. pluggy up to 1.6 never passes a parameter that has"
        " one.",
        example="@hookimpl\n"
        "def init_forward_metadata_out_graph(self, forward_batch, in_capture=False): ...",
        fix="Remove the default: every argument is always passed.",
    )
    scope = Implementation

    def check(self, one: Implementation) -> Iterator[Finding]:
        """Yield parameters that have a default."""
        for name in (argument.arg for argument in one.parameters):
            if name in one.hook.parameters and name in one.defaulted:
                yield self.found(
                    one.where,
                    f"{one.hook.name}: parameter {name!r} has a default",
                    hook=one.hook.name,
                )


class KeywordOnly(Rule[Implementation]):
    """Parameters that cannot be passed by position, or not by name."""

    text = Text(
        "SCV104",
        "keyword-only or positional-only parameter",
        "Every parameter can be passed by position and by name.",
        why="pluggy does not see keyword-only parameters, and a positional-only one cannot be"
        " passed by name.",
        example="@hookimpl\ndef init_graph_state(self, max_bs, *, max_num_tokens): ...",
        fix="Remove the * or the / from the parameter list.",
    )
    scope = Implementation

    def check(self, one: Implementation) -> Iterator[Finding]:
        """Yield parameters that cannot be passed by position, or not by name."""
        only = [(argument.arg, "keyword") for argument in one.arguments.kwonlyargs]
        only += [(argument.arg, "positional") for argument in one.arguments.posonlyargs]
        for name, word in only:
            if name in one.hook.parameters:
                yield self.found(
                    one.where,
                    f"{one.hook.name}: parameter {name!r} is {word}-only",
                    hook=one.hook.name,
                )


class Variadic(Rule[Implementation]):
    """Parameters for any number of arguments."""

    text = Text(
        "SCV105",
        "*args or **kwargs",
        "An implementation takes no *args and no **kwargs.",
        why="pluggy passes neither: such a method is called with nothing in them.",
        example="@hookimpl\ndef update_mamba_state_after_mtp_verify(self, *args, **kwargs): ...",
        fix="Name every parameter instead.",
    )
    scope = Implementation

    def check(self, one: Implementation) -> Iterator[Finding]:
        """Yield parameters for any number of arguments."""
        for shown in one.variadic:
            yield self.found(
                one.where,
                f"{one.hook.name} takes {shown}, which receives nothing; it is called with:"
                f" {one.hook.call}",
                hook=one.hook.name,
            )


class UnusedParameter(Rule[Implementation]):
    """Must-use parameters that the body never reads."""

    text = Text(
        "SCV106",
        "must-use parameter never read",
        "A parameter that the contract marks must-use is read; asking for its shape, or if it is"
        " None, is not reading it.",
        why="A commit that ignores req_pool_indices writes to the slots that the last forward left"
        " behind; by then they may belong to other requests.",
        example="@hookimpl\ndef update_mamba_state_after_mtp_verify(self, ..., req_pool_indices):\n"
        "    del req_pool_indices  # accepted for parity",
        fix="Look the rows' slots up from the parameter, at the time of the call.",
    )
    scope = Implementation

    def check(self, one: Implementation) -> Iterator[Finding]:
        """Yield must-use parameters that the body never reads."""
        for name in one.hook.must_use:
            if one.function is not None and name in one.names and not is_read(one.function, name):
                yield self.found(
                    one.where,
                    f"{one.hook.name} accepts {name!r} and never reads its value",
                    hook=one.hook.name,
                )


class NotPlainCall(Rule[Implementation]):
    """Functions of which a plain call runs nothing."""

    text = Text(
        "SCV107",
        "async or generator",
        "An implementation is a plain function: not async, and without yield.",
        why="Nobody awaits or iterates what a hook returns, so none of the body would run.",
        example="@hookimpl\nasync def warmup(self): ...",
        fix="Make it a plain def that returns its result.",
    )
    scope = Implementation

    def check(self, one: Implementation) -> Iterator[Finding]:
        """Yield functions of which a plain call runs nothing."""
        if isinstance(one.function, ast.AsyncFunctionDef):
            what = "is async, and nothing awaits it"
        elif one.function is not None and any(
            isinstance(node, ast.Yield | ast.YieldFrom) for node in own_nodes(one.function)
        ):
            what = "has a yield, so that a call runs none of it"
        else:
            return
        yield self.found(one.where, f"{one.hook.name} {what}", hook=one.hook.name)


class NotMethod(Rule[Implementation]):
    """What receives another first argument than the object."""

    text = Text(
        "SCV108",
        "not a plain method",
        "A hook is implemented by a plain method whose first parameter is the object.",
        why="A staticmethod, a property or a method without self receives the wrong first"
        " argument, or is not callable at all.",
        example="@staticmethod\n@hookimpl\ndef warmup(): ...",
        fix="Make it a plain method with self.",
    )
    scope = Implementation

    def check(self, one: Implementation) -> Iterator[Finding]:
        """Yield what receives another first argument than the object."""
        name, fix = one.hook.name, ""
        if not one.is_plain:
            what = f"is a {one.method.kind}, not a plain method"
        elif one.function is None:
            return
        elif one.first is None and one.arguments.vararg is None:
            what = "has no self"
        elif one.first in one.hook.parameters:
            what = f"has no self: its first parameter {one.first!r} receives the object"
            fix = "Add self."
        else:
            return
        yield self.found(one.where, f"{name} {what}", fix=fix, hook=name)


class HiddenParameters(Rule[Implementation]):
    """Decorators that take other parameters than what they decorate."""

    text = Text(
        "SCV109",
        "decorator changes the parameters",
        "A decorator around an implementation passes on what it is given.",
        why="A wrapper that takes other parameters than the method fails when the hook is called,"
        " or hides the method's own.",
        example="def traced(function):\n"
        "    @functools.wraps(function)\n"
        "    def wrapper(self, max_bs): ...\n"
        "\n"
        "    return wrapper",
        fix="Let the wrapper take (*args, **kwargs) and use functools.wraps.",
    )
    scope = Implementation

    def check(self, one: Implementation) -> Iterator[Finding]:
        """Yield decorators that take other parameters than what they decorate."""
        name, function = one.hook.name, one.method.function
        if one.is_hidden and function is not None:
            yield self.found(
                one.where,
                f"{name} is hidden behind {one.method.hidden_by}({ast.unparse(function.args)}),"
                " the function of a decorator without functools.wraps",
                fix="Put @functools.wraps(function) above the decorator's inner function.",
                hook=name,
            )
        for wrapper in one.method.wrappers if one.function is not None else ():
            if not _passes_on(wrapper.function, one.names):
                yield self.found(
                    one.where,
                    f"{name} is called through a wrapper that takes"
                    f" ({ast.unparse(wrapper.function.args)}), not ({', '.join(one.names)})",
                    hook=name,
                )


RULES: Final = (
    MissingParameter(),
    UnknownParameter(),
    DefaultedParameter(),
    KeywordOnly(),
    Variadic(),
    UnusedParameter(),
    NotPlainCall(),
    NotMethod(),
    HiddenParameters(),
)


def _unknown(one: Implementation) -> Iterator[tuple[str, str]]:
    """Yield the parameters that the hook does not have, each with what it may stand for."""
    for argument in one.parameters:
        if argument.arg not in one.hook.parameters:
            yield argument.arg, did_you_mean(argument.arg, one.missing)


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
