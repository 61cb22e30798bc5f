"""What ``sconv verify --simulated npu`` asks of this device; named there, and imported by it."""

from __future__ import annotations

from .child import run
from .state import settings
from .table import TORCH_NPU

__all__ = ["OPERATORS", "is_here", "run"]

#: Whose operators the device has.
OPERATORS = f"torch_npu {TORCH_NPU}"


def is_here() -> bool:
    """Whether this process has the device."""
    return bool(settings.devices)
