"""What each thread is doing on the device, and the settings of the process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from .audit import Region
    from .capture import Capture
    from .streams import Stream

__all__ = ["Settings", "SyncMode", "Thread", "settings", "thread"]

SyncMode = Literal["default", "warn", "error"]


class Thread(threading.local):
    """The state of a thread.

    Attributes:
        device: Its current device.
        streams: Its current stream of each device, where it is not the default one.
        regions: Audit regions it is in, the innermost last.
        capture: The capture in progress, if any.
    """

    def __init__(self) -> None:
        self.device = 0
        self.regions: list[Region] = []
        self.streams: dict[int, Stream] = {}
        self.capture: Capture | None = None


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
