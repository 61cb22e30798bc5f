"""The host waits for the device, or does its work: counted outside of graphs, refused in them."""

from __future__ import annotations

import numpy
import pytest
import torch

from sconv_contract import simulated_npu
from sconv_contract.simulated_npu import HostSync, SilentFallback

WAITS = {
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x.max()),
    "bool": lambda x: bool(x[0] > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.cpu().numpy(),
    "mask": lambda x: x[x > 0],
    "mask write": lambda x: x.__setitem__(x > 0, 0.0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "bincount": lambda x: x.long().bincount(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "from a list": lambda x: torch.tensor([1, 2], device="npu"),
    "from the host": lambda x: x.copy_(torch.ones(3)),
    "synchronize": lambda x: torch.npu.synchronize(),
    "stream": lambda x: torch.npu.current_stream().synchronize(),
    "event": lambda x: torch.npu.Event().synchronize(),
}

every_wait = pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)


@every_wait
def test_it_is_refused_in_a_region_of_a_graph(wait):
    """Also where the plugin lists the operator."""
    x = torch.ones(3, device="npu")
    with (
        simulated_npu.region(in_graph=True, cpu="count") as counters,
        pytest.raises(HostSync, match="in a region of a graph"),
    ):
        wait(x)
    assert sum(count for key, count in counters.items() if key.startswith("sync.")) == 1


@every_wait
def test_it_is_counted_outside_of_graphs(wait):
    x = torch.ones(3, device="npu")
    with simulated_npu.region(in_graph=False, cpu="count") as counters:
        wait(x)
    assert any(key.startswith("sync.") for key in counters)


@every_wait
def test_it_ends_a_capture(wait):
    x = torch.ones(3, device="npu")
    graph = torch.npu.NPUGraph()
    with pytest.raises(HostSync, match="in a capture"), torch.npu.graph(graph):
        wait(x)
    assert not torch.npu.is_current_stream_capturing()
    with pytest.raises(simulated_npu.SimulationError, match="its capture failed"):
        graph.replay()


def test_the_debug_mode_of_the_device_refuses_what_nobody_asked_for():
    x = torch.ones(3, device="npu")
    torch.npu.set_sync_debug_mode("error")
    try:
        assert torch.npu.get_sync_debug_mode() == 2
        with pytest.raises(HostSync, match="set_sync_debug_mode"):
            x.sum().item()
        torch.npu.synchronize()
        torch.npu.set_sync_debug_mode("warn")
        with pytest.warns(UserWarning, match="the host waits"):
            x.sum().item()
    finally:
        torch.npu.set_sync_debug_mode(0)
    assert x.sum().item() == 3
    with pytest.raises(RuntimeError, match="one of"):
        torch.npu.set_sync_debug_mode("loud")


def through_the_host(conv):
    """Right values, and no work of the device at all."""
    taps = torch.cat([conv.state.cpu()[conv.slots.cpu()], conv.x.cpu()[:, None]], dim=1)
    state = conv.state.cpu()
    state[conv.slots.cpu()] = taps[:, 1:]
    conv.state.copy_(state)
    return (taps * conv.weight.cpu()).sum(1).to("npu")


def test_a_step_through_the_host_is_refused_in_graph(conv):
    with simulated_npu.region(in_graph=True), pytest.raises(HostSync, match="device to the host"):
        through_the_host(conv)


def test_a_step_through_the_host_shows_in_the_counters_and_the_ledger(conv, make):
    expected = make.on("cpu")
    before = simulated_npu.ledger(conv.state)
    with simulated_npu.region(in_graph=False, cpu="count") as counters:
        y = through_the_host(conv)
    assert torch.equal(y.cpu(), expected.step())
    assert torch.equal(conv.state.cpu(), expected.state)
    assert (counters["d2h"], counters["h2d"]) == (6, 2)
    assert not any(key.startswith("op.") for key in counters)
    assert simulated_npu.ledger(conv.state) == before | {"h2d": before["h2d"] + 1}


def test_the_right_step_is_written_by_the_device(conv):
    before = simulated_npu.ledger(conv.state)
    conv.step()
    assert simulated_npu.ledger(conv.state) == before | {"aten::index_copy_": 1}


def test_a_state_that_lives_on_the_host_is_refused(make):
    """Nothing of the device is read, so nothing waits."""
    shadow = make.on("cpu")
    with (
        simulated_npu.region(in_graph=False),
        pytest.raises(SilentFallback, match="aten::index_select ran on tensors of the host"),
    ):
        shadow.step()
    with simulated_npu.region(in_graph=False, cpu="count") as counters:
        shadow.step()
    assert counters["cpu.aten::index_copy_"] == 1


def test_numpy_on_a_copy_shows_by_its_transfers():
    x = torch.ones(3, device="npu")
    with simulated_npu.region(in_graph=False, cpu="count") as counters:
        x.copy_(torch.from_numpy(numpy.cumsum(x.cpu().numpy())))
    assert (counters["d2h"], counters["h2d"]) == (1, 1)
    assert x.tolist() == [1, 2, 3]


def test_kernels_of_the_device_are_no_work_of_the_host(conv):
    """They compute on the host here; only what a plugin calls is its own."""
    with simulated_npu.region(in_graph=True) as counters:
        conv.step()
        _ = conv.x[0] + 1
        assert conv.slots.shape[0] == 3
    assert not any(key.startswith("cpu.") for key in counters)


def test_regions_nest_and_count_each():
    x = torch.ones(3, device="npu")
    with simulated_npu.region(in_graph=False) as outer:
        _ = x + 1
        with simulated_npu.region(in_graph=True) as inner:
            _ = x * 2
    assert (outer["op.aten::add"], outer["op.aten::mul"]) == (1, 1)
    assert (inner["op.aten::add"], inner["op.aten::mul"]) == (0, 1)
    assert inner["alloc"] == 1
    with pytest.raises(ValueError, match="'refuse' or 'count'"), simulated_npu.region(True, "no"):
        pass
