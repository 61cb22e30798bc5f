"""Captures a call as the device does: with its own graphs where it has them, recorded elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

import sconv
from sconv import has_graphs
from sconv.testing.recording import record

__all__ = ["capture", "has_graphs"]


def capture(device: torch.device, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Capture a call; return a function that replays it, and its result.

    On a device with graphs the call runs twice before, the second time with every wait for the
    device refused where torch can tell (``set_sync_debug_mode``).
    """
    if not has_graphs(device):
        recording = record(step)
        return recording.replay, recording.result
    module: Any = torch.get_device_module(device)
    with module.device(device), module.stream(module.Stream(device)):
        step()  # compilation may sync, a capture may not
        with _no_sync(module):
            step()
    # A device may watch a capture for more: work on the host, which no capture sees.
    watched = getattr(module, "watched_capture", nullcontext)
    captured = sconv.capture(device, step, warm_ups=0, around=watched)
    return captured.replay, captured.result


@contextmanager
def _no_sync(module: Any) -> Iterator[None]:
    if not hasattr(module, "set_sync_debug_mode"):
        yield
        return
    before = module.get_sync_debug_mode() if hasattr(module, "get_sync_debug_mode") else "default"
    with warnings.catch_warnings():
        # torch warns once that it does not know of every wait; a vendor's tests may be strict.
        warnings.simplefilter("ignore")
        module.set_sync_debug_mode("error")
    try:
        yield
    finally:
        module.set_sync_debug_mode(before)
