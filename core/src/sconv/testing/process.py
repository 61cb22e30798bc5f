"""What a process can set and no result may depend on, and how to see that it is left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
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


@contextmanager
def _other_rng() -> Iterator[None]:
    before = torch.get_rng_state()
    torch.manual_seed(20_000)
    try:
        yield
    finally:
        torch.set_rng_state(before)


#: Each sets one thing for the length of a ``with`` block.
SETTINGS: Final[Mapping[str, Callable[[], AbstractContextManager[Any]]]] = {
    "default dtype bfloat16": partial(_default_dtype, torch.bfloat16),
    "default dtype float64": partial(_default_dtype, torch.float64),
    "default device meta": partial(_default_device, "meta"),
    "inference mode": torch.inference_mode,
    "grad mode off": torch.no_grad,
    "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    "deterministic mode": _deterministic,
    "another thread count": _other_threads,
    "another random state": _other_rng,
}


def process_state() -> dict[str, Any]:
    """Return all of these settings as they are; two of one process can be compared."""
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "inference mode": torch.is_inference_mode_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "deterministic mode": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "thread count": torch.get_num_threads(),
        "random state": bytes(torch.get_rng_state().tolist()),
    }
