"""Capture and replay: addresses, memory, what the host baked in, writes in no order."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from sconv_contract import simulated_npu
from sconv_contract.simulated_npu import (
    HostSync,
    MixedDevice,
    SimulationError,
    StaleAddress,
    UnlistedOperator,
    WriteRace,
)


def captured(call):
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = call()
    return graph, result


def test_a_capture_executes_nothing_and_a_replay_does_it_on_new_values(conv, make):
    before = conv.state.cpu()
    graph, y = captured(conv.step)
    assert torch.equal(conv.state.cpu(), before)
    assert y.lt(-(10**7)).all()
    for seed in (1, 2, 3):
        expected = make.on("cpu", seed)
        conv.take(make.on("npu", seed))
        conv.weight.copy_(expected.weight.to("npu"))
        graph.replay()
        assert torch.equal(y.cpu(), expected.step())
        assert torch.equal(conv.state.cpu(), expected.state)
    graph.assert_bound(state=conv.state, slots=conv.slots, x=conv.x, window=conv.state[1:])


def test_it_works_on_every_device(make):
    conv, expected = make.on("npu:1"), make.on("cpu")
    with torch.npu.device(1):
        graph, y = captured(conv.step)
    graph.replay()
    assert y.device.index == 1
    assert torch.equal(y.cpu(), expected.step())


def test_a_capture_is_of_one_device(make):
    conv, graph = make.on("npu:1"), torch.npu.NPUGraph()
    with pytest.raises(MixedDevice, match="npu:1 in a capture on npu:0"), torch.npu.graph(graph):
        conv.step()
    with pytest.raises(SimulationError, match="its capture failed"):
        graph.replay()


def test_a_shape_that_changes_in_a_replay_is_no_silent_broadcast():
    grow = simulated_npu.custom_op(
        "npu::test_grow(Tensor x) -> Tensor",
        lambda x: x.new_zeros(1) if x.is_meta or x[0] == 0 else x.new_zeros(1, 1),
    )
    x = torch.zeros(3, device="npu")
    graph, y = captured(lambda: grow(x))
    graph.replay()
    assert y.tolist() == [0]
    x.fill_(1)
    with pytest.raises(SimulationError, match="depends on values"):
        graph.replay()


def test_a_count_of_the_host_is_baked_in():
    """The planted fault: a replay repeats the first step's number."""
    total, host = torch.zeros(1, device="npu"), {"steps": 0}

    def step():
        host["steps"] += 1
        total.fill_(host["steps"])

    eager = []
    for _ in range(3):
        step()
        eager.append(total.item())
    host["steps"] = 0
    graph, _ = captured(step)
    replayed = []
    for _ in range(3):
        graph.replay()
        replayed.append(total.item())
    assert eager == [1, 2, 3]
    assert replayed == [1, 1, 1]


def test_a_buffer_made_anew_after_the_old_one_went_is_stale(conv):
    graph, _ = captured(conv.step)
    address = conv.x.data_ptr()
    conv.x = torch.ones(3, 4, device="npu")
    with pytest.raises(StaleAddress, match=f"{address:#x} .48 bytes., which was freed"):
        graph.replay()


def test_a_buffer_made_anew_while_the_old_one_lives_is_not_bound(conv):
    graph, _ = captured(conv.step)
    old = conv.x
    conv.x = torch.ones(3, 4, device="npu")
    graph.replay()
    graph.assert_bound(state=conv.state, x=old)
    with pytest.raises(StaleAddress, match=f"x lies in npu:0 {conv.x.data_ptr():#x}"):
        graph.assert_bound(state=conv.state, x=conv.x)
    with pytest.raises(StaleAddress, match="x is a tensor of cpu"):
        graph.assert_bound(x=conv.x.cpu())


def test_another_slice_of_a_bound_buffer_is_not_bound():
    buffer = torch.zeros(8, device="npu")
    graph, _ = captured(lambda: buffer[:4].add_(1))
    graph.assert_bound(buffer=buffer, first=buffer[:2])
    with pytest.raises(StaleAddress, match="second lies in"):
        graph.assert_bound(second=buffer[4:])


def test_copying_into_the_buffer_keeps_it_bound(conv, make):
    graph, y = captured(conv.step)
    address = conv.x.data_ptr()
    expected = make.on("cpu")
    conv.x.copy_(torch.ones(3, 4, device="npu"))
    graph.replay()
    graph.assert_bound(x=conv.x)
    assert conv.x.data_ptr() == address
    assert torch.equal(y.cpu(), replace(expected, x=torch.ones(3, 4)).step())


def test_an_update_of_a_contiguous_copy_never_reaches_the_pool(make):
    """The planted fault computes the right rows, in memory that nobody reads."""
    wide = torch.zeros(5, 4, 3, device="npu")
    conv = replace(make.on("npu"), state=wide.transpose(1, 2))
    before = simulated_npu.ledger(wide)
    replace(conv, state=conv.state.contiguous()).step()
    assert simulated_npu.ledger(wide) == before
    conv.step()
    assert simulated_npu.ledger(wide) == before | {"aten::index_copy_": 1}


