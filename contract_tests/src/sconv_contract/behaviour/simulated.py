"""``sconv verify --behaviour NAME --simulated npu``: the suite in a process with such a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..simulated_npu.child import run
from ..simulated_npu.state import settings
from ..simulated_npu.table import TORCH_NPU
from ..target import TargetError
from .command import refuse_without_needs, selected

__all__ = ["SIMULATED", "simulated_subject", "verify_in_child"]

#: The devices that can be simulated.
SIMULATED: Final = ("npu",)


def verify_in_child(argv: Sequence[str]) -> int | None:
    """Run a command again where the device is; None if it is here.

    Args:
        argv: The arguments of ``sconv verify``.
    """
    if settings.devices:
        return None
    refuse_without_needs()
    return run(["-m", "sconv", "verify", *argv])


def simulated_subject(name: str) -> str:
    """Return the line of the summary that tells a simulated device from a real one.

    Raises:
        TargetError: The backend is not for the device that is simulated.
    """
    info = selected(name)
    if info.device_type not in SIMULATED:
        raise TargetError(
            f"{info} is for {info.device_type!r}; --simulated npu checks backends for 'npu'"
        )
    return (
        f"on a simulated device with the operators of torch_npu {TORCH_NPU}; this says nothing of"
        " an NPU's numerics, limits or speed"
    )
