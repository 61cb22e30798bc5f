"""What ``BackendInfo.factory`` names. Importing it makes torch know the device ``npu``."""

from __future__ import annotations

import torch

from sconv import BackendUnavailableError, ConvStatePool, StateSpec, Unavailable

from .backend import AscendBackend
from .probe import probe
from .runtime import load_torch_npu

__all__ = ["create"]

# At import: core names the device before it calls the factory.
load_torch_npu()


def create(*, spec: StateSpec, device: torch.device, pool: ConvStatePool | None) -> AscendBackend:
    """Build the backend; the entry point's factory.

    Raises:
        BackendUnavailableError: torch_npu finds no device.
    """
    answer = probe()
    if isinstance(answer, Unavailable):
        raise BackendUnavailableError(
            f"Ascend backend requested, but {answer.reason}: look at ASCEND_RT_VISIBLE_DEVICES and "
            "npu-smi, or choose another backend"
        )
    return AscendBackend(spec=spec, device=device, pool=pool)
