"""Which operators there are: torch_npu's, then those that the plugin lists."""

from __future__ import annotations

import pytest
import torch

from sconv_contract import simulated_npu
from sconv_contract.simulated_npu import SimulationError, UnlistedOperator
from sconv_contract.simulated_npu.requirements import PRIVATE_NAMES, exists


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_torch_still_has_what_it_does_not_promise(name):
    """A canary: the device is built on these, and install() refuses a torch that lacks one."""
    assert exists(name)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("nonzero_static", lambda x: torch.nonzero_static(x, size=2)),
        ("_assert_async", lambda x: torch._assert_async(x[0] > 0)),
        ("copysign.out", lambda x: torch.copysign(x, x)),
        ("lgamma.out", torch.lgamma),
        ("segment_reduce", lambda x: torch.segment_reduce(x, "sum", lengths=x.long())),
    ],
)
def test_what_torch_npu_runs_on_the_cpu_is_refused(name, call):
    x = torch.ones(1, device="npu")
    with (
        simulated_npu.region(in_graph=False) as counters,
        pytest.raises(UnlistedOperator, match=f"aten::{name}: torch_npu 2.13.0 .* run on the CPU"),
    ):
        call(x)
    assert counters[f"unlisted.aten::{name}"] == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.index_select(0, torch.tensor([1, 0], device="npu")),
        lambda x: torch.nn.functional.silu(x).clamp(0, 1),
        lambda x: torch.nn.functional.conv1d(x.view(1, 1, -1), x.view(1, 1, -1)[..., :2]),
        lambda x: x.roll(1).flip(0).cumsum(0),
        lambda x: torch.stack([x, x]).amax(0) + x.softmax(0),
        lambda x: torch.nn.functional.layer_norm(x, (4,)),
        lambda x: x.view(2, 2) @ x.view(2, 2),
        lambda x: x.index_add_(0, torch.tensor([1], device="npu"), x[:1] * 2),
    ],
)
def test_what_torch_npu_has_runs_as_on_the_host(call):
    values = torch.arange(4.0) - 1.5
    host = torch.tensor
    there = call(values.to("npu"))
    assert there.device.type == "npu"
    torch.tensor = lambda data, device=None: host(data)
    try:
        expected = call(values.clone())
    finally:
        torch.tensor = host
    assert torch.equal(there.cpu(), expected)


def test_a_right_step_uses_what_it_lists(conv):
    with simulated_npu.region(in_graph=True, allow=conv.operators) as counters:
        conv.step()
    used = {key.removeprefix("op.") for key in counters if key.startswith("op.")}
    assert used == conv.operators
    assert not any(key.startswith(("cpu.", "sync.", "unlisted.")) for key in counters)


def test_an_operator_outside_of_the_plugins_list_is_named(conv):
    """Advanced indexing, which is no index_select."""
    with (
        simulated_npu.region(in_graph=True, allow=conv.operators) as counters,
        pytest.raises(UnlistedOperator, match=r"aten::index\.Tensor is not among the 5 operators"),
    ):
        _ = conv.state[conv.slots]
    assert counters["unlisted.aten::index.Tensor"] == 1


def test_a_list_may_name_an_overload():
    x = torch.ones(3, device="npu")
    with simulated_npu.region(in_graph=True, allow=frozenset({"aten::add.Tensor"})):
        _ = x + x
        with pytest.raises(UnlistedOperator, match=r"aten::add_\.Tensor"):
            x += x


def test_an_operator_of_nobody_is_refused():
    library = torch.library.Library("sconv_nobody", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    assert torch.ops.sconv_nobody.twice(torch.ones(1)).item() == 2
    with pytest.raises(UnlistedOperator, match="nobody registered a kernel for npu"):
        torch.ops.sconv_nobody.twice(torch.ones(1, device="npu"))


def reference(state, x):
    y = state.sum(0) + x
    state.copy_(torch.cat([state[1:], x[None]]))
    return y


def test_an_operator_of_a_vendor_is_called_counted_and_captured():
    update = simulated_npu.custom_op(
        "npu::test_conv_update(Tensor(a!) state, Tensor x) -> Tensor", reference
    )
    assert torch.ops.npu.test_conv_update is update
    state, x = torch.zeros(3, 4, device="npu"), torch.ones(4, device="npu")
    with simulated_npu.region(in_graph=True) as counters:
        assert update(state, x).device == state.device
    assert counters["op.npu::test_conv_update"] == 1
    assert simulated_npu.ledger(state)["npu::test_conv_update"] == 1
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = update(state, x)
    graph.replay()
    assert (y.tolist(), state[:, 0].tolist()) == ([2] * 4, [0, 1, 1])
    with pytest.raises(SimulationError, match="npu::test_conv_update cannot be defined"):
        simulated_npu.custom_op("npu::test_conv_update(Tensor x) -> Tensor", reference)
    with pytest.raises(SimulationError, match="begins with NAMESPACE::NAME"):
        simulated_npu.custom_op("update(Tensor x) -> Tensor", reference)
