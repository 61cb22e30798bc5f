"""The module ``torch.npu``, as far as the simulated device has it."""

from __future__ import annotations

import types
from typing import Any, Final

import torch

from . import streams
from .audit import region
from .errors import SimulationError
from .graph import NPUGraph, graph, graph_pool_handle, is_current_stream_capturing
from .memory import memory
from .state import SyncMode, settings, thread
from .streams import index_of

__all__ = ["make_module"]

_SYNC_MODES: Final[tuple[SyncMode, ...]] = ("default", "warn", "error")


class device:  # noqa: N801 - torch.npu.device
    """``torch.npu.device``: the current device in the body of a ``with``."""

    def __init__(self, device: Any) -> None:
        self.idx = index_of(device)
        self._before = 0

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self.idx)

    def __exit__(self, *exc_info: object) -> None:
        set_device(self._before)


def is_available() -> bool:
    """Whether there is a device."""
    return settings.available and settings.devices > 0


def device_count() -> int:
    """How many devices there are."""
    return settings.devices if settings.available else 0


def current_device() -> int:
    """Return the index of the thread's device."""
    return thread.device


def set_device(device: Any) -> None:
    """Choose the thread's device.

    Raises:
        SimulationError: There is none of that index.
    """
    index = index_of(device)
    if not 0 <= index < device_count():
        raise SimulationError(f"there is no npu:{index}; there are {device_count()} devices")
    thread.device = index


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Say what happens when the host waits for the device: nothing, a warning, an error."""
    if isinstance(debug_mode, int) and 0 <= debug_mode < len(_SYNC_MODES):
        settings.sync_mode = _SYNC_MODES[debug_mode]
    elif debug_mode in _SYNC_MODES:
        settings.sync_mode = debug_mode
    else:
        raise RuntimeError(f"the debug mode is one of {_SYNC_MODES}, not {debug_mode!r}")


def get_sync_debug_mode() -> int:
    """Return the mode as a number."""
    return _SYNC_MODES.index(settings.sync_mode)


def memory_allocated(device: Any = None) -> int:
    """Return the bytes in use on a device."""
    return memory.live_bytes(index_of(device))


def get_device_name(device: Any = None) -> str:
    """Return a name that no product has."""
    return "simulated"


def make_module() -> types.ModuleType:
    """Return ``torch.npu``."""
    module = types.ModuleType("torch.npu", "A simulated device: sconv_contract.simulated_npu.")
    members: dict[str, Any] = {
        "device": device,
        "is_available": is_available,
        "device_count": device_count,
        "current_device": current_device,
        "set_device": set_device,
        "get_device_name": get_device_name,
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": get_sync_debug_mode,
        "memory_allocated": memory_allocated,
        "empty_cache": memory.sweep,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        # There is one generator, the host's: torch.manual_seed has set it.
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "watched_capture": lambda: region(in_graph=True),
        "NPUGraph": NPUGraph,
        "graph": graph,
        "graph_pool_handle": graph_pool_handle,
        "is_current_stream_capturing": is_current_stream_capturing,
        "Stream": streams.Stream,
        "Event": streams.Event,
        "stream": streams.stream,
        "set_stream": streams.set_stream,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "synchronize": streams.synchronize,
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module
