"""How many requests fit in a memory, for each layout of the verify windows.

A request needs slots of the state and, when it speculates, one row of verify windows. Both are
counted by the shapes that the pool allocates, so that a smaller layout is not only smaller: what it
saves becomes slots.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Final

from ..errors import SpecError
from ..state.recurrent import row_nbytes, slot_nbytes
from ..state.spec import MOST_SLOTS, StateSpec, WindowLayout, check_is_spec
from ..state.windows import LAYOUTS, VerifyWindows, choose_layout
from ..step.metadata import MetadataBuffers

__all__ = ["LayoutPlan", "Plan", "parse_bytes", "plan"]

_UNITS: Final = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """What fits with one layout. All sizes are physical bytes on this rank.

    Attributes:
        spec: The spec to load a backend with: as many request rows and slots as fit.
        slot_bytes: One slot, all layers: windows, recurrent states and their logs.
        row_bytes: The verify windows and the records of one batch row, all layers.
        step_bytes: The metadata of one row that ``init_graph_state`` allocates for captured steps,
            at most: a backend with kernels of its own has no use for some of it. Not part of the
            plan, since an engine without graphs has none.
        slots_per_request: Slots that a request takes.
    """

    spec: StateSpec
    slot_bytes: int
    row_bytes: int
    step_bytes: int
    slots_per_request: int = 1

    @property
    def layout(self) -> str:
        """Layout of the verify windows."""
        return self.spec.window_layout

    @property
    def requests(self) -> int:
        """Requests that fit: each with its slots and a row of verify windows."""
        return self.spec.max_requests

    @property
    def slots(self) -> int:
        """Usable slots: those of the requests, and those for snapshots."""
        return self.spec.num_slots

    @property
    def state_bytes(self) -> int:
        """The state, the dummy slot included."""
        return (self.slots + 1) * self.slot_bytes

    @property
    def window_bytes(self) -> int:
        """The verify windows."""
        return self.requests * self.row_bytes

    @property
    def nbytes(self) -> int:
        """State and verify windows: ``pool.nbytes`` of a backend that is loaded with the spec."""
        return self.state_bytes + self.window_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """What fits in a memory.

    Attributes:
        memory: Bytes that were given.
        layouts: One plan per layout that can hold the spec's drafts, dense first.
    """

    memory: int
    layouts: tuple[LayoutPlan, ...]

    @property
    def best(self) -> LayoutPlan:
        """The plan with the most requests; of equals the first."""
        return max(self.layouts, key=lambda each: each.requests)

    def __getitem__(self, layout: str) -> LayoutPlan:
        """Return the plan of a layout.

        Raises:
            KeyError: The plan does not have it.
        """
        for each in self.layouts:
            if each.layout == layout:
                return each
        raise KeyError(layout)


def plan(
    spec: StateSpec,
    *,
    memory: int | str,
    layout: WindowLayout | None = None,
    slots_per_request: int = 1,
) -> Plan:
    """Say how many requests fit in a memory.

    Every request gets its slots and a row of verify windows. Slots that the spec has beyond one per
    request (``num_slots - max_requests``, for snapshots) are kept as they are; apart from that its
    ``num_slots`` and ``max_requests`` do not matter. Not counted: the metadata of captured steps
    (``step_bytes`` of a layout for each row), and padded rows of a graph bucket beyond the
    requests. Needs no device.

    Args:
        spec: The model's state.
        memory: Bytes for state and verify windows, or text such as ``"4GiB"`` or ``"800MB"``.
        layout: One layout; None = every layout that can hold the spec's drafts, or the one that the
            spec names.
        slots_per_request: Slots that a request takes while it runs: its own, those that its
            snapshots alternate between, and those of steps that are still in flight.

    Raises:
        SpecError: Not one request fits, a number is out of range, or the layout cannot hold trees.
    """
    check_is_spec(spec)
    available = parse_bytes(memory) if isinstance(memory, str) else memory
    if isinstance(available, bool) or not isinstance(available, int) or available < 1:
        raise SpecError(f"memory={memory!r}: expected a number of bytes, or text such as '4GiB'")
    if (
        isinstance(slots_per_request, bool)
        or not isinstance(slots_per_request, int)
        or not 1 <= slots_per_request <= MOST_SLOTS
    ):
        raise SpecError(
            f"slots_per_request={slots_per_request!r}: expected an int, 1 to {MOST_SLOTS}"
        )
    wanted = spec if layout is None else replace(spec, window_layout=layout)
    kinds = [kind for kind in LAYOUTS.values() if spec.draft_topk == 1 or kind.takes_trees]
    if wanted.window_layout != "auto":
        kinds = [LAYOUTS[choose_layout(wanted, tuple(LAYOUTS), backend="the plan")]]
    plans = tuple(_plan_layout(spec, kind, available, slots_per_request) for kind in kinds)
    return Plan(memory=available, layouts=plans)


def _plan_layout(
    spec: StateSpec, kind: type[VerifyWindows], memory: int, slots_per_request: int
) -> LayoutPlan:
    slot = sum(math.prod(spec.window_shape(layer)) for layer in range(spec.num_layers))
    slot = slot * spec.dtype.itemsize + slot_nbytes(spec)
    row = kind.row_nbytes(spec) + row_nbytes(spec)
    snapshots = max(spec.num_slots - spec.max_requests, 0)
    fixed = (snapshots + 1) * slot
    request = slots_per_request * slot + row
    requests = min((memory - fixed) // request, (MOST_SLOTS - snapshots) // slots_per_request)
    if requests < 1:
        raise SpecError(
            f"{memory} bytes hold no request with window_layout={kind.layout!r}: one takes "
            f"{request}, the dummy slot and {snapshots} for snapshots {fixed}"
        )
    sized = replace(
        spec,
        num_slots=requests * slots_per_request + snapshots,
        max_requests=requests,
        window_layout=kind.layout,
    )
    return LayoutPlan(
        spec=sized,
        slot_bytes=slot,
        row_bytes=row,
        step_bytes=_step_nbytes(spec),
        slots_per_request=slots_per_request,
    )


def _step_nbytes(spec: StateSpec) -> int:
    """Bytes per row of static metadata: the buffers, and the three indexes of ``TorchBackend``."""
    return MetadataBuffers.row_nbytes(spec) + 3 * 8 * spec.window_size


def parse_bytes(text: str) -> int:
    """Return a size in bytes: a number, and perhaps kB, MB, GB, TB or KiB, MiB, GiB, TiB.

    Raises:
        SpecError: The text is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise SpecError(f"{text!r} is no size: expected a number of bytes, or for example '4GiB'")
    size = float(match[1]) * _UNITS[match[2]]
    if size >= 2**63:
        raise SpecError(f"{text[:40]!r} is more than any memory: expected less than 8 EiB")
    return int(size)
