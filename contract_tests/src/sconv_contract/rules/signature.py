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
from .rule import Rule
from .subjects import Implementation

__all__ = ["RULES"]


class _Signature(Rule[Implementation]):
    """A rule that tells what is wrong with an implementation, in words after its hook's name."""

    scope = Implementation

    def check(self, one: Implementation) -> Iterator[Finding]:
        for what in self.wrong(one):
            yield self.found(one.where, f"{one.hook.name}{what}", hook=one.hook.name)

    def wrong(self, one: Implementation) -> Iterator[str]:
        raise NotImplementedError


class MissingParameter(_Signature):
    """An implementation names every parameter of its hook.

    pluggy passes a method only the parameters that it names, so one that lacks req_pool_indices
    commits to slots that may belong to other requests by then, and nothing says so.
    """

    id = "SCV101"
    name = "missing parameter"
    example = "@hookimpl\ndef init_graph_state(self, max_bs): ...  # max_num_tokens is missing"
    fix = "Add the parameter."

    def wrong(self, one: Implementation) -> Iterator[str]:
        # What a misspelt name or *args stand for is told by their own rules.
        meant = {name for _, near in _unknown(one) for name in one.missing if repr(name) in near}
        missing = [] if one.variadic else [name for name in one.missing if name not in meant]
        if missing:
            word = "parameter" if len(missing) == 1 else "parameters"
            yield (
                f" lacks the {word} {', '.join(map(repr, missing))}; it is called"
                f" with: {one.hook.call}"
            )


class UnknownParameter(_Signature):
    """An implementation names no parameter that its hook does not have.

    Without a default the plugin is refused; with one, the parameter keeps its default for ever,
    which is how a misspelt name silently loses its value.
    """

    id = "SCV102"
    name = "unknown parameter"
    example = (
        "@hookimpl\ndef init_graph_state(self, max_bs, max_tokens): ...  # it is max_num_tokens"
    )
    fix = "Rename the parameter to the hook's, or remove it."

    def wrong(self, one: Implementation) -> Iterator[str]:
        for name, near in _unknown(one):
            silent = ", and would silently keep its default" if name in one.defaulted else ""
            yield f" has no parameter {name!r}{silent}{near}; it is called with: {one.hook.call}"


class DefaultedParameter(_Signature):
    """No parameter of an implementation has a default.

    Defaults belong to the caller. pluggy up to 1.6 never passes a parameter that has one.
    """

    id = "SCV103"
    name = "default on a parameter"
    example = (
        "@hookimpl\ndef init_forward_metadata_out_graph(self, forward_batch, in_capture=False): ..."
    )
    fix = "Remove the default: every argument is always passed."

    def wrong(self, one: Implementation) -> Iterator[str]:
        for name in (argument.arg for argument in one.parameters):
            if name in one.hook.parameters and name in one.defaulted:
                yield f": parameter {name!r} has a default"


class KeywordOnly(_Signature):
    """Every parameter can be passed by position and by name.

    pluggy does not see keyword-only parameters, and a positional-only one cannot be passed by
    name.
    """

    id = "SCV104"
    name = "keyword-only or positional-only parameter"
    example = "@hookimpl\ndef init_graph_state(self, max_bs, *, max_num_tokens): ..."
    fix = "Remove the * or the / from the parameter list."

    def wrong(self, one: Implementation) -> Iterator[str]:
        only = [(argument.arg, "keyword") for argument in one.arguments.kwonlyargs]
        only += [(argument.arg, "positional") for argument in one.arguments.posonlyargs]
        for name, word in only:
            if name in one.hook.parameters:
                yield f": parameter {name!r} is {word}-only"


class Variadic(_Signature):
    """An implementation takes no *args and no **kwargs.

    pluggy passes neither: such a method is called with nothing in them.
    """

    id = "SCV105"
    name = "*args or **kwargs"
    example = "@hookimpl\ndef update_mamba_state_after_mtp_verify(self, *args, **kwargs): ..."
    fix = "Name every parameter instead."

    def wrong(self, one: Implementation) -> Iterator[str]:
        for shown in one.variadic:
            yield f" takes {shown}, which receives nothing; it is called with: {one.hook.call}"


class UnusedParameter(_Signature):
    """A parameter that the contract marks must-use is read; asking for its shape, or if it is None,
    is not reading it.

    A commit that ignores req_pool_indices writes to the slots that the last forward left behind;
    by then they may belong to other requests.
    """

    id = "SCV106"
    name = "must-use parameter never read"
    example = (
        "@hookimpl\ndef update_mamba_state_after_mtp_verify(self, ..., req_pool_indices):\n"
        "    del req_pool_indices  # accepted for parity"
    )
    fix = "Look the rows' slots up from the parameter, at the time of the call."

    def wrong(self, one: Implementation) -> Iterator[str]:
        for name in one.hook.must_use:
            if one.function is not None and name in one.names and not is_read(one.function, name):
                yield f" accepts {name!r} and never reads its value"


class NotPlainCall(_Signature):
    """An implementation is a plain function: not async, and without yield.

    Nobody awaits or iterates what a hook returns, so none of the body would run.
    """

    id = "SCV107"
    name = "async or generator"
    example = "@hookimpl\nasync def warmup(self): ..."
    fix = "Make it a plain def that returns its result."

    def wrong(self, one: Implementation) -> Iterator[str]:
        if isinstance(one.function, ast.AsyncFunctionDef):
            what = "is async, and nothing awaits it"
        elif one.function is not None and any(
            isinstance(node, ast.Yield | ast.YieldFrom) for node in own_nodes(one.function)
        ):
            what = "has a yield, so that a call runs none of it"
        else:
            return
        yield f" {what}"


class NotMethod(_Signature):
    """A hook is implemented by a plain method whose first parameter is the object.

    A staticmethod, a property or a method without self receives the wrong first argument, or is
    not callable at all.
    """

    id = "SCV108"
    name = "not a plain method"
    example = "@staticmethod\n@hookimpl\ndef warmup(): ..."
    fix = "Make it a plain method with self."

    def check(self, one: Implementation) -> Iterator[Finding]:
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


class HiddenParameters(_Signature):
    """A decorator around an implementation passes on what it is given.

    A wrapper that takes other parameters than the method fails when the hook is called, or hides
    the method's own.
    """

    id = "SCV109"
    name = "decorator changes the parameters"
    example = (
        "def traced(function):\n"
        "    @functools.wraps(function)\n"
        "    def wrapper(self, max_bs): ...\n"
        "\n"
        "    return wrapper"
    )
    fix = "Let the wrapper take (*args, **kwargs) and use functools.wraps."

    def check(self, one: Implementation) -> Iterator[Finding]:
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
