"""SCV204: what is imported when a plugin is discovered."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from ..findings import Finding
from ..resolve import Project, absolute
from ..scopes import statements
from ..target import EntryPoint
from .rule import Rule, Where

__all__ = ["RULES", "imports"]

ACCELERATOR: Final = Rule(
    "SCV204",
    "accelerator imported at discovery",
    "What the entry point imports imports no accelerator library at its top.",
    "Discovery imports every installed plugin; one that imports torch costs seconds, and one whose"
    " device library is missing cannot say so in words.",
    "import torch_npu  # in the module that the entry point names",
    "Import it in the module of the factory; ask find_spec in the probe.",
)
RULES: Final = (ACCELERATOR,)

_ACCELERATORS: Final = frozenset(
    {
        "acl", "aiter", "cann", "cuda", "cupy", "flash_attn", "habana_frameworks", "intel_extension"
        "_for_pytorch", "jax", "mindspore", "mlx", "numba", "pycuda", "sgl_kernel", "tensorflow",
        "tilelang", "torch", "torch_gcu", "torch_mlu", "torch_musa", "torch_npu", "torch_xla",
        "triton", "ttnn", "vllm", "sglang",
    }
)  # fmt: skip


def imports(project: Project, point: EntryPoint) -> Iterator[Finding]:
    """Check what importing an entry point's module imports, through this package and core."""
    module = point.value.partition(":")[0].strip()
    own = {module.partition(".")[0], "sconv"}
    pending: list[tuple[str, tuple[str, ...]]] = [
        (name, (module,)) for name in _with_parents(module)
    ]
    seen: set[str] = set()
    while pending:
        name, chain = pending.pop()
        source = project.source(name) if name not in seen else None
        seen.add(name)
        if source is None:
            continue
        for statement in statements(source.tree.body):
            if not isinstance(statement, ast.Import | ast.ImportFrom):
                continue
            for target in absolute(statement, source):
                top = target.partition(".")[0]
                if top in _ACCELERATORS:
                    first = Where.of(source.path, statement)
                    through = "" if len(chain) == 1 else f" (imported by {chain[0]})"
                    yield ACCELERATOR.found(
                        first, f"{name}{through} imports {target} when it is discovered"
                    )
                elif top in own:
                    pending += [
                        (below, (*chain, below)) for below in _with_parents(target, project)
                    ]


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
