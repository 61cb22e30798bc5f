"""Follows the code that a graph records and says where it would not record.

It knows which values are tensors: parameters, fields of a batch and of metadata, results of torch.
A value that it does not know is no tensor to it, so that it stays silent where it would guess; the
calls that are wrong on anything (``.item()``) are reported everywhere.
"""

from __future__ import annotations

import ast
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ..findings import Where
from ..source.decorators import wrappers_of
from ..source.hook_specs import Hook, tensor_fields
from ..source.methods import Function, Method, Wrapper
from ..source.resolve import ClassRef, Found, Place
from .shapes import Shape, Shapes, allocates, annotated
from .tensor_calls import (
    ALLOCATING,
    BOOLEAN,
    DYNAMIC,
    HOST_FUNCTIONS,
    HOST_METHODS,
    LOGGING,
    SEQUENCES,
    SYNCING_FUNCTIONS,
    SYNCING_METHODS,
    VIEWS,
)
from .value_kinds import (
    BATCH,
    HOST,
    MASK,
    META,
    SELF,
    TENSOR,
    TENSORS,
    element,
    join,
    object_kind,
    of_annotation,
)

__all__ = ["Breach", "BreachKind", "Evaluator"]

_MAX_DEPTH: Final = 12

_TENSOR_LIKE: Final = (TENSOR, MASK)

_MASK_FIELDS: Final = frozenset({"cache_mask", "has_initial_state", "mamba_track_mask", "writes"})

#: Attributes whose reading runs a function.
_COMPUTED: Final = frozenset({"cached_property", "property"})

#: Built-ins that ask a tensor for its value.
_ASKING: Final = frozenset({"bool", "complex", "float", "int", "range", "round"})
#: The same, in the module operator.
_OPERATORS: Final = frozenset(
    f"operator.{name}" for name in ("contains", "countOf", "index", "indexOf", "not_", "truth")
)
_MAPPING: Final = frozenset({"filter", "map"})
_COMPARING: Final = frozenset({"all", "any", "max", "min", "sorted"})
_SHOWING: Final = frozenset({"ascii", "format", "print", "repr", "str"})


class BreachKind(enum.Enum):
    """Why code cannot be recorded, or must not be."""

    SYNC = "the host waits for a value of the device"
    ALLOCATION = "a new tensor, where a replay needs the old one"
    DYNAMIC_SHAPE = "a shape that depends on values"
    BRANCH = "Python decides by a value of the device"
    OUTPUT = "a tensor is formatted"


@dataclass(frozen=True, slots=True)
class Breach:
    """One place that does not record.

    Attributes:
        kind: Why.
        where: The place.
        message: What is there.
    """

    kind: BreachKind
    where: Where
    message: str


@dataclass
class _Frame:
    """A function on the way through recorded code.

    Attributes:
        function: Its node.
        place: Where it stands.
        kinds: What each local name is.
        owner: The class that defines it, for super().
        depth: Calls above it.
        result: What it returns, so far.
        methods: Local names that are a method of something: ``first = self.first``.
    """

    function: Function
    place: Place
    kinds: dict[str, str]
    owner: ClassRef | None
    depth: int
    result: str = HOST
    methods: dict[str, ast.Attribute] = field(default_factory=dict)

    @property
    def inside(self) -> Place:
        """The place of its body."""
        return self.place.inside(self.function)


