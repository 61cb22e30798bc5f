"""SCV205 and SCV211 to SCV213: what a plugin says of itself in its BackendInfo."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sconv import CONTRACT_VERSION, BackendInfo, Capabilities
from sconv.messages import did_you_mean

from ..findings import Finding
from ..methods import Function, own_nodes
from ..resolve import Place, Project, Source
from ..target import EntryPoint
from .entry import ENTRY_POINT, OPEN
from .rule import Rule, Where
from .wiring import UNVERIFIABLE

__all__ = ["FACTORY", "INFO", "RULES", "Description", "read_info"]

CONTRACT: Final = Rule(
    "SCV205",
    "contract version",
    "BackendInfo.contract is a literal (major, minor), or a Final one of the same module, that this"
    " core keeps.",
    "A computed version cannot be read without importing the plugin, and one of another major is"
    " refused at load.",
    "BackendInfo(..., contract=sconv.CONTRACT_VERSION)",
    f"Write the version that the plugin was made for, such as contract={CONTRACT_VERSION}.",
)
FACTORY: Final = Rule(
    "SCV211",
    "factory",
    'BackendInfo.factory is a literal "module:attr" that can be called with spec, device and pool.',
    "It is imported when the backend is selected; a wrong reference fails in front of the user.",
    'BackendInfo(..., factory="sconv_npu.backend:creat")',
    "Let it name a function or class that takes spec, device and pool by name.",
)
PROBE: Final = Rule(
    "SCV212",
    "probe",
    "The probe takes nothing and answers Available(priority) or Unavailable(reason).",
    "A bool gives a user no reason, and a probe that raises is listed as broken.",
    "def probe():\n    return torch_npu is not None",
    "Return sconv.Available(priority) or sconv.Unavailable('what is missing').",
)
INFO: Final = Rule(
    "SCV213",
    "description",
    "sconv_backend() returns a BackendInfo with the fields that it has, of the right types.",
    "A wrong field is a TypeError at discovery, and a misspelt capability is never matched.",
    'Capabilities(window_axes=("times",))',
    "Correct the field; sconv.BackendInfo and sconv.Capabilities list them.",
)

RULES: Final = (CONTRACT, FACTORY, PROBE, INFO)

_INFO_FIELDS: Final = ("name", "device_type", "contract", "factory", "probe", "capabilities")
_CHOICES: Final = {
    "window_axes": ("time", "channel"),
    "window_layouts": ("dense", "dedup", "inputs"),
    "dtypes": ("bfloat16", "float16", "float32"),
}


@dataclass(frozen=True, slots=True)
class Description:
    """What a plugin's BackendInfo call says.

    Attributes:
        call: The call.
        place: Where it stands.
        fields: Its arguments by name.
        capabilities: Literal capabilities by name.
    """

    call: ast.Call
    place: Place
    fields: Mapping[str, ast.expr]
    capabilities: Mapping[str, Any]

    @property
    def where(self) -> Where:
        """The place of the call."""
        return Where.of(self.place.source.path, self.call)


def read_info(
    project: Project, function: Function, place: Place, point: EntryPoint | None
) -> tuple[list[Description], list[Finding]]:
    """Read the BackendInfo that a ``sconv_backend`` method returns, and check its literals."""
    where = Where.of(place.source.path, function)
    inside = place.inside(function)
    described: list[Description] = []
    problems: list[Finding] = []
    returns = [node for node in own_nodes(function) if isinstance(node, ast.Return)]
    values = [node.value for node in returns]
    if isinstance(function, ast.Lambda):
        values = [function.body]
    if not values or any(value is None for value in values):
        problems.append(INFO.found(where, "sconv_backend() returns no BackendInfo"))
    for value in values:
        if value is None:
            continue
        for found in project.evaluate(value, inside):
            call = found.node
            if (
                isinstance(call, ast.Call)
                and found.place is not None
                and project.paths(call.func, found.place)
                & {"sconv.BackendInfo", "sconv.discovery.info.BackendInfo"}
            ):
                description, more = _description(project, call, found.place)
                problems += more
                if description is not None:
                    described.append(description)
                    problems += _literals(project, description, point)
            elif isinstance(call, ast.Constant | ast.Dict | ast.Tuple | ast.List):
                problems.append(INFO.found(where, f"sconv_backend() returns {ast.unparse(call)}"))
            else:
                text = f"sconv_backend() returns {ast.unparse(value)}, which is not followed"
                problems.append(UNVERIFIABLE.found(where, text, leaves_open=OPEN))
    return described, problems


def _description(
    project: Project, call: ast.Call, place: Place
) -> tuple[Description | None, list[Finding]]:
    where = Where.of(place.source.path, call)
    if any(keyword.arg is None for keyword in call.keywords) or any(
        isinstance(argument, ast.Starred) for argument in call.args
    ):
        text = "BackendInfo takes * or **, so that its fields cannot be read"
        return None, [UNVERIFIABLE.found(where, text, leaves_open=OPEN)]
    fields = dict(zip(BackendInfo.__dataclass_fields__, call.args, strict=False))
    fields |= {str(keyword.arg): keyword.value for keyword in call.keywords}
    problems = [
        INFO.found(where, f"BackendInfo has no field {name!r}{did_you_mean(name, _INFO_FIELDS)}")
        for name in fields
        if name not in BackendInfo.__dataclass_fields__
    ]
    problems += [
        INFO.found(where, f"BackendInfo lacks the field {name!r}")
        for name in _INFO_FIELDS[:-1]
        if name not in fields
    ]
    capabilities: dict[str, Any] = {}
    if "capabilities" in fields:
        for found in project.evaluate(fields["capabilities"], place):
            if isinstance(found.node, ast.Call) and found.place is not None:
                capabilities, more = _capabilities(project, found.node, found.place)
                problems += more
    return Description(call, place, fields, capabilities), problems


def _capabilities(
    project: Project, call: ast.Call, place: Place
) -> tuple[dict[str, Any], list[Finding]]:
    where = Where.of(place.source.path, call)
    known = Capabilities.__dataclass_fields__
    given = dict(zip(known, call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    values: dict[str, Any] = {}
    problems = []
    for name, expression in given.items():
        if name not in known:
            text = f"Capabilities has no field {name!r}{did_you_mean(name, known)}"
            problems.append(INFO.found(where, text))
            continue
        try:
            values[name] = project.constant(expression, place)
        except ValueError:
            continue
        for value in values[name] if name in _CHOICES else ():
            if value not in _CHOICES[name]:
                near = did_you_mean(str(value), _CHOICES[name])
                text = f"Capabilities.{name} holds {value!r}{near}"
                problems.append(INFO.found(where, text))
    return values, problems


def _literals(
    project: Project, description: Description, point: EntryPoint | None
) -> Iterator[Finding]:
    where, place = description.where, description.place
    yield from _contract(project, description)
    for field, rule in (("name", INFO), ("device_type", INFO), ("factory", FACTORY)):
        if field not in description.fields:
            continue
        try:
            value = project.constant(description.fields[field], place)
        except ValueError:
            written = ast.unparse(description.fields[field])
            text = f"BackendInfo.{field} is {written}, not a literal string"
            yield rule.found(where, text, fix="Write the string itself.")
            continue
        if not isinstance(value, str) or not value:
            yield rule.found(where, f"BackendInfo.{field} is {value!r}, not a string")
        elif field == "name" and point is not None and value != point.name:
            yield ENTRY_POINT.found(
                where,
                f"it calls itself {value!r} and its entry point {point.name!r}",
                fix="Make them the same.",
            )
    if "probe" in description.fields:
        yield from _probe(project, description.fields["probe"], place, where)


def _contract(project: Project, description: Description) -> Iterator[Finding]:
    expression = description.fields.get("contract")
    if expression is None:
        return
    where = description.where
    try:
        value = ast.literal_eval(_behind_final(expression, description.place.source) or expression)
    except ValueError:
        yield CONTRACT.found(
            where,
            f"BackendInfo.contract is {ast.unparse(expression)}, neither a literal nor a name that"
            " this module declares Final and gives one",
        )
        return
    if not (isinstance(value, tuple) and [type(part) for part in value] == [int, int]):
        yield CONTRACT.found(where, f"BackendInfo.contract is {value!r}, not two ints")
    elif value[0] != CONTRACT_VERSION[0] or value[1] > CONTRACT_VERSION[1]:
        here = ".".join(map(str, CONTRACT_VERSION))
        older = "sconv-core" if value > CONTRACT_VERSION else "the plugin"
        yield CONTRACT.found(
            where,
            f"it keeps contract {value[0]}.{value[1]} and this sconv-core has {here}",
            fix=f"Upgrade {older}.",
        )


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


def _probe(project: Project, expression: ast.expr, place: Place, where: Where) -> Iterator[Finding]:
    for found in project.evaluate(expression, place):
        node = found.node
        if isinstance(node, ast.AsyncFunctionDef):
            yield PROBE.found(Where.of(place.source.path, node), "the probe is async")
        elif isinstance(node, ast.FunctionDef | ast.Lambda) and found.place is not None:
            yield from _probe_function(project, node, found.place)
        elif isinstance(node, ast.Constant):
            yield PROBE.found(where, f"the probe is {node.value!r}, not a function")


def _probe_function(project: Project, node: Function, place: Place) -> Iterator[Finding]:
    where = Where.of(place.source.path, node)
    required = len(node.args.posonlyargs) + len(node.args.args) - len(node.args.defaults)
    bound = bool(place.chain) and isinstance(place.chain[-1], ast.ClassDef)
    if required > int(bound) or any(default is None for default in node.args.kw_defaults):
        yield PROBE.found(where, "the probe has parameters, and is called with nothing")
    values: list[ast.expr | None]
    if isinstance(node, ast.Lambda):
        values = [node.body]
    else:
        values = [each.value for each in own_nodes(node) if isinstance(each, ast.Return)]
    if not values:
        yield PROBE.found(where, "the probe returns nothing")
    for value in values:
        answers = [value]
        if isinstance(value, ast.IfExp):
            answers = [value.body, value.orelse]
        for answer in answers:
            yield from _answer(project, answer, place.inside(node), where)


def _answer(
    project: Project, answer: ast.expr | None, place: Place, where: Where
) -> Iterator[Finding]:
    if answer is None or isinstance(answer, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant):
        shown = "None" if answer is None else ast.unparse(answer)
        yield PROBE.found(where, f"the probe returns {shown}: neither Available nor Unavailable")
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
            yield PROBE.found(where, f"the probe returns {ast.unparse(answer)}, which is a bool")
        given = [*answer.args, *(keyword.value for keyword in answer.keywords)]
        if paths & {"sconv.Available", "sconv.discovery.info.Available"} and len(given) == 1:
            try:
                priority = project.constant(given[0], place)
            except ValueError:
                return
            if type(priority) is not int:
                yield PROBE.found(where, f"the probe answers Available({priority!r}), not an int")
