"""SCV214: what a plugin imports of core."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

import sconv
import sconv.plugin
from sconv.discovery.moved import MOVED

from ..findings import Finding, Where
from ..source.resolve import Project, absolute
from .rule import Rule
from .subjects import Module

__all__ = ["RULES"]

#: The modules that a plugin may import, those of testing with all that is below.
_DOORS: Final = ("sconv", "sconv.plugin", "sconv.testing")


class PrivateImports(Rule[Module]):
    """A plugin imports core's names from sconv, sconv.plugin and, in tests, sconv.testing.

    Every other module of sconv is private: it may move or go in any release, and then the plugin
    does not import.
    """

    id = "SCV214"
    name = "private import"
    example = "from sconv.torch_backend.backend import TorchBackend"
    fix = "Import the name from sconv.plugin or sconv; docs/reference/plugin-door.md lists them."
    scope = Module

    def check(self, subject: Module) -> Iterator[Finding]:
        source = subject.source
        for statement, _ in source.statements:
            if not isinstance(statement, ast.Import | ast.ImportFrom):
                continue
            for path in absolute(statement, source):
                private = _private(subject.run.project, statement, path)
                if private:
                    instead = _instead(path, private)
                    yield self.found(
                        Where.of(source.path, statement),
                        f"{private} is private to sconv-core",
                        fix=f"Write: {instead}." if instead else "",
                    )


RULES: Final = (PrivateImports(),)


def _private(project: Project, statement: ast.stmt, path: str) -> str:
    """Return the private module that an import of a dotted path takes, or ""."""
    top, _, rest = path.partition(".")
    if top != "sconv" or not rest:
        return ""
    module = path.rpartition(".")[0] if isinstance(statement, ast.ImportFrom) else path
    if module == "sconv":
        # ``from sconv import name``: a public name, or a module below.
        public = rest in sconv.__all__ or path in _DOORS
        return path if not public and (path in MOVED or project.source(path)) else ""
    is_door = module in _DOORS or module.startswith("sconv.testing.")
    return "" if is_door else module


def _instead(path: str, module: str) -> str:
    """Return the import that gives a plugin the same name, or "" if no door has it."""
    name = path.rpartition(".")[2]
    for door in (sconv.plugin, sconv):
        if name in door.__all__:
            return f"from {door.__name__} import {name}"
    return MOVED.get(module, "")
