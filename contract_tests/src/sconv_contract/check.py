"""The static half: every rule on one target."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import sconv.hookspecs

from .expected import Expectations
from .findings import Finding, Report, Where
from .rules import RULES, TEXTS
from .rules.discovery import DeclaredBackend, Discovered, literal_capabilities
from .rules.rule import Rule
from .rules.subjects import (
    ClassSubject,
    Implementation,
    Module,
    Recording,
    Run,
    Undeclared,
    Unread,
)
from .rules.unverifiable import question
from .source.files import walk
from .source.hook_specs import DISCOVERY, STEP, Hook
from .source.resolve import ClassRef, Project, Source
from .target import Target, TargetError

__all__ = ["check", "chosen_rules"]

_CORE: Final = Path(sconv.hookspecs.__file__).resolve().parent


def chosen_rules(
    known: Iterable[str], select: Sequence[str] = (), ignore: Sequence[str] = ()
) -> list[str]:
    """Return those rules whose id begins with one of ``select`` and with none of ``ignore``.

    Raises:
        TargetError: A prefix names no rule.
    """
    for prefix in (*select, *ignore):
        if not any(rule.startswith(prefix) for rule in TEXTS):
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
    with _no_collection():
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
    """Finds what there is to check in a target, and asks every rule about it."""

    def __init__(self, target: Target, project: Project) -> None:
        self.run = Run(target, project, list(RULES.values()))
        self.subjects: list[str] = []
        self.not_asked: dict[str, str] = {}
        self._sources: list[Source] = []

    def findings(self) -> Iterator[Finding]:
        """Ask each rule about each subject that is in its scope."""
        for subject in self._all_subjects():
            for rule in self.run.rules:
                if isinstance(subject, rule.scope):
                    found = self._ask(rule, subject)
                    yield from (one for one in found if self._concerns(subject, rule, one))

    def _ask(self, rule: Rule[Any], subject: object) -> list[Finding]:
        try:
            return list(rule.check(subject))
        except RecursionError:
            where = getattr(subject, "where", Where(self.run.target.base))
            return [question(self.run, where, "code here nests too deeply", *rule.scopes)]

    def _concerns(self, subject: object, rule: Rule[Any], found: Finding) -> bool:
        """Whether a finding is the target's: a fault of an installed base is its own author's."""
        of_class = isinstance(subject, ClassSubject | Implementation)
        return not of_class or rule.foreign or self.run.is_ours(Path(found.path))

    def _all_subjects(self) -> Iterator[object]:
        """Yield what rules are asked about: what is declared first, then whatever is left."""
        target, project = self.run.target, self.run.project
        self._read_all()
        whole: list[ClassRef] = []
        recorded = not target.entry_points
        for point in target.entry_points:
            self.subjects.append(f"entry point {point.name} = {point.value}")
            backend = DeclaredBackend(self.run, point)
            yield backend
            yield Discovered(backend)
            for plugin in backend.plugin[0]:
                yield from self._class(plugin, DISCOVERY, whole=True)
            for factory in backend.factories:
                whole += factory.classes
                known = literal_capabilities(project, factory.description)
                recorded |= known.get("graph_capture") is not False
        if not target.entry_points:
            yield from self._undeclared()
            leaves = list(self._leaves())
            whole = [ref for ref, hooks in leaves if hooks & STEP.keys()]
            for ref in (ref for ref, hooks in leaves if hooks & DISCOVERY.keys()):
                yield from self._class(ref, DISCOVERY, whole=True)
        elif not recorded and whole:
            why = "it declares graph_capture=False, so nothing records its hooks"
            self.not_asked |= dict.fromkeys(self.run.about(Recording), why)
        for ref in whole:
            yield from self._class(ref, STEP, whole=True)
            if recorded:
                yield Recording(self.run, ref, _CORE)
        for ref in self._all_classes:
            yield from self._class(ref, STEP | DISCOVERY, whole=False)
        for source in self._sources:
            yield Module(self.run, source)
        for path, problem in project.unreadable.items():
            yield Unread(self.run, path, problem)

    def _read_all(self) -> None:
        target, project = self.run.target, self.run.project
        for package in target.packages:
            root = next(
                (one for one in target.roots if package.is_relative_to(one)), package.parent
            )
            for path in walk(package):
                if path.suffix != ".py":
                    continue
                self.run.files.add(path)
                name = _module_name(path, root)
                source = project.source(name)
                if source is not None and source.path == path:
                    self._sources.append(source)
                elif path not in project.unreadable:
                    # A name that another file or an installed package answers to.
                    hidden = project.read_file(name, path)
                    self._sources += [hidden] if hidden is not None else []
        if not self.run.files:
            raise TargetError(f"{target.name} has no Python file to check")

    def _undeclared(self) -> Iterator[Undeclared]:
        if self.run.target.declares:
            yield Undeclared(self.run)
        else:
            why = "this is source alone, and only a distribution declares a backend"
            self.not_asked |= dict.fromkeys(self.run.about(DeclaredBackend, Discovered), why)

    def _class(
        self, ref: ClassRef, hooks: Mapping[str, Hook], *, whole: bool
    ) -> Iterator[ClassSubject | Implementation]:
        """Yield a class and what it implements, once, and remember what was checked."""
        run = self.run
        if ref.node in run.checked:
            return
        subject = ClassSubject(run, ref, hooks, whole)
        for order, methods in subject.variants:
            nodes = {one.node for one in order}
            run.checked |= nodes
            run.hooked |= nodes if subject.has_hooks else set()
            for variants in methods.values():
                run.checked |= {one.function for one in variants if one.function is not None}
        if subject.has_hooks:
            yield subject
            yield from subject.implementations()
        if whole:
            self.subjects.append(f"class {ref.path}")

    @cached_property
    def _all_classes(self) -> list[ClassRef]:
        return [
            ClassRef(f"{place.path}.{statement.name}", statement, place)
            for source in self._sources
            for statement, place in source.statements
            if isinstance(statement, ast.ClassDef)
        ]

    def _leaves(self) -> Iterator[tuple[ClassRef, set[str]]]:
        """Yield the classes that no other class here builds on, each with the hooks it marks."""
        project = self.run.project
        bases = {
            base.node
            for ref in self._all_classes
            for classes in project.bases(ref)[0]
            for base in classes
        }
        for ref in self._all_classes:
            if ref.node not in bases:
                methods = self.run.members.of(project.mro(ref)[0][0])
                yield ref, {one.hook for each in methods.values() for one in each if one.marked}


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no cycles: syntax trees have none, and looking for them takes most of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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
