"""Which device the backend is built on, and that it refuses where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import sconv
from sconv import Available, BackendUnavailableError
from sconv.discovery.selection import resolve_factory, select
from sconv.plugin import TorchBackend
from sconv.testing.digits import digit_spec, run_digits
from sconv_ascend.backend import AscendBackend
from sconv_ascend.probe import PRIORITY
from sconv_contract import simulated_npu


@pytest.fixture
def no_device() -> Iterator[None]:
    simulated_npu.set_available(False)
    yield
    simulated_npu.set_available(True)


def test_with_a_device_it_is_what_auto_takes() -> None:
    info = select("auto")
    assert (info.name, info.availability) == ("ascend", Available(PRIORITY))
    backend = sconv.load_backend(spec=digit_spec())
    assert backend.info.name == "ascend"


@pytest.mark.parametrize("index", [0, 1])
def test_the_device_is_named_as_its_tensors_name_it(index: int) -> None:
    """The current one, unless one is named: x.device == backend.device has to hold."""
    with torch.npu.device(index):
        backend = sconv.load_backend("ascend", spec=digit_spec())
        assert backend.device == torch.device("npu", index)
    assert backend.pool.layers[0].device == backend.device
    other = sconv.load_backend("ascend", spec=digit_spec(), device=f"npu:{1 - index}")
    assert other.pool.req_to_slot.device == torch.device("npu", 1 - index)


@pytest.mark.parametrize("device", [None, "npu"])
@pytest.mark.parametrize("adopted", [False, True])
def test_a_factory_is_told_the_index(
    adopted: bool, device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool's, or else the current one; also a plugin without core's base class needs it."""
    create, told = resolve_factory(select("ascend")), []

    def spy(*, device: torch.device, **rest: Any) -> AscendBackend:
        told.append(device)
        return create(device=device, **rest)

    monkeypatch.setattr(sconv.engine.loading, "resolve_factory", lambda info: spy)
    pool = sconv.ConvStatePool.adopt(digit_spec(), device="npu:1") if adopted else None
    with torch.npu.device(0 if adopted else 1):
        sconv.load_backend("ascend", spec=digit_spec(), device=device, pool=pool)
    assert told == [torch.device("npu", 1)]


@pytest.mark.parametrize("index", [0, 1])
def test_memory_lies_on_the_current_device_before_any_backend_exists(index: int) -> None:
    with torch.npu.device(index):
        pool = sconv.ConvStatePool.adopt(digit_spec(), device="npu")
        owned = sconv.ConvStatePool(digit_spec(), "npu")
    expected = torch.device("npu", index)
    assert (pool.device, owned.device, pool.req_to_slot.device) == (expected,) * 3
    pool.bind([torch.zeros(10, 3, 1, device=expected)])
    assert pool.layers[0].device == pool.device


@pytest.mark.parametrize("device", [None, "npu", "npu:1", torch.device("npu", 1)])
def test_a_backend_goes_where_its_pool_lies(device: torch.device | str | None) -> None:
    """Also where another device is the current one."""
    pool = sconv.ConvStatePool.adopt(digit_spec(), device="npu:1")
    backend = sconv.load_backend("ascend", spec=digit_spec(), device=device, pool=pool)
    assert (backend.device, backend.pool.device) == (torch.device("npu:1"),) * 2
    pool.bind(torch.zeros(1, 10, 3, 1, device="npu:1"))
    batch = sconv.ForwardBatch.decode(slots=torch.tensor([4], device="npu:1"))
    assert run_digits(backend, batch, [4]) == [4000]


@pytest.mark.parametrize(
    ("name", "where"), [("ascend", "npu:1"), ("ascend", "cpu"), ("cpu", "npu")]
)
def test_a_pool_on_another_device_is_refused(name: str, where: str) -> None:
    pool = sconv.ConvStatePool.adopt(digit_spec(), device=where)
    device = "npu:0" if name == "ascend" else None
    with pytest.raises(sconv.SpecError, match=rf"pool lies on {where}(:0)?, .*: give the device"):
        sconv.load_backend(name, spec=digit_spec(), device=device, pool=pool)


def test_a_class_that_is_built_by_hand_is_on_the_device_of_its_tensors() -> None:
    backend = TorchBackend(spec=digit_spec(), device=torch.device("npu"), pool=None)
    assert backend.device == backend.pool.layers[0].device == torch.device("npu:0")


def test_memory_that_is_bound_later_lies_on_the_current_device() -> None:
    pool = sconv.ConvStatePool.adopt(digit_spec(), device="npu")
    backend = sconv.load_backend("ascend", spec=digit_spec(), pool=pool)
    pool.bind([torch.zeros(10, 3, 1, device="npu")])
    batch = sconv.ForwardBatch.decode(slots=torch.tensor([4], device="npu"))
    assert run_digits(backend, batch, [4]) == [4000]


@pytest.mark.usefixtures("no_device")
def test_without_a_device_it_refuses_and_does_not_fall_back() -> None:
    with pytest.raises(BackendUnavailableError, match=r"torch_npu .* finds "):
        sconv.load_backend("ascend", spec=digit_spec())
    assert select("auto").name != "ascend"


def test_a_device_that_is_lost_after_the_choice_is_refused_by_the_factory() -> None:
    create = resolve_factory(select("ascend"))
    simulated_npu.set_available(False)
    try:
        with pytest.raises(BackendUnavailableError, match="Ascend backend requested, but "):
            create(spec=digit_spec(), device=torch.device("npu"), pool=None)
    finally:
        simulated_npu.set_available(True)
