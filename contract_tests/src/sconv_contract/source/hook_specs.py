"""The hook specifications of the installed core, as tables that need no torch."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import sconv.hookspecs as specs
from sconv.hookspecs import MUST_USE, OPTIONAL_HOOKS, PROJECT_NAME, DiscoverySpec, StepSpec

__all__ = ["DISCOVERY", "IN_GRAPH", "STEP", "Hook", "tensor_fields"]

#: Hooks that a graph records. The docstrings of the specs say so too; a test compares them.
IN_GRAPH: Final = frozenset(
    {
        "conv_state_metadata",
        "gated_delta",
        "init_forward_metadata_in_graph",
        "short_conv",
        "short_conv_group",
        "update_mamba_state_after_mtp_verify",
    }
)


@dataclass(frozen=True, slots=True)
class Hook:
    """One hook.

    Attributes:
        name: Its name.
        parameters: What a call passes, all of it by name.
        annotations: The type of each parameter, as the spec spells it.
        required: An implementation must have it.
        must_use: Parameters that an implementation must read.
    """

    name: str
    parameters: tuple[str, ...]
    annotations: Mapping[str, str]
    required: bool
    must_use: tuple[str, ...]

    @property
    def call(self) -> str:
        """The parameters in one line."""
        return ", ".join(self.parameters) or "nothing"


def _hooks(spec: type) -> dict[str, Hook]:
    hooks = {}
    for name, function in vars(spec).items():
        if not hasattr(function, f"{PROJECT_NAME}_spec"):
            continue
        given = list(inspect.signature(function).parameters.values())[1:]
        hooks[name] = Hook(
            name,
            tuple(parameter.name for parameter in given),
            {parameter.name: str(parameter.annotation) for parameter in given},
            name not in OPTIONAL_HOOKS,
            MUST_USE.get(name, ()),
        )
    return hooks


STEP: Final = _hooks(StepSpec)
DISCOVERY: Final = _hooks(DiscoverySpec)

_HOLDERS: Final = {"ForwardBatch": "step/batch.py", "ShortConvMetadata": "step/metadata.py"}


@cache
def tensor_fields(class_name: str) -> frozenset[str]:
    """Return the attributes of ForwardBatch or ShortConvMetadata that are tensors.

    Read from core's source, since importing those classes needs torch.
    """
    path = Path(specs.__file__).parent / _HOLDERS[class_name]
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return frozenset(
                field.target.id
                for field in node.body
                if isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and "Tensor" in ast.unparse(field.annotation)
            )
    raise LookupError(f"{path} defines no {class_name}")
