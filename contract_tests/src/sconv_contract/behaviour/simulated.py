"""``sconv verify --behaviour NAME --simulated npu``: the suite in a process with such a device."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

from ..target import TargetError
from .command import refuse_without_needs, selected

__all__ = ["SIMULATED", "in_this_process", "simulated_subject", "verify_in_child"]

#: The devices that can be simulated, each with the module that does it. Imported when one is asked
#: for: nothing else of the suite knows of any.
SIMULATED: Final = {"npu": "sconv_contract.simulated_npu.for_suite"}


def in_this_process() -> bool:
    """Whether this process has a simulated device."""
    return any(_simulation(device).is_here() for device in SIMULATED)


def _simulation(device: str) -> Any:
    return import_module(SIMULATED[device])


def verify_in_child(argv: Sequence[str]) -> int | None:
    """Run a command again where the device is; None if it is here.

    Args:
        argv: The arguments of ``sconv verify``.
    """
    if in_this_process():
        return None
    refuse_without_needs()
    return int(_simulation("npu").run(["-m", "sconv", "verify", *argv]))


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
        f"on a simulated device with the operators of {_simulation(info.device_type).OPERATORS};"
        " this says nothing of an NPU's numerics, limits or speed"
    )
