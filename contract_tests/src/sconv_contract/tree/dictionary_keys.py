"""The keys of dictionaries that are unpacked into calls, as far as the source shows them."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from ..source.methods import own_nodes
from ..source.parameter_use import parameters_of

__all__ = ["Keys", "dictionaries", "keys_of"]


@dataclass(frozen=True, slots=True)
class Keys:
    """What is known of a dictionary.

    Attributes:
        names: Keys that it may have.
        is_open: It may have others.
    """

    names: frozenset[str] = frozenset()
    is_open: bool = False

    def __or__(self, other: Keys) -> Keys:
        return Keys(self.names | other.names, self.is_open or other.is_open)


_OPEN = Keys(is_open=True)


def keys_of(value: ast.expr | None, known: Mapping[str, Keys]) -> Keys:
    """Return the keys of an expression, given those of the names in scope."""
    match value:
        case ast.Dict(keys=keys, values=values):
            found = Keys()
            for key, inner in zip(keys, values, strict=True):
                found |= keys_of(inner, known) if key is None else _key(key)
            return found
        case ast.Call(func=ast.Name(id="dict"), args=given, keywords=keywords):
            return _passed(given, keywords, known)
        case ast.Call(func=ast.Attribute(value=owner, attr="copy"), args=[]):
            return keys_of(owner, known)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return keys_of(left, known) | keys_of(right, known)
        case ast.IfExp(body=body, orelse=orelse):
            return keys_of(body, known) | keys_of(orelse, known)
        case ast.BoolOp(values=values):
            found = Keys()
            for one in values:
                found |= keys_of(one, known)
            return found
        case ast.NamedExpr(value=inner):
            return keys_of(inner, known)
        case ast.Name(id=name):
            return known.get(name, _OPEN)
        case ast.Constant(value=None):
            return Keys()  # it is not what is unpacked in the end
        case _:
            return _OPEN


def dictionaries(function: ast.AST, around: Mapping[str, Keys]) -> dict[str, Keys]:
    """Return the keys of each name of a function or module, later stores included.

    A key that is set on one way alone counts: some call passes it.
    """
    known = dict(around)
    arguments = getattr(function, "args", None)
    if isinstance(arguments, ast.arguments):
        known |= dict.fromkeys((one.arg for one in parameters_of(arguments)), _OPEN)
    local: set[str] = set()
    for node in own_nodes(function):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                | ast.NamedExpr(target=ast.Name(id=name), value=value)
            ):
                before = known[name] if name in local else Keys()
                known[name] = before | keys_of(value, known)
                local.add(name)
            case ast.AugAssign(target=ast.Name(id=name), op=ast.BitOr(), value=value):
                known[name] = known.get(name, _OPEN) | keys_of(value, known)
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name), slice=key)]):
                known[name] = known.get(name, _OPEN) | _key(key)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)):
                if name in known:
                    known[name] = _after(method, node, known[name], known)
            case ast.Delete(targets=[ast.Subscript(value=ast.Name(id=name), slice=key)]):
                if name in known:
                    known[name] = Keys(known[name].names - _key(key).names, known[name].is_open)
    return known


def _after(method: str, node: ast.Call, now: Keys, known: Mapping[str, Keys]) -> Keys:
    """Return the keys of a dictionary after a call of one of its methods."""
    if method == "update":
        return now | _passed(node.args, node.keywords, known)
    if method == "setdefault" and node.args:
        return now | _key(node.args[0])
    if method == "pop" and node.args:
        return Keys(now.names - _key(node.args[0]).names, now.is_open)
    return now


def _passed(given: list[ast.expr], keywords: list[ast.keyword], known: Mapping[str, Keys]) -> Keys:
    found = Keys()
    for value in given:
        found |= keys_of(value, known)
    for keyword in keywords:
        named = keyword.arg is not None
        found |= Keys(frozenset({str(keyword.arg)})) if named else keys_of(keyword.value, known)
    return found


def _key(key: ast.expr) -> Keys:
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        return Keys(frozenset({key.value}))
    return _OPEN