class Evaluator:
    """Evaluates the code that one in-graph hook of one class reaches, one function at a time."""

    def __init__(
        self, shapes: Shapes, hook: Hook, backend: Shape, reported: Callable[[Path], bool]
    ) -> None:
        """Prepare a scan.

        Args:
            shapes: Of the classes that are met; shared by the scans of one target.
            hook: The hook.
            backend: The class that implements it.
            reported: Whether a breach in a file is told: those of the target.
        """
        self.shapes, self.project = shapes, shapes.project
        self.hook, self.backend, self.reported = hook, backend, reported
        self.breaches: list[Breach] = []
        self._frame: _Frame
        self._done: dict[tuple[int, tuple[tuple[str, str], ...]], str] = {}
        self._told: set[tuple[BreachKind, Where]] = set()

    def scan(self, method: Method) -> list[Breach]:
        """Follow one implementation of the hook and return what would not record."""
        if method.function is None or method.place is None:
            return []
        kinds = {
            name: of_annotation(annotation) for name, annotation in self.hook.annotations.items()
        }
        for function, place in [*method.wrappers, Wrapper(method.function, method.place)]:
            self._follow(function, place, kinds, method.owner, 0, bound=SELF)
        return self.breaches

    def _shape(self, kind: str) -> Shape | None:
        """Return what an object of this kind has, or None if its class is not known."""
        return self.backend if kind == SELF else self.shapes.of_kind(kind)

    def _follow(
        self,
        function: Function,
        place: Place,
        kinds: Mapping[str, str],
        owner: ClassRef | None,
        depth: int,
        *,
        bound: str | None,
    ) -> str:
        """Follow a function whose arguments are of these kinds; return the kind of its result.

        ``bound`` is the kind of the object that its first parameter receives, None = a function.
        """
        known = {name: kind for name, kind in kinds.items() if kind != HOST}
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for argument in every:
            promised = annotated(self.project, argument.annotation, place)
            if promised != HOST:
                known.setdefault(argument.arg, promised)
        if bound is not None and every:
            known[every[0].arg] = bound
        key = (id(function), tuple(sorted(known.items())))
        if key in self._done or depth > _MAX_DEPTH:
            return self._done.get(key, HOST)
        returns = annotated(self.project, getattr(function, "returns", None), place)
        self._done[key] = returns
        caller = getattr(self, "_frame", None)
        self._frame = frame = _Frame(function, place, known, owner, depth)
        if isinstance(function, ast.Lambda):
            frame.result = self._value(function.body)
        else:
            self._block(function.body)
        if caller is not None:
            self._frame = caller
        self._done[key] = returns if returns != HOST else frame.result
        return self._done[key]

    def _tell(self, kind: BreachKind, node: ast.AST, message: str) -> None:
        """Report a breach once, unless the code is not the target's."""
        path = self._frame.place.source.path
        where = Where.of(path, node)
        if (kind, where) in self._told or not self.reported(path):
            return
        self._told.add((kind, where))
        reached = f"{self.hook.name} reaches it" if self._frame.depth else f"in {self.hook.name}"
        self.breaches.append(Breach(kind, where, f"{message} ({reached})"))

    def _block(self, body: Sequence[ast.stmt]) -> None:
        """Follow a block."""
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                kind = self._value(value)
                for target in targets:
                    self._store(target, kind, value)
                    if isinstance(target, ast.Name) and isinstance(value, ast.Attribute):
                        self._frame.methods[target.id] = value
            case ast.AnnAssign(target=target, value=value, annotation=annotation):
                declared = annotated(self.project, annotation, self._frame.inside)
                kind = self._value(value)
                self._store(target, kind if kind != HOST else declared, value)
            case ast.AugAssign(target=target, value=value):
                kind = self._value(value)
                if isinstance(target, ast.Name):
                    self._frame.kinds[target.id] = join(
                        self._frame.kinds.get(target.id, HOST), kind
                    )
                elif isinstance(target, ast.Subscript):
                    self._store(target, kind, value)
            case ast.Return(value=value):
                self._frame.result = join(self._frame.result, self._value(value))
            case ast.Expr(value=value):
                self._value(value)
            case ast.If(test=test):
                self._decide(test, "if")
                self._either(node.body, node.orelse)
            case ast.While(test=test):
                self._decide(test, "while")
                self._loop(node)
            case ast.Assert(test=test):
                self._decide(test, "assert")
            case ast.For(target=target, iter=iterated):
                self._bind_each(target, iterated)
                self._loop(node)
            case ast.With(items=items, body=body):
                for item in items:
                    kind = self._value(item.context_expr)
                    entered = self._context(kind)
                    if item.optional_vars is not None:
                        self._bind(item.optional_vars, entered)
                self._block(body)
            case ast.Try() | ast.TryStar():
                self._either([*node.body, *node.orelse], *(one.body for one in node.handlers))
                self._block(node.finalbody)
            case ast.Match(subject=subject, cases=cases):
                self._decide(subject, "match")
                for case in cases:
                    if case.guard is not None:
                        self._decide(case.guard, "if")
                self._either(*(case.body for case in cases), [])
            case _:
                pass  # an error, for one, ends the capture anyhow

    def _either(self, *ways: Sequence[ast.stmt]) -> None:
        """Follow blocks of which one runs; a name is afterwards what any of them made of it."""
        before, ends = self._frame.kinds, []
        for way in ways:
            self._frame.kinds = dict(before)
            self._block(way)
            ends.append(self._frame.kinds)
        names = dict.fromkeys(name for end in ends for name in end)
        merged = {}
        for name in names:
            kind = HOST
            for end in ends:
                kind = join(kind, end.get(name, HOST))
            merged[name] = kind
        self._frame.kinds = merged

    def _loop(self, node: ast.For | ast.While) -> None:
        # Twice: what a loop assigns reaches its beginning.
        self._block(node.body)
        self._block(node.body)
        self._block(node.orelse)

    def _store(self, target: ast.expr, kind: str, value: ast.expr | None) -> None:
        if isinstance(target, ast.Subscript):
            self._masked_store(target, value, kind)
        elif isinstance(target, ast.Attribute):
            owner = self._value(target.value)
            if self._shape(owner) is not None and (
                allocates(value) or (kind in (TENSOR, MASK) and _computes(value))
            ):
                message = f"{ast.unparse(target)} is a new tensor, which outlives the call"
                self._tell(BreachKind.ALLOCATION, target, message)
        else:
            self._bind(target, kind, value)

    def _masked_store(
        self,
        target: ast.Subscript,
        value: ast.expr | None,
        kind: str,
    ) -> None:
        """``x[mask] = number`` is a fill; with a tensor the mask's true values are counted."""
        self._subscript(target)
        parts = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
        masks = [part for part in parts if self._value(part) == MASK]
        if masks and kind in (TENSOR, MASK):
            message = f"{ast.unparse(target)} = … counts the true values of the mask"
            self._tell(BreachKind.DYNAMIC_SHAPE, target, message)

    def _value(self, node: ast.expr | None) -> str:
        """Return the kind of an expression, reporting what it does on the way."""
        match node:
            case None:
                return HOST
            case ast.Name(id=name):
                return self._frame.kinds.get(name, HOST)
            case ast.Attribute(value=owner, attr=name):
                return self._attribute(self._value(owner), name)
            case ast.Subscript():
                return self._subscript(node)
            case ast.Call():
                return self._call(node)
            case ast.BinOp(left=left, right=right):
                kinds = {self._value(left), self._value(right)}
                if isinstance(node.op, ast.Mod) and isinstance(left, ast.Constant | ast.JoinedStr):
                    self._output(right, node)
                    return HOST
                bitwise = isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor)
                if MASK in kinds and bitwise:
                    return MASK
                if kinds == {TENSORS}:
                    return TENSORS
                return TENSOR if kinds & {TENSOR, MASK} else HOST
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self._decide(operand, "not")
                return HOST
            case ast.UnaryOp(operand=operand):
                return self._value(operand)
            case ast.Compare():
                return self._compare(node)
            case ast.BoolOp(values=values):
                for operand in values[:-1]:
                    word = "and" if isinstance(node.op, ast.And) else "or"
                    self._decide(operand, word)
                return self._value(values[-1])
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self._decide(test, "if")
                return join(self._value(body), self._value(orelse))
            case ast.NamedExpr(target=target, value=inner):
                kind = self._value(inner)
                self._bind(target, kind)
                return kind
            case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
                kinds = {self._value(one) for one in elements}
                return TENSORS if kinds & {TENSOR, MASK, TENSORS} else HOST
            case ast.Starred(value=inner) | ast.Await(value=inner):
                return self._value(inner)
            case ast.Yield(value=inner) | ast.YieldFrom(value=inner):
                self._value(inner)
                return HOST
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                self._comprehension(node.generators)
                kind = self._value(node.elt)
                return TENSORS if kind in (TENSOR, MASK) else HOST
            case ast.DictComp():
                self._comprehension(node.generators)
                self._value(node.value)
                return HOST
            case ast.JoinedStr(values=values):
                for part in values:
                    if isinstance(part, ast.FormattedValue):
                        self._output(part.value, node)
                return HOST
            case ast.Dict(values=values):
                for inner in values:
                    self._value(inner)
                return HOST
            case _:
                return HOST

    def _decide(self, test: ast.expr, what: str) -> None:
        """Evaluate an expression whose truth Python asks for."""
        if self._value(test) in (TENSOR, MASK):
            message = f"{what} {ast.unparse(test)} decides by the value of a tensor"
            self._tell(BreachKind.BRANCH, test, message)

    def _subscript(self, node: ast.Subscript) -> str:
        """Return the kind of a part, reporting bounds and masks that are asked for their values."""
        owner = self._value(node.value)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for part in parts:
            if isinstance(part, ast.Slice):
                for bound in (part.lower, part.upper, part.step):
                    if self._value(bound) in (TENSOR, MASK):
                        message = f"the slice bound {ast.unparse(node)} is the value of a tensor"
                        self._tell(BreachKind.BRANCH, node, message)
                continue
            kind = self._value(part)
            if kind == MASK and owner in (TENSOR, MASK, HOST) and isinstance(node.ctx, ast.Load):
                message = f"{ast.unparse(node)} has as many rows as the mask has true values"
                self._tell(BreachKind.DYNAMIC_SHAPE, node, message)
        if owner == TENSORS:
            return TENSORS if any(isinstance(part, ast.Slice) for part in parts) else TENSOR
        return owner if owner in (TENSOR, MASK) else HOST

    def _bind(
        self,
        target: ast.expr,
        kind: str,
        value: ast.expr | None = None,
    ) -> None:
        """Let a target be of a kind; the parts of a tuple are what the parts of its value are."""
        if isinstance(target, ast.Name):
            self._frame.kinds[target.id] = kind
            self._frame.methods.pop(target.id, None)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, kind)
        elif isinstance(target, ast.Tuple | ast.List):
            parts = value.elts if isinstance(value, ast.Tuple | ast.List) else None
            for number, part in enumerate(target.elts):
                if parts is not None and len(parts) == len(target.elts):
                    self._bind(part, self._value(parts[number]))
                else:
                    self._bind(part, element(kind))

    def _bind_each(self, target: ast.expr, iterated: ast.expr) -> None:
        """Let the target of a loop be what the elements of ``iterated`` are."""
        kind = self._value(iterated)
        parts = target.elts if isinstance(target, ast.Tuple | ast.List) else []
        match iterated:
            case ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]) if len(parts) == 2:
                self._bind(parts[0], HOST)
                self._bind_each(parts[1], inner)
            case ast.Call(func=ast.Name(id="zip"), args=given) if len(given) == len(parts):
                for part, inner in zip(parts, given, strict=True):
                    self._bind_each(part, inner)
            case _:
                self._bind(target, element(kind))

    def _attribute(self, owner: str, name: str) -> str:
        if owner in (TENSOR, MASK):
            return owner if name in VIEWS else HOST
        if owner == BATCH and name in tensor_fields("ForwardBatch"):
            return MASK if name in _MASK_FIELDS else TENSOR
        if owner == META and name in tensor_fields("ShortConvMetadata"):
            return MASK if name in _MASK_FIELDS else TENSOR
        if owner == SELF and name == "forward_metadata":
            return META
        shape = self._shape(owner)
        if shape is None:
            return HOST
        computed = [one for one in shape.methods.get(name, ()) if one.kind in _COMPUTED]
        if computed:
            return self._read_attribute(computed, owner)
        return shape.attributes.get(name, HOST)

    def _compare(self, node: ast.Compare) -> str:
        operands = [node.left, *node.comparators]
        kinds = [self._value(operand) for operand in operands]
        tensors = any(kind in (TENSOR, MASK) for kind in kinds)
        if all(isinstance(operator, ast.Is | ast.IsNot) for operator in node.ops):
            return HOST
        if tensors and any(isinstance(operator, ast.In | ast.NotIn) for operator in node.ops):
            message = f"{ast.unparse(node)} compares the values of a tensor in Python"
            self._tell(BreachKind.BRANCH, node, message)
            return HOST
        if tensors and len(node.ops) > 1:
            message = f"{ast.unparse(node)} is a chain, which asks for the truth of a tensor"
            self._tell(BreachKind.BRANCH, node, message)
        return MASK if tensors else HOST

    def _comprehension(self, generators: Iterable[ast.comprehension]) -> None:
        for generator in generators:
            self._bind_each(generator.target, generator.iter)
            for test in generator.ifs:
                self._decide(test, "if")

    def _call(self, node: ast.Call) -> str:
        """Return the kind of a call's result, reporting what it does."""
        kinds = [self._value(argument) for argument in node.args]
        named = {keyword.arg or "**": self._value(keyword.value) for keyword in node.keywords}
        function = self._called(node.func)
        if isinstance(function, ast.Attribute):
            if _is_super(function.value):
                return self._methods(self._inherited(function.attr), kinds, named, SELF)
            owner = self._value(function.value)
            shape = self._shape(owner)
            if shape is not None:
                variants = shape.methods.get(function.attr, [])
                if function.attr in shape.attributes:
                    return self._object(shape.attributes[function.attr], kinds, named)
                return self._methods(variants, kinds, named, owner)
            if owner in (*_TENSOR_LIKE, TENSORS):
                return self._tensor_method(node, function, owner, kinds)
        if isinstance(function, ast.Name | ast.Call):
            kind = self._value(function)
            if self._shape(kind) is not None:
                return self._object(kind, kinds, named)
        found = self.project.evaluate(function, self._frame.inside)
        paths = {one.path for one in found}
        if "functools.partial" in paths and node.args:
            # It will be called with these arguments, and perhaps with more.
            made = ast.Call(func=node.args[0], args=node.args[1:], keywords=node.keywords)
            return self._call(ast.copy_location(made, node))
        if self._outside(node, paths, [*kinds, *named.values()]):
            return HOST
        torch_names = {path.rpartition(".")[2] for path in paths if path.startswith("torch.")}
        if torch_names:
            return self._of_torch(node, torch_names, kinds, named)
        if isinstance(function, ast.Name) and f"builtins.{function.id}" in paths:
            return self._of_builtin(node, function.id, kinds)
        if isinstance(function, ast.Attribute):
            self._unknown(node, function, found, [*kinds, *named.values()])
        result = HOST
        for one in found:
            if one.place is None or isinstance(function, ast.Subscript):
                continue  # kernel[grid](...) is no Python
            if isinstance(one.node, ast.FunctionDef | ast.Lambda):
                result = self._function(one.node, one.place, kinds, named, result)
            elif isinstance(one.node, ast.ClassDef):
                result = self._constructor(one, kinds, named)
        return result

    def _read_attribute(self, variants: list[Method], owner: str) -> str:
        """Follow functions that reading an attribute runs; return the kind of their result."""
        return self._methods(variants, [], {}, owner)

    def _context(self, kind: str) -> str:
        """Follow what a ``with`` on an object of this kind runs; return what it enters with."""
        shape = self._shape(kind)
        if shape is None:
            return kind
        self._methods(shape.methods.get("__exit__", []), [], {}, kind)
        return self._methods(shape.methods.get("__enter__", []), [], {}, kind)

    def _called(self, function: ast.expr) -> ast.expr:
        """Return the attribute behind a local name for a method, or behind getattr."""
        match function:
            case ast.Name(id=name) if name in self._frame.methods:
                return self._frame.methods[name]
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name))]):
                attribute = ast.Attribute(value=owner, attr=name, ctx=ast.Load())
                return ast.copy_location(attribute, function)
            case _:
                return function

    def _methods(
        self,
        variants: list[Method],
        kinds: list[str],
        named: dict[str, str],
        owner: str,
    ) -> str:
        """Follow a call of a method, whichever of its variants it is."""
        result = HOST
        for method in variants:
            if method.function is None or method.place is None or method.kind == "class":
                continue
            bound = None if method.kind == "staticmethod" else owner
            around = [*method.wrappers, Wrapper(method.function, method.place)]
            result = self._run(around, kinds, named, method.owner, bound, result)
        return result

    def _run(
        self,
        functions: list[Wrapper],
        kinds: list[str],
        named: dict[str, str],
        owner: ClassRef | None,
        bound: str | None,
        result: str,
    ) -> str:
        """Follow a function and what is wrapped around it; return the kind of the result."""
        for function, place in functions:
            passed = _arguments(function, kinds, named, bound=bound is not None)
            depth = self._frame.depth + 1
            kind = self._follow(function, place, passed, owner, depth, bound=bound)
            result = kind if kind != HOST else result
        return result

    def _object(self, kind: str, kinds: list[str], named: dict[str, str]) -> str:
        """Follow the call of an object."""
        shape = self._shape(kind)
        variants = [] if shape is None else shape.methods.get("__call__", [])
        return self._methods(variants, kinds, named, kind)

    def _inherited(self, name: str) -> list[Method]:
        owner = self._frame.owner
        order = self.backend.order
        nodes = [ref.node for ref in order]
        if owner is None or owner.node not in nodes:
            return []
        below: list[ClassRef] = list(order[nodes.index(owner.node) + 1 :])
        return self.shapes.members.named(below, name)

    def _function(
        self,
        function: Function,
        place: Place,
        kinds: list[str],
        named: dict[str, str],
        result: str,
    ) -> str:
        if not self.reported(place.source.path):
            # Other packages' functions are theirs to check; only the result matters here.
            promised = annotated(self.project, getattr(function, "returns", None), place)
            return promised if promised != HOST else result
        if any(self._compiles(one, place) for one in getattr(function, "decorator_list", [])):
            return result
        around = wrappers_of(self.project, function, place)
        functions = [*around, Wrapper(function, place)]
        return self._run(functions, kinds, named, None, None, result)

    def _compiles(self, decorator: ast.expr, place: Place) -> bool:
        """Whether a decorator makes a device kernel of a function, so that it is no Python."""
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        paths = self.project.paths(target, place)
        return any(path.rpartition(".")[2] in ("jit", "kernel", "prim_func") for path in paths)

    def _constructor(self, found: Found, kinds: list[str], named: dict[str, str]) -> str:
        kind = object_kind(found.path)
        shape = self._shape(kind)
        own = found.place is not None and self.reported(found.place.source.path)
        if shape is not None and own:
            self._methods(shape.methods.get("__init__", []), kinds, named, kind)
        return kind

    def _output(self, shown: ast.expr, node: ast.AST) -> None:
        """Report an expression that is formatted, if it is a tensor."""
        if self._value(shown) in (*_TENSOR_LIKE, TENSORS):
            message = f"{ast.unparse(shown)} is formatted, which copies the tensor to the host"
            self._tell(BreachKind.OUTPUT, node, message)

    def _outside(self, node: ast.Call, paths: set[str], kinds: list[str]) -> bool:
        """Report a tensor that is handed to a library of host numbers."""
        tops = {path.partition(".")[0] for path in paths}
        if not any(kind in (*_TENSOR_LIKE, TENSORS) for kind in kinds):
            return False
        if "numpy" in tops:
            self._sync(node, ast.unparse(node))
        elif "math" in tops or paths & _OPERATORS:
            message = f"{ast.unparse(node)} asks a tensor for its value"
            self._tell(BreachKind.BRANCH, node, message)
        return bool(tops & {"math", "numpy"} or paths & _OPERATORS)

    def _sync(self, node: ast.AST, what: str) -> None:
        message = f"{what} makes the host wait for a value of the device"
        self._tell(BreachKind.SYNC, node, message)

    def _upload(self, node: ast.AST, what: str) -> None:
        message = f"{what} copies values of the host to the device, and waits for that"
        self._tell(BreachKind.SYNC, node, message)

    def _is_literal(self, node: ast.Call) -> bool:
        """Whether a tensor is made of Python values that the source shows."""
        given = node.args[:1] or [one.value for one in node.keywords if one.arg == "data"]
        literal = ast.Constant | ast.List | ast.ListComp | ast.Tuple | ast.UnaryOp
        return any(
            isinstance(found.node, literal)
            for argument in given
            for found in self.project.evaluate(argument, self._frame.inside)
        ) and not any(self._value(one) in (*_TENSOR_LIKE, TENSORS) for one in given)

    def _goes_to_a_device(self, node: ast.Call) -> bool:
        named = any(one.arg == "device" for one in node.keywords)
        return named and self._is_literal(node) and not self._names_cpu(node)

    def _dynamic(self, node: ast.AST, what: str) -> str:
        message = f"{what} has a shape that depends on values"
        self._tell(BreachKind.DYNAMIC_SHAPE, node, message)
        return TENSOR

    def _allocation(self, node: ast.AST, what: str) -> str:
        # Elsewhere a result is new memory by nature, and lives in the graph's own pool.
        if self.hook.name == "init_forward_metadata_in_graph":
            message = f"{what} allocates"
            self._tell(BreachKind.ALLOCATION, node, message)
        return TENSOR

    def _tensor_method(
        self, node: ast.Call, function: ast.Attribute, owner: str, kinds: list[str]
    ) -> str:
        """Return the kind of what a method of a tensor, or of a sequence of some, returns."""
        name, shown = function.attr, ast.unparse(node)
        if owner == TENSORS:
            return HOST if name not in ("pop", "copy") else TENSOR
        if name in SYNCING_METHODS or name in SYNCING_FUNCTIONS:
            self._sync(node, shown)
            return TENSOR if name == "cpu" else HOST
        if name == "to" and self._names_cpu(node):
            self._sync(node, shown)
        elif name in DYNAMIC or (name == "repeat_interleave" and _counts_values(node, kinds)):
            return self._dynamic(node, shown)
        elif name in ALLOCATING:
            if name == "new_tensor" and self._is_literal(node):
                self._upload(node, shown)
                return TENSOR
            return self._allocation(node, shown)
        if name in HOST_METHODS:
            return HOST
        if name in SEQUENCES:
            return TENSORS
        return MASK if name in BOOLEAN or (name == "to" and _names_bool(node)) else TENSOR

    def _names_cpu(self, node: ast.Call) -> bool:
        given = [*node.args, *(one.value for one in node.keywords if one.arg == "device")]
        for argument in given:
            for found in self.project.evaluate(argument, self._frame.inside):
                device = found.node
                if isinstance(device, ast.Call) and device.args:
                    device = device.args[0]
                if isinstance(device, ast.Constant) and device.value == "cpu":
                    return True
        return False

    def _of_torch(
        self, node: ast.Call, names: set[str], kinds: list[str], named: dict[str, str]
    ) -> str:
        """Return the kind of what a function of torch returns."""
        shown = ast.unparse(node.func)
        if names & SYNCING_FUNCTIONS:
            self._sync(node, f"{shown}()")
            return HOST
        if names & DYNAMIC or ("where" in names and len(node.args) + len(node.keywords) == 1):
            return self._dynamic(node, f"{shown}()")
        if "repeat_interleave" in names and _counts_values(node, kinds[1:]):
            return self._dynamic(node, f"{shown}()")
        if names & {"as_tensor", "tensor"} and self._goes_to_a_device(node):
            self._upload(node, f"{shown}()")
            return TENSOR
        if names & ALLOCATING:
            return self._allocation(node, f"{shown}()")
        if names & SEQUENCES:
            return TENSORS
        if names & HOST_FUNCTIONS:
            return HOST
        if names & BOOLEAN:
            return MASK
        touched = {*kinds, *named.values()} & {*_TENSOR_LIKE, TENSORS}
        return TENSOR if touched else HOST

    def _of_builtin(self, node: ast.Call, name: str, kinds: list[str]) -> str:
        """Return the kind of what a built-in returns."""
        tensors = [
            argument
            for argument, kind in zip(node.args, kinds, strict=True)
            if kind in _TENSOR_LIKE
        ]
        if name in _ASKING and tensors:
            message = f"{ast.unparse(node)} asks a tensor for its value"
            self._tell(BreachKind.BRANCH, node, message)
        elif (name in _COMPARING and tensors) or (name in _MAPPING and _asks_each(node, kinds)):
            message = f"{ast.unparse(node)} compares the values of a tensor in Python"
            self._tell(BreachKind.BRANCH, node, message)
        elif name in _SHOWING:
            for argument in node.args:
                self._output(argument, node)
        elif name in ("list", "tuple", "reversed", "enumerate", "zip") and (
            tensors or TENSORS in kinds
        ):
            return TENSORS
        elif (name == "sum" and TENSORS in kinds) or (name == "abs" and tensors):
            return TENSOR
        return HOST

    def _unknown(
        self, node: ast.Call, function: ast.Attribute, found: list[Found], kinds: list[str]
    ) -> None:
        """A call on something that is not known: some are wrong on anything."""
        name = function.attr
        if any(one.node is not None for one in found):
            return
        if name in SYNCING_METHODS and not node.args:
            self._sync(node, ast.unparse(node))
        elif name == "nonzero" and not node.args:
            self._dynamic(node, ast.unparse(node))
        elif name == "to" and self._names_cpu(node):
            self._sync(node, ast.unparse(node))
        elif name in (*LOGGING, "format") and any(
            kind in (*_TENSOR_LIKE, TENSORS) for kind in kinds
        ):
            message = f"{ast.unparse(node)} formats a tensor, which copies it to the host"
            self._tell(BreachKind.OUTPUT, node, message)


