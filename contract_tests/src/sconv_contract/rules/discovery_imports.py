"""SCV204: what is imported when a plugin is discovered."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final, TypeAlias

from ..findings import Finding, Where
from ..source.methods import own_nodes
from ..source.resolve import Place, Project, Source, absolute
from ..source.scopes import statements
from .discovery import Description, Discovered
from .rule import Rule

__all__ = ["RULES"]

#: Modules, each with those through which it is imported.
_Pending: TypeAlias = list[tuple[str, tuple[str, ...]]]

_ACCELERATORS: Final = frozenset(
    {
        "acl", "aiter", "cann", "cuda", "cupy", "flash_attn", "habana_frameworks", "intel_extension"
        "_for_pytorch", "jax", "mindspore", "mlx", "numba", "pycuda", "sgl_kernel", "tensorflow",
        "tilelang", "torch", "torch_gcu", "torch_mlu", "torch_musa", "torch_npu", "torch_xla",
        "triton", "ttnn", "vllm", "sglang",
    }
)  # fmt: skip


class DiscoveryImports(Rule[Discovered]):
    """Neither what the entry point imports nor the probe imports an accelerator library.

    Discovery imports every installed plugin and asks its probe; one that imports torch costs
    seconds, and one whose device library is missing cannot say so in words.
    """

    id = "SCV204"
    name = "accelerator imported at discovery"
    example = "import torch_npu  # in the module that the entry point names, or in its probe"
    fix = "Import it in the module of the factory; ask find_spec in the probe."
    scope = Discovered

    def check(self, subject: Discovered) -> Iterator[Finding]:
        project = subject.backend.run.project
        module = subject.backend.point.value.partition(":")[0].strip()
        own = {module.partition(".")[0], "sconv"}
        pending: _Pending = [(name, (module,)) for name in _with_parents(module)]
        yield from self._modules(project, pending, own)
        for description in subject.backend.descriptions:
            yield from self._probe(project, description)

    def _probe(self, project: Project, description: Description) -> Iterator[Finding]:
        """Check what calling a probe imports, in the functions of its package that it calls too."""
        probe = description.fields.get("probe")
        if probe is None:
            return
        package = description.place.source.name.partition(".")[0]
        pending = project.evaluate(probe, description.place)
        seen: set[ast.AST] = set()
        while pending:
            found = pending.pop()
            function, place = found.node, found.place
            if not isinstance(function, ast.FunctionDef | ast.Lambda) or place is None:
                continue
            if function in seen or place.source.name.partition(".")[0] != package:
                continue
            seen.add(function)
            inside = place.inside(function)
            for node in own_nodes(function):
                for target in _targets(project, node, inside):
                    if target.partition(".")[0] in _ACCELERATORS:
                        text = f"the probe imports {target}, and discovery calls it"
                        yield self.found(Where.of(place.source.path, node), text)
                    elif target.partition(".")[0] == package:
                        below: _Pending = [
                            (name, (name,)) for name in _with_parents(target, project)
                        ]
                        yield from self._modules(project, below, {package})
                if isinstance(node, ast.Call):
                    pending += project.evaluate(node.func, inside)

    def _modules(self, project: Project, pending: _Pending, own: set[str]) -> Iterator[Finding]:
        """Check modules that are imported, each with those through which it is."""
        seen: set[str] = set()
        while pending:
            name, chain = pending.pop()
            source = project.source(name) if name not in seen else None
            seen.add(name)
            if source is None:
                continue
            for node in _run_by(source):
                for target in _targets(project, node, Place(source)):
                    top = target.partition(".")[0]
                    if top in _ACCELERATORS:
                        first = Where.of(source.path, node)
                        through = "" if len(chain) == 1 else f" (imported by {chain[0]})"
                        yield self.found(
                            first, f"{name}{through} imports {target} when it is discovered"
                        )
                    elif top in own:
                        pending += [
                            (below, (*chain, below)) for below in _with_parents(target, project)
                        ]


RULES: Final = (DiscoveryImports(),)


def _run_by(source: Source) -> Iterator[ast.AST]:
    """Yield the statements and expressions that importing a module runs."""
    for statement in statements(source.tree.body):
        yield statement
        parts = ast.iter_child_nodes(statement)
        inner = [one for one in parts if isinstance(one, ast.expr | ast.withitem)]
        while inner:
            node = inner.pop()
            yield node
            if not isinstance(node, ast.Lambda):
                inner += [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]


def _targets(project: Project, node: ast.AST, place: Place) -> list[str]:
    """Return the dotted paths that a statement imports, or a call by a literal name."""
    match node:
        case ast.Import() | ast.ImportFrom():
            return absolute(node, place.source)
        case ast.Call(func=func, args=[ast.Constant(value=str(target)), *_]):
            # Few calls have such an argument; what they call is asked of those alone.
            top = target.partition(".")[0]
            if top in _ACCELERATORS or top == place.source.name.partition(".")[0]:
                known = {"importlib.import_module", "builtins.__import__"}
                return [target] if project.paths(func, place) & known else []
            return []
        case _:
            return []


def _with_parents(path: str, project: Project | None = None) -> list[str]:
    """Return the modules that importing a dotted path runs: packages first."""
    parts = path.split(".")
    names = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    if project is None or project.source(path) is not None:
        return names
    # A lazily provided name, such as sconv.StateSpec, imports the module that defines it.
    return names[:-1] + [
        found.place.source.name for found in project.find(path) if found.place is not None
    ]
