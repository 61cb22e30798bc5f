"""Errors derive from what a caller would catch, and say sizes."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from sconv import errors
from sconv.errors import GraphBufferError, SconvError

BUILT_IN = {
    "PluginError": RuntimeError,
    "BackendNotFoundError": LookupError,
    "BackendUnavailableError": RuntimeError,
    "ContractError": TypeError,
    "SpecError": ValueError,
    "BatchError": ValueError,
    "MetadataError": RuntimeError,
    "SlotError": ValueError,
    "PoolError": RuntimeError,
    "PoolExhaustedError": RuntimeError,
    "GraphBufferError": RuntimeError,
    "TorchUnavailableError": ImportError,
}


def test_every_error_is_listed_here() -> None:
    defined = {name for name, kind in inspect.getmembers(errors, inspect.isclass)}
    assert defined == {*BUILT_IN, "SconvError"} == set(errors.__all__)


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_error_is_sconvs_and_a_built_in(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, SconvError)
    assert issubclass(kind, BUILT_IN[name])


def test_a_buffer_error_carries_both_sizes() -> None:
    error = GraphBufferError("too small", have={"rows": 2, "tokens": 4}, need={"rows": 3})
    assert str(error) == "too small: have rows=2, tokens=4, need rows=3"
    assert (error.have, error.need) == ({"rows": 2, "tokens": 4}, {"rows": 3})


class FieldError(GraphBufferError):
    """A subclass with another constructor, and a field that it does not hand on."""

    def __init__(self, slot: int, *, reason: str) -> None:
        super().__init__(f"slot {slot}: {reason}", have={"slots": 1}, need={"slots": slot})
        self.slot = slot


def made(name: str) -> SconvError:
    """Return an error of a class, with what it may carry."""
    if name == "FieldError":
        return FieldError(3, reason="gone")
    if name == "GraphBufferError":
        return GraphBufferError("too small", have={"rows": 2}, need={"rows": 3})
    if name == "TorchUnavailableError":
        return errors.TorchUnavailableError("pip install it", name="torch")
    error: SconvError = getattr(errors, name)("what is wrong")
    error.add_note("and where")
    return error


TRIPS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{
        f"pickle {protocol}": lambda error, protocol=protocol: pickle.loads(
            pickle.dumps(error, protocol)
        )
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    },
}


@pytest.mark.parametrize("trip", TRIPS)
@pytest.mark.parametrize("name", [*errors.__all__, "FieldError"])
def test_err_1_an_error_survives_with_its_fields(name: str, trip: str) -> None:
    error = made(name)
    again = TRIPS[trip](error)
    assert type(again) is type(error)
    assert (str(again), again.args) == (str(error), error.args)
    assert vars(again) == vars(error)
    if isinstance(error, ImportError):
        assert (again.name, again.msg) == (error.name, error.msg) == ("torch", str(error))


def refuse(rows: int) -> None:
    """Run in a worker."""
    raise GraphBufferError("too small", have={"rows": 2}, need={"rows": rows})


def test_err_1_a_workers_error_reaches_its_parent() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as pool:
        failed = pool.submit(refuse, 3)
        with pytest.raises(GraphBufferError, match="have rows=2, need rows=3") as caught:
            failed.result(timeout=60)
        assert (caught.value.have, caught.value.need) == ({"rows": 2}, {"rows": 3})
        assert pool.submit(abs, -1).result(timeout=60) == 1
