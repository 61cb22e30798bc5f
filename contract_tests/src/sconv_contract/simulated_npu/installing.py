"""Puts the simulated device into this process, for good."""

from __future__ import annotations

from .errors import SimulationError
from .requirements import refuse_unless_possible
from .state import settings

__all__ = ["install", "set_available"]


def install(device_count: int = 2) -> None:
    """Make ``npu`` a device of this process. It stays one until the process ends.

    ``torch_npu`` becomes a module that stands in for the real one, whose import would end the
    process from now on.

    Args:
        device_count: How many devices there are.

    Raises:
        SimulationError: The real torch_npu is imported, CUDA is in use, torch is not the release
            that the device was made for, or it was installed with another count.
    """
    if settings.devices:
        if settings.devices != device_count:
            raise SimulationError(
                f"the simulated npu is installed with {settings.devices} devices already"
            )
        return
    if device_count < 1:
        raise SimulationError(f"device_count is at least 1, not {device_count}")
    refuse_unless_possible()
    # Only now: these modules name what another torch may lack.
    from .registration import register

    register()
    settings.devices = device_count


def set_available(available: bool) -> None:
    """Say whether ``torch.npu`` has a device, as on a machine whose driver does not load."""
    settings.available = available
