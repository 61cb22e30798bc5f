"""What a plugin says of itself: :class:`BackendInfo`, and the two answers of its probe.

A plugin module imports this to describe its backend, so nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Available", "BackendInfo", "Broken", "Capabilities", "Origin", "Unavailable"]


@dataclass(frozen=True, slots=True)
class Available:
    """The backend can run here. The highest priority wins; two equal ones are an error."""

    priority: int


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The backend cannot run here, and why, in words for its user."""

    reason: str


@dataclass(frozen=True, slots=True)
class Broken(Unavailable):
    """Core's answer for a plugin that failed before its probe could answer. Plugins do not use it.

    Attributes:
        error: What it raised, to be chained to the error of an explicit choice; None if it broke a
            rule instead.
    """

    error: BaseException | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend supports. Core refuses a spec outside of it at load.

    Attributes:
        window_axes: State layouts, of ``"time"`` and ``"channel"``.
        window_layouts: Verify-window layouts, first choice first.
        dtypes: State dtypes by torch's name (``"bfloat16"``), so that torch need not be imported.
        kernel_sizes: Smallest and largest kernel width, both included.
        graph_capture: Step hooks can be recorded and replayed.
        trees: Verify takes token trees; a chain always works.
        rollback: Verify leaves the window unchanged until the commit. Without it
            ``max_draft_tokens > 1`` is refused.
        gated_delta: The hook ``gated_delta`` is there, and the commit moves recurrent states.
            Without it a spec with ``recurrent`` is refused.
    """

    window_axes: tuple[str, ...] = ("time", "channel")
    window_layouts: tuple[str, ...] = ("dense",)
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    kernel_sizes: tuple[int, int] = (2, 8)
    graph_capture: bool = False
    trees: bool = False
    rollback: bool = False
    gated_delta: bool = False


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a backend was found: distribution, its version, and the entry point's value."""

    distribution: str
    version: str
    value: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """A backend, described.

    Attributes:
        name: The entry point's name.
        device_type: torch's name of the device it serves (``"cpu"``, ``"cuda"``, ``"npu"``).
        contract: (major, minor) of the contract it was written for, as a literal.
        factory: ``"module:attr"``, called as ``factory(spec=, device=, pool=)`` once selected; it
            returns the object that implements :class:`sconv.hookspecs.StepSpec`.
        probe: Says whether it can run here. Called with nothing, at discovery; must not raise.
        capabilities: What it supports.
        origin: Filled in by core.
        availability: Filled in by core from ``probe`` or from what went wrong before it.
    """

    name: str
    device_type: str
    contract: tuple[int, int]
    factory: str
    probe: Callable[[], Available | Unavailable]
    capabilities: Capabilities = field(default_factory=Capabilities)
    origin: Origin | None = None
    availability: Available | Unavailable | None = None

    def __str__(self) -> str:
        return f"backend {self.name!r} of {self.origin or 'no distribution'}"
