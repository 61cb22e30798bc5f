"""What each thread is doing on the device, and the settings of the process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

__all__ = ["Recorder", "Region", "Settings", "SyncMode", "Thread", "settings", "thread"]

SyncMode = Literal["default", "warn", "error"]


@dataclass(frozen=True)
class Region:
    """One audit region; see :func:`.audit.region`."""

    in_graph: bool
    cpu: Literal["refuse", "count"]
    allow: frozenset[str] | None
    counters: Counter[str] = field(default_factory=Counter)

    def allows(self, operator: str, overload: str) -> bool:
        """Whether the plugin lists an operator."""
        return self.allow is None or operator in self.allow or overload in self.allow


class Recorder(Protocol):
    """What kernels ask of a capture in progress; see :class:`.capture.Capture`."""

    def fail(self, why: str) -> None:
        """Note that it cannot become a graph."""

    def record(self, kernel: Any, args: Sequence[Any], kwargs: dict[str, Any], index: int) -> Any:
        """Note a call and return its results, whose values nobody has computed."""


class Thread(threading.local):
    """The state of a thread.

    Attributes:
        device: Its current device.
        regions: Audit regions it is in, the innermost last.
        capture: The capture in progress, if any.
    """

    def __init__(self) -> None:
        self.device = 0
        self.regions: list[Region] = []
        self.capture: Recorder | None = None


class Settings:
    """The settings of the process.

    Attributes:
        devices: How many there are; 0 before the device is installed.
        available: What ``torch.npu.is_available`` answers.
        sync_mode: What happens when the host waits, as ``torch.npu.set_sync_debug_mode`` said.
    """

    def __init__(self) -> None:
        self.devices = 0
        self.available = True
        self.sync_mode: SyncMode = "default"


thread: Final = Thread()
settings: Final = Settings()