@pytest.mark.parametrize("form", ["index_copy_", "index_put_", "scatter_"])
def test_two_rows_that_write_one_slot_race(form):
    state, rows = torch.zeros(5, 4, device="npu"), torch.arange(8.0, device="npu").view(2, 4)
    slots = torch.tensor([2, 2], device="npu")

    def write():
        if form == "index_copy_":
            state.index_copy_(0, slots, rows)
        elif form == "index_put_":
            state[slots] = rows
        else:
            state.scatter_(0, slots[:, None].expand(2, 4), rows)

    with pytest.raises(WriteRace, match=rf"aten::_?{form[:-1]}\w* writes different values to .*2"):
        write()
    rows[1] = rows[0]
    write()
    rows.fill_(float("nan"))
    write()
    assert state[2].isnan().all()
    slots.copy_(torch.tensor([3, 1], device="npu"))
    rows.copy_(torch.arange(8.0, device="npu").view(2, 4))
    write()
    assert state[:, 0].tolist()[1] == 4


def test_a_race_that_only_new_indices_make_is_found_at_the_replay(conv):
    graph, _ = captured(conv.step)
    graph.replay()
    conv.slots.fill_(1)
    with pytest.raises(WriteRace, match="aten::index_copy_"):
        graph.replay()


def test_memory_of_a_capture_is_the_graphs():
    x = torch.ones(3, device="npu")

    def step():
        inner = x + 1
        return inner * 2

    with simulated_npu.region(in_graph=True) as counters:
        graph = torch.npu.NPUGraph()
        # The region is the plugin's; entering a capture waits, as on the device.
        with pytest.raises(HostSync), torch.npu.graph(graph):
            pass
    graph, y = captured(step)
    gc.collect()
    address = y.data_ptr()
    graph.replay()
    assert (y.tolist(), y.data_ptr()) == ([4, 4, 4], address)
    del y
    gc.collect()
    held = torch.npu.memory_allocated()
    graph.replay()
    graph.reset()
    del graph
    gc.collect()
    assert torch.npu.memory_allocated() < held
    assert counters["alloc_in_graph"] == 0


def test_allocations_in_a_capture_are_counted():
    x = torch.ones(3, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph), simulated_npu.region(in_graph=True) as counters:
        torch.empty(3, device="npu").copy_(x)
        x.add_(1)
        numbers = torch.arange(3, device="npu")
    assert counters["alloc_in_graph"] == 2
    assert numbers.lt(0).all()
    graph.replay()
    assert (numbers.tolist(), x.tolist()) == ([0, 1, 2], [2, 2, 2])


def test_an_unlisted_operator_ends_a_capture():
    x = torch.ones(3, device="npu")
    graph = torch.npu.NPUGraph()
    with pytest.raises(UnlistedOperator), torch.npu.graph(graph):
        torch.lgamma(x)
    with pytest.raises(SimulationError, match="its capture failed"):
        graph.replay()


def test_a_failure_that_the_body_hides_fails_the_capture_all_the_same():
    x = torch.ones(3, device="npu")
    graph = torch.npu.NPUGraph()
    with pytest.raises(SimulationError, match="the capture failed: aten::_local"):  # noqa: PT012, SIM117
        with torch.npu.graph(graph):
            with pytest.raises(HostSync):
                x.sum().item()


def test_a_capture_of_a_capture_is_refused():
    x = torch.ones(3, device="npu")
    graph, _ = captured(lambda: x.add_(1))
    with pytest.raises(SimulationError, match="captured before"), torch.npu.graph(graph):
        pass
    with pytest.raises(SimulationError, match="default stream"):
        torch.npu.NPUGraph().capture_begin()
    with pytest.raises(SimulationError, match="no capture yet"):
        torch.npu.NPUGraph().replay()
    with pytest.raises(SimulationError, match="without capture_begin"):
        torch.npu.NPUGraph().capture_end()
    with pytest.raises(SimulationError, match="not simulated"):
        graph.update(cpu_update_input=[])
    graph.reset()
    with torch.npu.graph(graph, pool=torch.npu.graph_pool_handle()):
        x.add_(1)
    graph.replay()
    assert x.tolist() == [2, 2, 2]


def test_a_capture_in_inference_mode_is_replayed_outside():
    x = torch.ones(3, device="npu")
    with torch.inference_mode():
        graph, y = captured(lambda: x * 2)
    graph.replay()
    assert y.tolist() == [2, 2, 2]


def test_work_of_a_replay_is_no_work_of_the_host():
    x = torch.ones(3, device="npu")
    graph, _ = captured(lambda: x.add_(1))
    with simulated_npu.region(in_graph=True) as counters:
        graph.replay()
    assert counters == {"replay": 1}
    assert simulated_npu.ledger(x)["aten::add_"] == 2
