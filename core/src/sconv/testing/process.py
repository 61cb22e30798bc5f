"""What a process can set and no result may depend on, and how to see that it is left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import torch

__all__ = ["SETTINGS", "process_state"]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _default_device(device: str) -> Iterator[None]:
    before = torch.get_default_device()
    torch.set_default_device(device)
    try:
        yield
    finally:
        # None is what it is before it is set, which differs from the device of the same name.
        torch.set_default_device(None if before == torch.device("cpu") else before)


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def _other_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _accelerators() -> list[str]:
    """Return the type of device that is here beside the host, if one is."""
    if not torch.accelerator.is_available():
        return []
    here = torch.accelerator.current_accelerator()
    return [] if here is None else [here.type]


@contextmanager
def _autocast() -> Iterator[None]:
    with ExitStack() as stack:
        for device_type in ["cpu", *_accelerators()]:
            stack.enter_context(torch.autocast(device_type, dtype=torch.bfloat16))
        yield


def _generators() -> list[Any]:
    """Return the modules that hold a random state."""
    return [torch.random, *(torch.get_device_module(one) for one in _accelerators())]


@contextmanager
def _other_rng() -> Iterator[None]:
    before = [(module, module.get_rng_state()) for module in _generators()]
    torch.manual_seed(20_000)
    try:
        yield
    finally:
        for module, state in before:
            module.set_rng_state(state)


#: Each sets one thing for the length of a ``with`` block.
SETTINGS: Final[Mapping[str, Callable[[], AbstractContextManager[Any]]]] = {
    "default dtype bfloat16": partial(_default_dtype, torch.bfloat16),
    "default dtype float64": partial(_default_dtype, torch.float64),
    "default device meta": partial(_default_device, "meta"),
    "inference mode": torch.inference_mode,
    "grad mode off": torch.no_grad,
    "autocast": _autocast,
    "deterministic mode": _deterministic,
    "another thread count": _other_threads,
    "another random state": _other_rng,
}


def process_state() -> dict[str, Any]:
    """Return all of these settings as they are; two of one process can be compared.

    Not in a capture: the random state is read on the host.
    """
    device_types = ["cpu", *_accelerators()]
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "inference mode": torch.is_inference_mode_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "autocast": (
            *(torch.is_autocast_enabled(one) for one in device_types),
            *(torch.get_autocast_dtype(one) for one in device_types),
            torch.is_autocast_cache_enabled(),
        ),
        "deterministic mode": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "thread count": torch.get_num_threads(),
        "random state": [bytes(one.get_rng_state().tolist()) for one in _generators()],
    }
