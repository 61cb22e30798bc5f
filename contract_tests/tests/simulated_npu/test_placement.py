"""Tensors of the device: what they say, where they lie, what may meet what."""

from __future__ import annotations

import copy
import gc
import importlib.util
import threading

import pytest
import torch

from sconv_contract import simulated_npu
from sconv_contract.simulated_npu import MixedDevice, SimulationError
from sconv_contract.simulated_npu.memory import memory


def test_tensors_are_ordinary_and_say_where_they_are():
    x = torch.zeros(2, 3, device="npu:1")
    assert type(x) is torch.Tensor
    assert (str(x.device), x.is_cpu, x.is_npu) == ("npu:1", False, True)
    assert torch.zeros(1).to("npu").device == torch.device("npu", 0)
    with torch.npu.device(1):
        assert torch.empty(1, device="npu").device.index == 1
        assert torch.npu.current_device() == 1
    assert torch.npu.current_device() == 0
    assert repr(x[0]) == "tensor([0., 0., 0.], device='npu:1')"


def test_memory_that_nobody_wrote_is_loud():
    assert torch.empty(3, dtype=torch.int64, device="npu").lt(-(2**60)).all()
    assert torch.empty(3, device="npu").lt(-(10**7)).all()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.complex64, torch.int8]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 1)])
def test_every_dtype_and_shape_survives_the_way_there_and_back(dtype, shape):
    values = torch.randint(0, 2, shape).to(dtype)
    there = values.to("npu:1")
    assert (there.dtype, there.shape, there.device.index) == (dtype, values.shape, 1)
    assert torch.equal(there.cpu(), values)


def test_views_share_memory_and_write_through():
    x = torch.arange(12, device="npu").view(3, 4)
    part = x[1:, ::2]
    assert part.data_ptr() == x.data_ptr() + 4 * 8
    assert part._base is x or part._base is x._base
    part.fill_(-1)
    assert x.tolist() == [[0, 1, 2, 3], [-1, 5, -1, 7], [-1, 9, -1, 11]]
    wide = x.view(torch.int32)
    assert wide.shape == (3, 8)
    assert x.t().contiguous().tolist() == [list(row) for row in zip(*x.tolist(), strict=True)]


def test_an_operator_in_place_or_into_out_returns_its_argument():
    x, out = torch.ones(3, device="npu"), torch.empty(3, device="npu")
    assert x.add_(1) is x
    assert torch.add(x, x, out=out) is out
    assert out.tolist() == [4, 4, 4]
    grown = torch.empty(0, device="npu")
    torch.add(x, x, out=grown)
    assert grown.tolist() == [4, 4, 4]
    with pytest.raises(SimulationError, match=r"from \[3\] to \[2, 3\]"):
        torch.add(torch.ones(2, 3, device="npu"), x, out=out)


def test_an_address_is_never_handed_out_again():
    seen = set()
    for _ in range(300):
        address = torch.empty(16, device="npu").data_ptr()
        assert address
        assert address % 512 == 0
        assert address not in seen
        seen.add(address)


def test_nothing_is_kept_that_nobody_uses():
    gc.collect()
    before = torch.npu.memory_allocated()
    live = len(memory._by_address)
    for _ in range(600):
        torch.empty(1 << 16, device="npu").add_(1).sum()
        assert len(memory._by_address) <= max(256, 2 * live)
    gc.collect()
    assert torch.npu.memory_allocated() == before


def test_a_kernel_that_raises_leaves_the_device_usable():
    for _ in range(50):
        with pytest.raises(IndexError):
            torch.zeros(3, device="npu").index_select(0, torch.tensor([7], device="npu"))
    assert torch.ones(3, device="npu").sum().item() == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.ones(3, device="npu:0") + torch.ones(3, device="npu:1"),
        lambda: torch.ones(3, device="npu:0") + torch.ones(3),
        lambda: torch.ones(3, device="npu:0").index_select(0, torch.tensor([1])),
        lambda: torch.cat([torch.ones(1, device="npu:0"), torch.ones(1, device="npu:1")]),
        lambda: torch.where(torch.ones(2, dtype=torch.bool), torch.ones(2, device="npu"), 0.0),
    ],
    ids=["npu:0 and npu:1", "npu and cpu", "an index of the host", "in a list", "a mask"],
)
def test_tensors_of_two_devices_are_refused(call):
    with pytest.raises(MixedDevice, match="was given tensors of"):
        call()