def _computes(value: ast.expr | None) -> bool:
    """Whether an expression on tensors has a result of its own, and is no view or alias."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Attribute) and value.func.attr == "clone"
    return isinstance(value, ast.BinOp | ast.Compare | ast.UnaryOp)


def _arguments(
    function: Function, kinds: list[str], named: dict[str, str], *, bound: bool
) -> dict[str, str]:
    names = [one.arg for one in [*function.args.posonlyargs, *function.args.args]][int(bound) :]
    passed = dict(zip(names, kinds, strict=False))
    known = {*names, *(one.arg for one in function.args.kwonlyargs)}
    return passed | {name: kind for name, kind in named.items() if name in known}


def _is_super(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    )


def _names_bool(node: ast.Call) -> bool:
    given = [*node.args, *(one.value for one in node.keywords if one.arg == "dtype")]
    return any(isinstance(one, ast.Attribute) and one.attr == "bool" for one in given)


def _asks_each(node: ast.Call, kinds: list[str]) -> bool:
    """Whether ``map`` or ``filter`` asks each element of a tensor for its value."""
    function = node.args[0] if node.args else None
    name = getattr(function, "id", None if isinstance(function, ast.Constant) else "")
    asks = name is None or name in _ASKING
    return asks and any(kind in (*_TENSOR_LIKE, TENSORS) for kind in kinds[1:])


def _counts_values(node: ast.Call, kinds: list[str]) -> bool:
    known = any(keyword.arg == "output_size" for keyword in node.keywords)
    return not known and any(kind in _TENSOR_LIKE for kind in kinds)
