"""What of the process would change a hook's results, switched off for the length of a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["plain_arithmetic", "touches_arithmetic"]


def touches_arithmetic(device_type: str) -> bool:
    """Whether autograd or autocast is on: both act on what an operator returns."""
    return torch.is_grad_enabled() or torch.is_autocast_enabled(device_type)


@contextmanager
def plain_arithmetic(device_type: str) -> Iterator[None]:
    """Switch both off.

    State outlives the step, so it must not hold the step's autograd graph. Autocast chooses its own
    dtype for some operators, and refuses float16 in others on a CPU.
    """
    autocast = torch.is_autocast_enabled(device_type)
    torch.set_autocast_enabled(device_type, False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_autocast_enabled(device_type, autocast)
