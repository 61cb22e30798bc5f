"""The static half: every rule on one target."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import sconv.hookspecs

from .bodies import Recorded
from .contract import DISCOVERY, IN_GRAPH, STEP, Hook
from .expected import Expectations
from .findings import Finding, Report
from .members import members
from .resolve import ClassRef, Place, Project, Source
from .rules import RULES
from .rules.afterwards import changed_afterwards, made_otherwise
from .rules.description import Description, read_info
from .rules.entry import ENTRY_POINT, entry_point
from .rules.every import EVERY
from .rules.factory import factory_classes, layouts
from .rules.imports import imports, imports_of_probe
from .rules.reading import stray_marks, unreadable_file
from .rules.rule import Where
from .rules.wiring import UNVERIFIABLE, check_class, marks_hooks
from .scopes import blocks
from .shapes import Shape, shape_of
from .source import walk
from .target import EntryPoint, Target, TargetError

__all__ = ["GRAPH_RULES", "check", "chosen_rules"]

GRAPH_RULES: Final = tuple(rule for rule in RULES if rule.startswith("SCV3"))

_CORE: Final = Path(sconv.hookspecs.__file__).resolve().parent

_ENTRY_RULES: Final = ("SCV203", "SCV204", "SCV205", "SCV211", "SCV212", "SCV213")


def chosen_rules(
    known: Iterable[str], select: Sequence[str] = (), ignore: Sequence[str] = ()
) -> list[str]:
    """Return those rules whose id begins with one of ``select`` and with none of ``ignore``.

    Raises:
        TargetError: A prefix names no rule.
    """
    for prefix in (*select, *ignore):
        if not any(rule.startswith(prefix) for rule in EVERY):
            raise TargetError(f"no rule begins with {prefix!r}; sconv verify --list names them all")
    return [
        rule
        for rule in known
        if (not select or rule.startswith(tuple(select))) and not rule.startswith(tuple(ignore))
    ]


def check(
    target: Target,
    *,
    rules: Sequence[str] = tuple(RULES),
    expectations: Expectations | None = None,
    search_paths: Sequence[Path] = (),
    strict: bool = False,
) -> Report:
    """Check a target and return what was found.

    Args:
        target: What to check.
        rules: Ids of the rules to ask.
        expectations: The vendor's known findings; None = none.
        search_paths: Folders in which other packages lie that it builds on.
        strict: Warnings fail too.
    """
    run = _Check(target, Project([*target.roots, *search_paths]))
    found = [_relative(one, target.base) for one in run.findings() if one.rule in rules]
    # The same breach may be reached in several ways.
    findings = sorted(dict.fromkeys(found))
    if not run.subjects and not findings and not target.declares:
        raise TargetError(
            f"{target.name} has no class with a hook of sconv, so that there is nothing to check"
        )
    stale: list[str] = []
    if expectations is not None:
        findings, stale = expectations.apply(findings, rules)
    return Report(
        target=target.name,
        rules=list(rules),
        findings=findings,
        subjects=run.subjects,
        not_asked={rule: why for rule, why in run.not_asked.items() if rule in rules},
        stale=stale,
        strict=strict,
    )


class _Check:
    def __init__(self, target: Target, project: Project) -> None:
        self.target, self.project = target, project
        self.subjects: list[str] = []
        self.not_asked: dict[str, str] = {}
        self.sources: list[Source] = []
        self._checked: set[ast.AST] = set()
        self._hooked: set[ast.AST] = set()
        self._files: set[Path] = set()
        self._shapes: dict[str, Shape | None] = {}

    def findings(self) -> Iterator[Finding]:
        self._read_all()
        recorded = False
        whole: list[ClassRef] = []
        for point in self.target.entry_points:
            self.subjects.append(f"entry point {point.name} = {point.value}")
            plugins, problems = entry_point(self.project, point, self.target.distribution)
            yield from problems
            yield from imports(self.project, point)
            for plugin in plugins:
                yield from self._class(plugin, DISCOVERY, whole=True)
                for description, more in self._described(plugin, point):
                    yield from more
                    if description is None:
                        continue
                    yield from imports_of_probe(self.project, description)
                    classes, problems = factory_classes(self.project, description)
                    yield from problems
                    for ref in classes:
                        yield from layouts(self.project, ref, description)
                    whole += classes
                    recorded |= description.capabilities.get("graph_capture") is not False
        if not self.target.entry_points:
            yield from self._undeclared()
            whole, recorded = list(self._leaves(STEP)), True
            for ref in self._leaves(DISCOVERY):
                yield from self._class(ref, DISCOVERY, whole=True)
        elif not recorded and whole:
            why = "it declares graph_capture=False, so nothing records its hooks"
            self.not_asked |= dict.fromkeys(GRAPH_RULES, why)
        for ref in whole:
            yield from self._class(ref, STEP, whole=True)
            if recorded:
                yield from self._recorded(ref)
        for ref in self._all_classes():
            if ref.node not in self._checked:
                yield from self._class(ref, STEP | DISCOVERY, whole=False)
        for source in self.sources:
            yield from stray_marks(self.project, source, self._checked)
            yield from changed_afterwards(self.project, source, self._checked, self._hooked)
        for path, problem in self.project.unreadable.items():
            yield unreadable_file(path, problem)

    def _read_all(self) -> None:
        for package in self.target.packages:
            root = next(
                (one for one in self.target.roots if package.is_relative_to(one)), package.parent
            )
            for path in walk(package):
                if path.suffix != ".py":
                    continue
                self._files.add(path)
                source = self.project.source(_module_name(path, root))
                if source is not None and source.path == path:
                    self.sources.append(source)
                elif path not in self.project.unreadable:
                    # A name that another file or an installed package answers to.
                    self._read_hidden(path, root)
        if not self._files:
            raise TargetError(f"{self.target.name} has no Python file to check")

    def _read_hidden(self, path: Path, root: Path) -> None:
        source = self.project.read_file(_module_name(path, root), path)
        if source is not None:
            self.sources.append(source)

    def _undeclared(self) -> Iterator[Finding]:
        if not self.target.declares:
            why = "this is source alone, and only a distribution declares a backend"
            self.not_asked |= dict.fromkeys(_ENTRY_RULES, why)
            return
        where = Where(self.target.pyproject or self.target.base)
        if self.target.unread is not None:
            yield UNVERIFIABLE.found(
                Where(self.target.unread),
                "entry points that setup.py declares are not read",
                fix="Declare them in pyproject.toml, or verify the installed distribution by name.",
                leaves_open=_ENTRY_RULES,
            )
        else:
            yield ENTRY_POINT.found(
                where,
                f"{self.target.name} declares no entry point of the group sconv.backends",
                fix='Add [project.entry-points."sconv.backends"] with name = "module:attr".',
            )

    def _described(
        self, plugin: ClassRef, point: EntryPoint
    ) -> Iterator[tuple[Description | None, list[Finding]]]:
        methods = members(self.project, self.project.mro(plugin)[0][0])
        for variants in methods.values():
            for method in variants:
                if not method.marked or method.hook != "sconv_backend":
                    continue
                if method.function is None or method.place is None:
                    continue
                described, problems = read_info(self.project, method.function, method.place, point)
                yield None, problems
                for description in described:
                    yield description, []

    def _class(self, ref: ClassRef, hooks: Mapping[str, Hook], *, whole: bool) -> list[Finding]:
        if ref.node in self._checked:
            return []
        orders = self.project.mro(ref)[0]
        has_hooks = whole
        for order in orders:
            self._checked |= {one.node for one in order}
            methods = members(self.project, order)
            has_hooks |= marks_hooks(methods)
            for variants in methods.values():
                self._checked |= {one.function for one in variants if one.function is not None}
        found = list(
            check_class(
                self.project, ref, hooks, whole=whole, attributes=whole and "short_conv" in hooks
            )
        )
        if has_hooks:
            self._hooked |= {one.node for order in orders for one in order}
            found += made_otherwise(self.project, ref, orders)
        if whole:
            self.subjects.append(f"class {ref.path}")
        # What an installed base does wrong is its own distribution's to repair.
        return [one for one in found if self._is_ours(Path(one.path)) or one.rule == "SCV207"]

    def _recorded(self, ref: ClassRef) -> Iterator[Finding]:
        for mro in self.project.mro(ref)[0]:
            backend = shape_of(self.project, mro)
            marked = [one for each in backend.methods.values() for one in each if one.marked]
            for method in marked:
                if method.hook in IN_GRAPH:
                    hook = STEP[method.hook]
                    scan = Recorded(
                        self.project, hook, backend, self._is_recorded_here, self._shapes
                    )
                    yield from scan.scan(method)

    def _is_ours(self, path: Path) -> bool:
        return path in self._files or path in (self.target.pyproject, self.target.base)

    def _is_recorded_here(self, path: Path) -> bool:
        return path in self._files and not path.resolve().is_relative_to(_CORE)

    def _all_classes(self) -> Iterator[ClassRef]:
        for source in self.sources:
            yield from _classes(source.tree.body, Place(source))

    def _leaves(self, known: Mapping[str, Hook]) -> Iterable[ClassRef]:
        """Classes with some of these hooks that no other class here builds on."""
        every = list(self._all_classes())
        bases = {
            base.node for ref in every for classes in self.project.bases(ref)[0] for base in classes
        }
        for ref in every:
            if ref.node in bases:
                continue
            methods = members(self.project, self.project.mro(ref)[0][0])
            hooks = {one.hook for each in methods.values() for one in each if one.marked}
            if hooks & known.keys():
                yield ref


def _classes(body: Sequence[ast.stmt], place: Place) -> Iterator[ClassRef]:
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            yield ClassRef(f"{place.path}.{statement.name}", statement, place)
        scoped = isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for block in blocks(statement):
            yield from _classes(block, place.inside(statement) if scoped else place)


def _module_name(path: Path, root: Path) -> str:
    parts = list(path.relative_to(root).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def _relative(finding: Finding, base: Path) -> Finding:
    """Name the file from where the command runs, as a repository does, or else from the target."""
    path, here = Path(finding.path), Path.cwd()
    start = here if base.is_relative_to(here) else base
    shown = path.relative_to(start) if path.is_relative_to(start) else path
    return replace(finding, path=shown.as_posix())
