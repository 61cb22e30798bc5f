"""Short-convolution state for hybrid LLM inference, on whatever hardware is installed.

An engine calls :func:`load_backend` and then the methods of the :class:`Backend` it gets; a vendor
writes the hooks of :mod:`sconv.hookspecs` and one entry point.

Importing this package is cheap: every public name is looked up when it is first used, and only the
names that work on tensors need torch, which arrives with a plugin.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from . import nn, reference
    from .backend import Backend
    from .batch import ForwardBatch, ForwardMode
    from .discovery import backends
    from .errors import (
        BackendNotFoundError,
        BackendUnavailableError,
        BatchError,
        ContractError,
        GraphBufferError,
        MetadataError,
        PluginError,
        PoolError,
        PoolExhaustedError,
        SconvError,
        SlotError,
        SpecError,
        TorchUnavailableError,
    )
    from .hookspecs import CONTRACT_VERSION, hookimpl
    from .loading import load_backend
    from .metadata import ShortConvMetadata
    from .planning import LayoutPlan, Plan, plan
    from .plugin import Available, BackendInfo, Capabilities, Origin, Unavailable
    from .pool import ConvStatePool
    from .spec import StateSpec, Stream

    __version__: str

__all__ = [
    "CONTRACT_VERSION",
    "Available",
    "Backend",
    "BackendInfo",
    "BackendNotFoundError",
    "BackendUnavailableError",
    "BatchError",
    "Capabilities",
    "ContractError",
    "ConvStatePool",
    "ForwardBatch",
    "ForwardMode",
    "GraphBufferError",
    "LayoutPlan",
    "MetadataError",
    "Origin",
    "Plan",
    "PluginError",
    "PoolError",
    "PoolExhaustedError",
    "SconvError",
    "ShortConvMetadata",
    "SlotError",
    "SpecError",
    "StateSpec",
    "Stream",
    "TorchUnavailableError",
    "Unavailable",
    "__version__",
    "backends",
    "hookimpl",
    "load_backend",
    "nn",
    "plan",
    "reference",
]

#: Where each public name lives. The lists above repeat it for type checkers and ``import *``.
_HOMES: Final[dict[str, tuple[str, ...]]] = {
    "backend": ("Backend",),
    "batch": ("ForwardBatch", "ForwardMode"),
    "discovery": ("backends",),
    "errors": (
        "BackendNotFoundError",
        "BackendUnavailableError",
        "BatchError",
        "ContractError",
        "GraphBufferError",
        "MetadataError",
        "PluginError",
        "PoolError",
        "PoolExhaustedError",
        "SconvError",
        "SlotError",
        "SpecError",
        "TorchUnavailableError",
    ),
    "hookspecs": ("CONTRACT_VERSION", "hookimpl"),
    "loading": ("load_backend",),
    "metadata": ("ShortConvMetadata",),
    "planning": ("LayoutPlan", "Plan", "plan"),
    "plugin": ("Available", "BackendInfo", "Capabilities", "Origin", "Unavailable"),
    "pool": ("ConvStatePool",),
    "spec": ("StateSpec", "Stream"),
}
_MODULE_OF: Final = {name: module for module, names in _HOMES.items() for name in names}
_SUBMODULES: Final = frozenset({"nn", "reference"})


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib_metadata import version

        value: Any = version("sconv-core")
    elif name in _SUBMODULES:
        value = _import(name, wanted=name)
    elif name in _MODULE_OF:
        value = getattr(_import(_MODULE_OF[name], wanted=name), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _import(module: str, *, wanted: str) -> Any:
    try:
        return import_module(f"{__name__}.{module}")
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] != "torch":
            raise
        from .errors import TorchUnavailableError

        raise TorchUnavailableError(
            f"sconv.{wanted} needs torch, which arrives with a plugin: "
            "pip install sconv-plugin-cpu (or sconv-plugin-cuda)",
            name="torch",
        ) from exc
    except RuntimeError as exc:
        from .errors import TorchUnavailableError
        from .torch_failure import torch_failure

        reason = torch_failure(exc)
        if reason is None:
            raise
        raise TorchUnavailableError(reason, name="torch") from exc
