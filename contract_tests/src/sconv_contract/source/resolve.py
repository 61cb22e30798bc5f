"""What a name in a source file means, across modules, without importing any of them.

griffe models the modules and turns relative imports into absolute ones; the names themselves are
looked up in :mod:`.scopes`, since a definition in every branch counts.
"""

from __future__ import annotations

import ast
import builtins
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from .modules import Modules, is_opaque
from .scopes import Block, Live, Scope
from .symbols import ClassRef, Found, Place, Source, absolute, imported

__all__ = ["ClassRef", "Found", "Place", "Project", "Source", "absolute"]

_MAX_DEPTH: Final = 24

#: Classes with more orders are followed in the first alone: conditional bases double them at each
#: class of a chain.
_MAX_ORDERS: Final = 16


class Project(Modules):
    """What names mean in the modules of one target, and of what it builds on."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """Look top-level packages up in these folders first, then among the installed ones."""
        super().__init__(roots)
        self._blocks: dict[ast.AST, Block] = {}
        self._bases: dict[ast.ClassDef, tuple[list[list[ClassRef]], list[str]]] = {}
        self._orders: dict[ast.ClassDef, tuple[list[list[ClassRef]], list[str]]] = {}
        self._cut: set[ast.ClassDef] = set()

    def block(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Block:
        """Return the body of a class or function."""
        if node not in self._blocks:
            self._blocks[node] = Block(node.body)
        return self._blocks[node]

    def scope(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Scope:
        """Return the names that the body of a class or function defines."""
        return self.block(node).scope

    def find(self, path: str, depth: int = 0) -> list[Found]:
        """Return what a dotted path may name."""
        if depth > _MAX_DEPTH or is_opaque(path):
            return [Found(path)]
        parts = path.split(".")
        for count in range(len(parts), 0, -1):
            source = self.source(".".join(parts[:count]))
            if source is not None:
                place = Place(source)
                found = [Found(source.name, source.tree, place)]
                for part in parts[count:]:
                    found = [one for each in found for one in self._member(each, part, depth)]
                return found
        return [Found(path)]

    def evaluate(self, expression: ast.expr, place: Place, depth: int = 0) -> list[Found]:
        """Return what an expression may mean where it stands."""
        if depth > _MAX_DEPTH:
            return [Found("")]
        match expression:
            case ast.Name(id=name):
                return self.lookup(name, place, depth + 1)
            case ast.Attribute(value=value, attr=name):
                owners = self.evaluate(value, place, depth + 1)
                return [one for each in owners for one in self._member(each, name, depth + 1)]
            case ast.Subscript(value=value):
                return self.evaluate(value, place, depth + 1)
            case ast.IfExp(body=body, orelse=orelse):
                ways = (body, orelse)
                return [one for way in ways for one in self.evaluate(way, place, depth + 1)]
            case _:
                return [Found(place.path, expression, place)]

    def paths(self, expression: ast.expr, place: Place) -> set[str]:
        """Return the dotted paths that an expression may name."""
        return {found.path for found in self.evaluate(expression, place)}

    def lookup(self, name: str, place: Place, depth: int = 0) -> list[Found]:
        """Return what a name may mean at a place."""
        for level in range(len(place.chain), 0, -1):
            node = place.chain[level - 1]
            outer = Place(place.source, place.chain[:level], place.before)
            known = None
            if isinstance(node, ast.ClassDef):
                # Methods do not see the names of their class; its own body does.
                if level == len(place.chain):
                    known = self.block(node).before(place.before, name)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if name in _parameters(node.args):
                    return [Found(f"{outer.path}.{name}")]
                known = self.scope(node).get(name)
            if known is not None:
                return self._follow(known, name, outer, depth)
        source, module = place.source, Place(place.source)
        early = source.block.before(place.before, name) if place.before else None
        if early is not None:
            return self._follow(early, name, Place(source, (), place.before), depth)
        if name in source.scope:
            return self._follow(source.scope[name], name, module, depth)
        for star in source.block.stars:
            for base in absolute(star, source):
                found = self._star_member(base, name, depth)
                if found:
                    return found
        if name in source.typing_scope:
            return self._follow(source.typing_scope[name], name, module, depth)
        return [Found(f"builtins.{name}")]

    def classes(self, expression: ast.expr, place: Place) -> tuple[list[ClassRef], list[str]]:
        """Return the classes that an expression may name, and the paths that cannot be seen."""
        classes, unseen = [], []
        for found in self.evaluate(expression, place):
            if isinstance(found.node, ast.ClassDef) and found.place is not None:
                classes.append(ClassRef(found.path, found.node, found.place))
            else:
                unseen.append(found.path if found.node is None else ast.unparse(expression))
        return classes, unseen

    def bases(self, ref: ClassRef) -> tuple[list[list[ClassRef]], list[str]]:
        """Return, for each base, the classes that it may be; and bases that cannot be seen."""
        if ref.node not in self._bases:
            seen, unseen = [], []
            for base in ref.node.bases:
                classes, unknown = self.classes(base, ref.place.at(ref.node))
                classes = [one for one in classes if one.node is not ref.node]
                if classes:
                    seen.append(classes)
                unseen += [path for path in unknown if not _harmless(path)]
            self._bases[ref.node] = seen, unseen
        return self._bases[ref.node]

    def mro(self, ref: ClassRef) -> tuple[list[list[ClassRef]], list[str]]:
        """Return the method resolution order for every choice of conditional bases.

        Returns:
            The orders, and the bases that cannot be seen, of all of them. Of a class that is
            :meth:`cut`, the first order alone.
        """
        pending = [ref]
        begun: set[ast.ClassDef] = set()
        while pending:
            top = pending[-1]
            below = [one for classes in self.bases(top)[0] for one in classes]
            if top.node not in begun:
                # Bases first, whatever their number; one that leads back here is left as it is.
                begun.add(top.node)
                pending += [
                    one for one in below if one.node not in self._orders and one.node not in begun
                ]
                continue
            pending.pop()
            if top.node not in self._orders:
                self._orders[top.node] = self._order(top)
        return self._orders[ref.node]

    def cut(self, ref: ClassRef) -> bool:
        """Whether a class, or a base of it, has more orders than are followed."""
        self.mro(ref)
        return ref.node in self._cut

    def _order(self, ref: ClassRef) -> tuple[list[list[ClassRef]], list[str]]:
        """Return the orders of a class whose bases have theirs."""
        bases, unknown = self.bases(ref)
        unseen = list(unknown)
        choices = max((len(classes) for classes in bases), default=1)
        orders: list[list[ClassRef]] = []
        for choice in range(choices):
            chosen = [classes[choice % len(classes)] for classes in bases]
            if any(base.node in self._cut for base in chosen):
                self._cut.add(ref.node)
            below = [self._orders.get(base.node, ([[base]], [])) for base in chosen]
            unseen += [path for _, paths in below for path in paths]
            for variant in range(max((len(each) for each, _ in below), default=1)):
                lines = [each[variant % len(each)] for each, _ in below]
                orders.append([ref, *_merged(lines, chosen)])
        if len(orders) > _MAX_ORDERS:
            self._cut.add(ref.node)
        return orders[:1] if ref.node in self._cut else orders, list(dict.fromkeys(unseen))

    def constant(self, expression: ast.expr, place: Place) -> Any:
        """Return the value of a literal, also behind a name; raises ValueError if it is none."""
        found = self.evaluate(expression, place)
        if len(found) != 1 or not isinstance(found[0].node, ast.expr):
            raise ValueError(ast.unparse(expression))
        return ast.literal_eval(found[0].node)

    def _member(self, owner: Found, name: str, depth: int) -> list[Found]:
        path = f"{owner.path}.{name}"
        if owner.node is None or owner.place is None or depth > _MAX_DEPTH:
            return [Found(path)]
        if isinstance(owner.node, ast.Module):
            source = owner.place.source
            found = self.lookup(name, Place(source), depth + 1)
            if found != [Found(f"builtins.{name}")]:
                return found
            below = self.source(f"{source.name}.{name}")
            return [Found(below.name, below.tree, Place(below))] if below else [Found(path)]
        if isinstance(owner.node, ast.ClassDef):
            ref = ClassRef(owner.path, owner.node, owner.place)
            for base in self.mro(ref)[0][0]:
                scope = self.scope(base.node)
                if name in scope:
                    return self._follow(scope[name], name, base.inside, depth)
        return [Found(path)]

    def _star_member(self, module: str, name: str, depth: int) -> list[Found]:
        source = self.source(module) if depth < _MAX_DEPTH else None
        if source is None or not _exports(source, name):
            return []
        found = self.lookup(name, Place(source), depth + 1)
        return [] if found == [Found(f"builtins.{name}")] else found

    def _follow(self, known: Live, name: str, place: Place, depth: int) -> list[Found]:
        return [
            found
            for statement in known.definitions
            for found in self._definition(statement, name, place, depth)
        ]

    def _definition(
        self, statement: ast.stmt, name: str, place: Place, depth: int
    ) -> Iterator[Found]:
        path = f"{place.path}.{name}"
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield Found(path, statement, place)
            case ast.Import() | ast.ImportFrom():
                for target in imported(statement, name, place.source):
                    yield from self.find(target, depth + 1)
            case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
                if isinstance(value, ast.Name) and value.id == name:
                    yield Found(path)
                elif isinstance(value, ast.Name | ast.Attribute | ast.IfExp):
                    yield from self.evaluate(value, place, depth + 1)
                else:
                    yield Found(path, value, place)
            case _:
                yield Found(path)


def _merged(lines: Sequence[list[ClassRef]], bases: list[ClassRef]) -> list[ClassRef]:
    """Return the orders of bases as one (C3), in time that is linear in them."""
    if len(lines) == 1:
        return lines[0]
    pending = [deque(line) for line in (*lines, bases)]
    behind = Counter(ref.node for line in pending for ref in list(line)[1:])
    merged: list[ClassRef] = []
    while any(pending):
        head = next((line[0] for line in pending if line and not behind[line[0].node]), None)
        if head is None:  # Python refuses such bases
            return [one for line in lines for one in line]
        merged.append(head)
        for line in pending:
            if line and line[0].node is head.node:
                line.popleft()
                if line:
                    behind[line[0].node] -= 1
    return merged


def _parameters(arguments: ast.arguments) -> set[str]:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    return {one.arg for one in every}


def _exports(source: Source, name: str) -> bool:
    declared = source.scope.get("__all__")
    if declared is not None and len(declared.definitions) == 1:
        value: Any = getattr(declared.definitions[0], "value", None)
        try:
            return name in ast.literal_eval(value)
        except (ValueError, TypeError):
            pass
    return not name.startswith("_")


def _harmless(path: str) -> bool:
    """Whether a base that is not read can hold no hooks: the standard library's and torch's."""
    top, _, rest = path.partition(".")
    if top == "builtins":
        return hasattr(builtins, rest)
    return is_opaque(path) or top == "typing_extensions"
