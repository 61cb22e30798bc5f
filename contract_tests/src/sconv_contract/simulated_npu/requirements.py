"""What a process must have, and must not have done, for the simulated device. Needs torch alone."""

from __future__ import annotations

import sys
from typing import Any, Final

import torch

from .errors import SimulationError
from .table import table

__all__ = ["PRIVATE_NAMES", "exists", "refuse_unless_possible"]

#: What torch does not promise to keep, and the device is built on.
PRIVATE_NAMES: Final = (
    "torch.UntypedStorage._cdata",
    "torch._C.DispatchKey",
    "torch._C.DispatchKeySet",
    "torch._C._DisableTorchDispatch",
    "torch._C._acc.DeviceGuard",
    "torch._C._from_dlpack",
    "torch._C._get_privateuse1_backend_name",
    "torch._ops.OpOverload.redispatch",
    "torch.library.Library.fallback",
    "torch.multiprocessing.reductions.StorageWeakRef.expired",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._pytree.tree_leaves",
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend",
)


def refuse_unless_possible() -> None:
    """Check what :func:`sconv_contract.simulated_npu.install` asks of a process.

    Raises:
        SimulationError: The device cannot be had here, and why.
    """
    missing = [name for name in PRIVATE_NAMES if not exists(name)]
    if missing or torch.__version__.partition("+")[0] != table().torch:
        lacks = f", which lacks {', '.join(missing)}" if missing else ""
        raise SimulationError(
            f"the simulated npu is made for torch {table().torch}, and this is torch"
            f" {torch.__version__}{lacks}: install torch=={table().torch} to use it"
        )
    if "torch_npu" in sys.modules:
        raise SimulationError(
            "torch_npu is imported: the simulated npu needs a process of its own, started with"
            " TORCH_DEVICE_BACKEND_AUTOLOAD=0 (python -m sconv_contract.simulated_npu does)"
        )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise SimulationError("CUDA is in use: the simulated npu needs a process of its own")
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        raise SimulationError(f"torch's one place for other devices is taken by {name!r}")


def exists(name: str) -> bool:
    """Whether torch has a name, given with its path."""
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
        if found is None:
            return False
    return True
