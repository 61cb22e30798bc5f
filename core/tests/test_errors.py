"""Errors derive from what a caller would catch, and say sizes."""

from __future__ import annotations

import inspect

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