def test_a_number_of_the_host_is_no_other_device():
    x = torch.ones(3, device="npu")
    assert (x + torch.tensor(2.0)).tolist() == [3, 3, 3]
    assert torch.where(x > 2, x, 0.0).tolist() == [0, 0, 0]


def test_copies_between_devices_are_counted():
    x = torch.arange(3.0)
    with simulated_npu.region(in_graph=False, cpu="count") as counters:
        there = x.to("npu:0")
        other = there.to("npu:1")
        other.cpu()
    assert (counters["h2d"], counters["p2p"], counters["d2h"]) == (1, 1, 1)
    assert simulated_npu.ledger(there) == {"h2d": 1}
    assert simulated_npu.ledger(other) == {"p2p": 1}


def test_modules_move_copy_and_train():
    layer = torch.nn.Conv1d(4, 4, 3, groups=4).to("npu")
    twin = copy.deepcopy(layer)
    assert twin.weight.data_ptr() != layer.weight.data_ptr()
    first, part = copy.deepcopy([x := torch.arange(4.0, device="npu"), x[1:]])
    first.fill_(7)
    assert (part.tolist(), x.tolist()) == ([7, 7, 7], [0, 1, 2, 3])
    x = torch.randn(2, 4, 8)
    y = twin(x.to("npu"))
    y.sum().backward()
    assert torch.equal(y.cpu(), layer.cpu()(x))
    assert twin.weight.grad.device.type == "npu"
    with torch.inference_mode():
        assert torch.ones(2, device="npu").add_(1).sum().item() == 4


def test_threads_have_a_device_each():
    found = []

    def work():
        torch.npu.set_device(1)
        found.append(torch.ones(100, device="npu").cumsum(0).device.index)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == [1] * 4
    assert torch.npu.current_device() == 0


def test_the_device_can_be_missing():
    assert torch.npu.is_available()
    assert torch.npu.device_count() == 2
    simulated_npu.set_available(False)
    try:
        assert not torch.npu.is_available()
        assert torch.npu.device_count() == 0
        with pytest.raises(SimulationError, match="there are 0 devices"):
            torch.npu.set_device(0)
        with pytest.raises(SimulationError, match="there are 0 devices"):
            torch.ones(1).to("npu")
    finally:
        simulated_npu.set_available(True)
    with pytest.raises(SimulationError, match="there is no npu:2"):
        torch.npu.set_device(2)
    with pytest.raises(SimulationError, match="there is no npu:2"):
        torch.empty(1, device="npu:2")


def test_it_can_be_the_default_device():
    with torch.device("npu"):
        x = torch.arange(4.0).index_copy_(0, torch.tensor([1, 1]), torch.zeros(2))
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            y = x + torch.ones(4)
        graph.replay()
    assert y.tolist() == [1, 1, 3, 4]


def test_the_library_has_a_stand_in():
    import torch_npu

    assert torch_npu.__version__ == "2.13.0+sim"
    assert importlib.util.find_spec("torch_npu") is not None
    assert torch_npu.npu is torch.npu


def test_it_is_installed_once():
    simulated_npu.install()
    with pytest.raises(SimulationError, match="installed with 2 devices already"):
        simulated_npu.install(3)


def test_streams_and_events_are_there_and_order_nothing():
    side = torch.npu.Stream()
    assert torch.npu.current_stream() == torch.npu.default_stream()
    with torch.npu.stream(side):
        assert torch.npu.current_stream() == side
        first = side.record_event(torch.npu.Event(enable_timing=True))
    assert torch.npu.current_stream() != side
    second = torch.npu.Event(enable_timing=True)
    second.record()
    side.wait_event(second)
    side.wait_stream(torch.npu.current_stream())
    assert side.query()
    assert second.query()
    assert first.elapsed_time(second) >= 0
    torch.npu.synchronize()
