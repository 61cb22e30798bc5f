"""Puts the simulated device into this process, for good."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any, Final

import torch
from torch.utils import backend_registration

from .device import make_module
from .errors import SimulationError
from .kernels import Kernel, copy, refuse_unlisted
from .memory import memory, on_device
from .state import settings
from .table import TORCH_NPU, table

__all__ = ["PRIVATE_NAMES", "install", "ledger", "set_available"]

#: What torch does not promise to keep, and the device is built on.
PRIVATE_NAMES: Final = (
    "torch._C.DispatchKeySet",
    "torch._C._DisableTorchDispatch",
    "torch._C._acc.DeviceGuard",
    "torch._C._dispatch_get_all_op_names",
    "torch._C._from_dlpack",
    "torch._C._get_privateuse1_backend_name",
    "torch._ops.OpOverload.redispatch",
    "torch.library.Library.fallback",
    "torch.multiprocessing.reductions.StorageWeakRef.expired",
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend",
    "torch.utils._python_dispatch.TorchDispatchMode",
)

#: torch's own registration is the right one: it decomposes them, or asks the device.
_LEFT_TO_TORCH: Final = frozenset(
    {
        "_copy_from_and_resize",
        "_pin_memory",
        "_to_copy",
        "_to_sparse",
        "_to_sparse.sparse_dim",
        "is_pinned",
        "resize_as_",
    }
)

#: A registration lasts as long as its library.
_libraries: Final[list[Any]] = []


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
    _refuse_unless_possible()
    backend_registration._setup_privateuseone_for_python_backend("npu", make_module())
    _register()
    sys.modules["torch_npu"] = _stand_in()
    torch.UntypedStorage.clone = _clone  # type: ignore[assignment,method-assign]
    settings.devices = device_count


def set_available(available: bool) -> None:
    """Say whether ``torch.npu`` has a device, as on a machine whose driver does not load."""
    settings.available = available


def ledger(tensor: torch.Tensor) -> dict[str, int]:
    """Return which operators wrote the memory that a tensor lies in, and how often.

    The memory is the whole allocation: a pool's, if the tensor is a slice of it. Copies from the
    host are ``h2d``, from another device ``p2p``; the operator that made it is counted as well.

    Raises:
        SimulationError: It is no tensor of the device.
    """
    if not on_device(tensor):
        raise SimulationError(f"only the device keeps a ledger, and this is on {tensor.device}")
    return dict(memory.find(tensor).written)


def _refuse_unless_possible() -> None:
    missing = [name for name in PRIVATE_NAMES if not _exists(name)]
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


def _exists(name: str) -> bool:
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
        if found is None:
            return False
    return True


def _register() -> None:
    aten: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in sorted(table().direct - _LEFT_TO_TORCH):
        base, _, overload = name.partition(".")
        kernel = copy if name == "copy_" else Kernel(_overload(base, overload))
        aten.impl(name, kernel, "PrivateUse1")
    rest: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    rest.fallback(refuse_unlisted, "PrivateUse1")
    _libraries.extend((aten, rest))


def _overload(base: str, overload: str) -> torch._ops.OpOverload:
    return getattr(getattr(torch.ops.aten, base), overload or "default")  # type: ignore[no-any-return]


def _stand_in() -> types.ModuleType:
    module = types.ModuleType("torch_npu", "Stands in for torch_npu; sconv_contract.simulated_npu.")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", loader=None)
    module.__version__ = f"{TORCH_NPU}+sim"  # type: ignore[attr-defined]
    module.npu = torch.npu  # type: ignore[attr-defined]
    return module


_host_clone: Final[Any] = torch.UntypedStorage.clone


def _clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
    """``UntypedStorage.clone``, which would ask the device for an allocator in C++."""
    if self.device.type != "npu":
        cloned: torch.UntypedStorage = _host_clone(self)
        return cloned
    whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
    return whole.clone().untyped_storage()
