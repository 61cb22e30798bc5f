"""A simulated ``npu`` device for the tests of plugins: placement, operators, syncs, addresses.

::

    from sconv_contract import simulated_npu

    simulated_npu.install()  # once per process, before anything else uses torch.npu
    with simulated_npu.region(in_graph=True, allow=OPERATORS) as counters:
        backend.init_forward_metadata_in_graph(batch)
    assert not counters["alloc"]

Tensors are ordinary tensors that report ``npu:0`` or ``npu:1``. The operators that torch_npu has
kernels for exist, and no others. What runs here is *checked on a simulated device*: values come
from the host's kernels, and nothing is said about an NPU's numerics, limits or speed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from .errors import (
    HostSync,
    MixedDevice,
    SilentFallback,
    SimulationError,
    StaleAddress,
    UnlistedOperator,
    WriteRace,
)

if TYPE_CHECKING:
    from .audit import region
    from .installing import install, set_available
    from .memory import ledger
    from .vendor import custom_op

__all__ = [
    "HostSync",
    "MixedDevice",
    "SilentFallback",
    "SimulationError",
    "StaleAddress",
    "UnlistedOperator",
    "WriteRace",
    "custom_op",
    "install",
    "ledger",
    "region",
    "set_available",
]

# torch is imported with these: with a broken torch_npu beside it that fails, unless a variable
# says otherwise before, and the command of this package sets it.
_LAZY: Final = {
    "custom_op": ".vendor",
    "install": ".installing",
    "ledger": ".memory",
    "region": ".audit",
    "set_available": ".installing",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)
