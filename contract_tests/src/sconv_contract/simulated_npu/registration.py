"""Tells torch of the device: its module, its kernels, and the module that stands for torch_npu."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any, Final

import torch
from torch.utils import backend_registration

from .device import make_module
from .kernels import Kernel, copy, refuse_unlisted
from .table import TORCH_NPU, table

__all__ = ["register"]

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


def register() -> None:
    """Register everything, for the rest of the process."""
    backend_registration._setup_privateuseone_for_python_backend("npu", make_module())
    _register_kernels()
    sys.modules["torch_npu"] = _stand_in()
    torch.UntypedStorage.clone = _clone  # type: ignore[assignment,method-assign]


def _register_kernels() -> None:
    aten: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in sorted(table().direct - _LEFT_TO_TORCH):
        base, _, overload = name.partition(".")
        kernel = copy if name == "copy_" else Kernel(_overload(base, overload))
        aten.impl(name, kernel, "PrivateUse1")
    rest: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    rest.fallback(refuse_unlisted, "PrivateUse1")
    # Under autocast nothing is cast here, and every operator goes on to the device.
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
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
