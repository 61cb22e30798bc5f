"""Which device the backend is built on, and that it refuses where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import sconv
from sconv.discovery import resolve_factory, select
from sconv.errors import BackendUnavailableError
from sconv.plugin import Available
from sconv.testing.digits import digit_spec, run_digits
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
