"""Errors derive from what a caller would catch, and say sizes."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
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


# A script, since a worker imports what it is given by name, and a test module has none.
WORKER = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from sconv import GraphBufferError

def refuse(rows):
    raise GraphBufferError("too small", have={"rows": 2}, need={"rows": rows})

if __name__ == "__main__":
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as pool:
        try:
            pool.submit(refuse, 3).result(timeout=60)
        except GraphBufferError as error:
            print(error.have, error.need, error)
        print(pool.submit(abs, -1).result(timeout=60))
"""


def test_err_1_a_workers_error_reaches_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("{'rows': 2} {'rows': 3} too small")
    assert second == "1"
