"""What the simulated device refuses; a real one would read, wait or fall back without a word."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

__all__ = [
    "HostSync",
    "MixedDevice",
    "SilentFallback",
    "SimulationError",
    "StaleAddress",
    "UnlistedOperator",
    "WriteRace",
]


class SimulationError(RuntimeError):
    """The simulated device refused something, or cannot be had in this process.

    Attributes:
        device_code: Where the device's own code is: the fault is in the lines that called it.
    """

    device_code: ClassVar[Path] = Path(__file__).parent


class UnlistedOperator(SimulationError):  # noqa: N818 - it names what happened
    """An operator without an NPU kernel, or one that is not on the plugin's own list."""


class HostSync(SimulationError):  # noqa: N818
    """The host waited for the device where nothing may: in a region of a graph, or in a capture."""


class MixedDevice(SimulationError):  # noqa: N818
    """One operator was given tensors of two devices."""


class SilentFallback(SimulationError):  # noqa: N818
    """A tensor of the host was computed with where the device should have been."""


class StaleAddress(SimulationError):  # noqa: N818
    """A graph would use memory that is freed, or that is no longer its caller's."""


class WriteRace(SimulationError):  # noqa: N818
    """One operator wrote different values to one place; an NPU does not order such writes."""
