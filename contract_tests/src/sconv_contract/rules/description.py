"""SCV203, SCV205 and SCV211 to SCV213: an entry point, and what its plugin says of itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, Final

from sconv import CONTRACT_VERSION, BackendInfo, Capabilities
from sconv.discovery.installed import canonical
from sconv.discovery.name_conflicts import OWNERS, RESERVED
from sconv.messages import did_you_mean

from ..findings import Finding, Where
from ..source.methods import Function, own_nodes
from ..source.resolve import ClassRef, Place, Project, Source
from .discovery import (
    DeclaredBackend,
    Description,
    Discovered,
    given_capabilities,
    literal_capabilities,
    told,
)
from .rule import Rule
from .subjects import Undeclared
from .unverifiable import CLASS, question

__all__ = ["RULES"]

_INFO_FIELDS: Final = ("name", "device_type", "contract", "factory", "probe", "capabilities")
_CHOICES: Final = {
    "window_axes": ("time", "channel"),
    "window_layouts": ("dense", "dedup", "inputs"),
    "dtypes": ("bfloat16", "float16", "float32"),
}


class EntryPointRule(Rule[DeclaredBackend | Undeclared]):
    """The entry point names an object of a class with sconv_backend, under a name of its own.

    A plugin whose entry point does not resolve is listed as broken, and nothing else of it runs.
    """

    id = "SCV203"
    name = "entry point"
    example = (
        '[project.entry-points."sconv.backends"]\nnpu = "sconv_npu.plugin:NpuPlugin"  # a class'
    )
    fix = "Let it name an instance: plugin = NpuPlugin()."
    scope = DeclaredBackend | Undeclared

    def check(self, subject: DeclaredBackend | Undeclared) -> Iterator[Finding]:
        if isinstance(subject, Undeclared):
            yield self._undeclared(subject)
            return
        run, point, where = subject.run, subject.point, subject.where
        distribution = run.target.distribution
        if point.name in RESERVED:
            yield self.found(where, f"the name {point.name!r} is reserved")
        owner = OWNERS.get(point.name)
        if owner and distribution and canonical(distribution) != owner:
            yield self.found(where, f"the name {point.name!r} belongs to {owner}")
        for trouble in subject.plugin[1]:
            yield told(self, run, trouble, DeclaredBackend)
        for description in subject.descriptions:
            name = _string(run.project, description, "name")
            if name is not None and name != point.name:
                yield self.found(
                    description.where,
                    f"it calls itself {name!r} and its entry point {point.name!r}",
                    fix="Make them the same.",
                )

    def _undeclared(self, subject: Undeclared) -> Finding:
        target = subject.run.target
        if target.unread is not None:
            return question(
                subject.run,
                Where(target.unread),
                "entry points that setup.py declares are not read",
                DeclaredBackend,
                Discovered,
                fix="Declare them in pyproject.toml, or verify the installed distribution by name.",
            )
        return self.found(
            Where(target.pyproject or target.base),
            f"{target.name} declares no entry point of the group sconv.backends",
            fix='Add [project.entry-points."sconv.backends"] with name = "module:attr".',
        )


class ContractVersion(Rule[DeclaredBackend]):
    """BackendInfo.contract is a literal (major, minor), or a Final one of the same module, that
    this core keeps.

    A computed version cannot be read without importing the plugin, and one of another major is
    refused at load.
    """

    id = "SCV205"
    name = "contract version"
    example = "BackendInfo(..., contract=sconv.CONTRACT_VERSION)"
    fix = f"Write the version that the plugin was made for, such as contract={CONTRACT_VERSION}."
    scope = DeclaredBackend

    def check(self, subject: DeclaredBackend) -> Iterator[Finding]:
        for description in subject.descriptions:
            expression = description.fields.get("contract")
            if expression is not None:
                yield from self._version(description, expression)

    def _version(self, description: Description, expression: ast.expr) -> Iterator[Finding]:
        where, source = description.where, description.place.source
        try:
            value = ast.literal_eval(_behind_final(expression, source) or expression)
        except ValueError:
            yield self.found(
                where,
                f"BackendInfo.contract is {ast.unparse(expression)}, neither a literal nor a name"
                " that this module declares Final and gives one",
            )
            return
        if not (isinstance(value, tuple) and [type(part) for part in value] == [int, int]):
            yield self.found(where, f"BackendInfo.contract is {value!r}, not two ints")
        elif value[0] != CONTRACT_VERSION[0] or value[1] > CONTRACT_VERSION[1]:
            here = ".".join(map(str, CONTRACT_VERSION))
            older = "sconv-core" if value > CONTRACT_VERSION else "the plugin"
            yield self.found(
                where,
                f"it keeps contract {value[0]}.{value[1]} and this sconv-core has {here}",
                fix=f"Upgrade {older}.",
            )


class FactoryRule(Rule[DeclaredBackend]):
    """BackendInfo.factory is a literal "module:attr" that can be called with spec, device and pool.

    It is imported when the backend is selected; a wrong reference fails in front of the user.
    """

    id = "SCV211"
    name = "factory"
    example = 'BackendInfo(..., factory="sconv_npu.backend:creat")'
    fix = "Let it name a function or class that takes spec, device and pool by name."
    scope = DeclaredBackend

    def check(self, subject: DeclaredBackend) -> Iterator[Finding]:
        for factory in subject.factories:
            yield from _not_a_string(self, subject.run.project, factory.description, "factory")
            for trouble in factory.troubles:
                yield told(self, subject.run, trouble, *CLASS)


class Probe(Rule[DeclaredBackend]):
    """The probe takes nothing and answers Available(priority) or Unavailable(reason).

    A bool gives a user no reason, and a probe that raises is listed as broken.
    """

    id = "SCV212"
    name = "probe"
    example = "def probe():\n    return torch_npu is not None"
    fix = "Return sconv.Available(priority) or sconv.Unavailable('what is missing')."
    scope = DeclaredBackend

    def check(self, subject: DeclaredBackend) -> Iterator[Finding]:
        project = subject.run.project
        for description in subject.descriptions:
            place, expression = description.place, description.fields.get("probe")
            for found in project.evaluate(expression, place) if expression is not None else ():
                node = found.node
                if isinstance(node, ast.AsyncFunctionDef):
                    yield self.found(Where.of(place.source.path, node), "the probe is async")
                elif isinstance(node, ast.FunctionDef | ast.Lambda) and found.place is not None:
                    yield from self._function(project, node, found.place)
                elif isinstance(node, ast.Constant):
                    text = f"the probe is {node.value!r}, not a function"
                    yield self.found(description.where, text)

    def _function(self, project: Project, node: Function, place: Place) -> Iterator[Finding]:
        where = Where.of(place.source.path, node)
        required = len(node.args.posonlyargs) + len(node.args.args) - len(node.args.defaults)
        bound = bool(place.chain) and isinstance(place.chain[-1], ast.ClassDef)
        if required > int(bound) or any(default is None for default in node.args.kw_defaults):
            yield self.found(where, "the probe has parameters, and is called with nothing")
        values: list[ast.expr | None]
        if isinstance(node, ast.Lambda):
            values = [node.body]
        else:
            values = [each.value for each in own_nodes(node) if isinstance(each, ast.Return)]
        if not values:
            yield self.found(where, "the probe returns nothing")
        for value in values:
            answers = [value]
            if isinstance(value, ast.IfExp):
                answers = [value.body, value.orelse]
            for answer in answers:
                yield from self._answer(project, answer, place.inside(node), where)

    def _answer(
        self, project: Project, answer: ast.expr | None, place: Place, where: Where
    ) -> Iterator[Finding]:
        if answer is None or isinstance(
            answer, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant
        ):
            shown = "None" if answer is None else ast.unparse(answer)
            yield self.found(where, f"the probe returns {shown}: neither Available nor Unavailable")
        elif isinstance(answer, ast.Call):
            paths = project.paths(answer.func, place)
            if paths & {
                "builtins.bool",
                "builtins.isinstance",
                "builtins.hasattr",
                "builtins.any",
                "torch.cuda.is_available",
                "torch.npu.is_available",
            }:
                yield self.found(where, f"the probe returns {ast.unparse(answer)}, which is a bool")
            given = [*answer.args, *(keyword.value for keyword in answer.keywords)]
            if paths & {"sconv.Available", "sconv.hookspecs.Available"} and len(given) == 1:
                try:
                    priority = project.constant(given[0], place)
                except ValueError:
                    return
                if type(priority) is not int:
                    yield self.found(
                        where, f"the probe answers Available({priority!r}), not an int"
                    )


class DescriptionRule(Rule[DeclaredBackend]):
    """sconv_backend() returns a BackendInfo with the fields that it has, of the right types.

    A wrong field is a TypeError at discovery, and a misspelt capability is never matched.
    """

    id = "SCV213"
    name = "description"
    example = 'Capabilities(window_axes=("times",))'
    fix = "Correct the field; sconv.BackendInfo and sconv.Capabilities list them."
    scope = DeclaredBackend

    def check(self, subject: DeclaredBackend) -> Iterator[Finding]:
        project = subject.run.project
        for trouble in subject.undescribed:
            yield told(self, subject.run, trouble, DeclaredBackend)
        for description in subject.descriptions:
            yield from self._fields(description)
            for call, place in description.capabilities:
                yield from self._capabilities(project, call, place)
            for field in ("name", "device_type"):
                yield from _not_a_string(self, project, description, field)
        for factory in subject.factories:
            for ref in factory.classes:
                yield from self._layouts(project, ref, factory.description)

    def _fields(self, description: Description) -> Iterator[Finding]:
        for name in description.fields:
            if name not in BackendInfo.__dataclass_fields__:
                near = did_you_mean(name, _INFO_FIELDS)
                yield self.found(description.where, f"BackendInfo has no field {name!r}{near}")
        for name in _INFO_FIELDS[:-1]:
            if name not in description.fields:
                yield self.found(description.where, f"BackendInfo lacks the field {name!r}")

    def _capabilities(self, project: Project, call: ast.Call, place: Place) -> Iterator[Finding]:
        where = Where.of(place.source.path, call)
        known = Capabilities.__dataclass_fields__
        for name, expression in given_capabilities(call).items():
            if name not in known:
                text = f"Capabilities has no field {name!r}{did_you_mean(name, known)}"
                yield self.found(where, text)
                continue
            try:
                values = project.constant(expression, place)
            except ValueError:
                continue
            for value in values if name in _CHOICES else ():
                if value not in _CHOICES[name]:
                    near = did_you_mean(str(value), _CHOICES[name])
                    yield self.found(where, f"Capabilities.{name} holds {value!r}{near}")

    def _layouts(
        self, project: Project, ref: ClassRef, description: Description
    ) -> Iterator[Finding]:
        """Compare the window layouts that a class keeps with those that its plugin declares."""
        literals = literal_capabilities(project, description)
        declared = literals.get("window_layouts", Capabilities().window_layouts)
        for base in project.mro(ref)[0][0]:
            known = project.scope(base.node).get("window_layouts")
            if known is None:
                continue
            value = getattr(known.definitions[-1], "value", None)
            try:
                kept = tuple(project.constant(value, base.inside)) if value is not None else None
            except (TypeError, ValueError):
                return
            if kept is None or not declared:
                return
            if declared[0] != kept[0] or not set(declared) <= set(kept):
                yield self.found(
                    description.where,
                    f"Capabilities.window_layouts is {tuple(declared)}, and {ref.node.name} keeps"
                    f" {kept}",
                    fix="Declare what the class keeps, first choice first.",
                )
            return


RULES: Final = (
    EntryPointRule(),
    ContractVersion(),
    FactoryRule(),
    Probe(),
    DescriptionRule(),
)


def _string(project: Project, description: Description, field: str) -> str | None:
    """Return a field that is a literal string with something in it."""
    try:
        value = project.constant(description.fields[field], description.place)
    except (KeyError, ValueError):
        return None
    return value if isinstance(value, str) and value else None


def _not_a_string(
    rule: Rule[Any], project: Project, description: Description, field: str
) -> Iterator[Finding]:
    if field not in description.fields:
        return
    where, expression = description.where, description.fields[field]
    try:
        value = project.constant(expression, description.place)
    except ValueError:
        text = f"BackendInfo.{field} is {ast.unparse(expression)}, not a literal string"
        yield rule.found(where, text, fix="Write the string itself.")
        return
    if not isinstance(value, str) or not value:
        yield rule.found(where, f"BackendInfo.{field} is {value!r}, not a string")


def _behind_final(expression: ast.expr, source: Source) -> ast.expr | None:
    """Return the value of a name that the top of a module gives one and declares Final."""
    known = source.scope.get(expression.id) if isinstance(expression, ast.Name) else None
    if known is None or len(known.definitions) != 1:
        return None
    match known.definitions[0]:
        case ast.AnnAssign(annotation=annotation, value=value):
            name = ast.unparse(annotation).partition("[")[0]
            return value if name.rpartition(".")[2] == "Final" else None
        case _:
            return None
