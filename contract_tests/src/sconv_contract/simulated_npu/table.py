"""Which operators torch_npu has kernels for: a table made from the lists inside its wheel."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

__all__ = ["TORCH_NPU", "Table", "table"]

#: The release whose table is kept, and which the simulated device stands in for.
TORCH_NPU: Final = "2.13.0"


@dataclass(frozen=True)
class Table:
    """The operators of a release.

    Whatever is in neither set is decomposed by torch into operators that are.

    Attributes:
        torch: The torch release that it is made for.
        direct: Names, ``operator`` or ``operator.overload`` of ``aten``, with an NPU kernel.
        cpu_fallback: Names that torch_npu runs on the CPU, with a copy there and one back.
    """

    torch: str
    direct: frozenset[str]
    cpu_fallback: frozenset[str]


@functools.cache
def table() -> Table:
    """Return the table of :data:`TORCH_NPU`."""
    place = files(__package__) / "data" / f"torch_npu-{TORCH_NPU}.json"
    found = json.loads(place.read_text(encoding="utf-8"))
    return Table(
        torch=found["torch"],
        direct=frozenset(found["direct"]),
        cpu_fallback=frozenset(found["cpu_fallback"]),
    )
