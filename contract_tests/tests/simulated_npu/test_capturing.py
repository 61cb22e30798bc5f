"""How the behaviour suite captures a call on a device that has graphs of its own."""

from __future__ import annotations

import warnings

import pytest
import torch

from sconv_contract.behaviour.capturing import capture, has_graphs
from sconv_contract.simulated_npu import HostSync, SilentFallback

NPU = torch.device("npu", 1)


def test_the_device_has_graphs():
    assert has_graphs(NPU)
    assert not has_graphs(torch.device("cpu"))


@pytest.fixture
def conv(make):
    """On the device that is not the current one."""
    return make.on("npu:1")


def test_a_right_call_is_captured_and_replayed(conv, make):
    replay, y = capture(NPU, conv.step)
    conv.take(make.on("npu:1", 3))
    conv.weight.copy_(make.on("npu:1", 3).weight)
    replay()
    assert torch.equal(y.cpu(), make.on("cpu", 3).step())


def test_a_call_that_waits_is_refused(conv):
    with pytest.raises(HostSync):
        capture(NPU, lambda: conv.step()[: int(conv.slots.max())])
    assert torch.npu.get_sync_debug_mode() == 0


def test_work_on_the_host_is_refused_though_no_capture_sees_it(conv, make):
    shadow = make.on("cpu")
    with pytest.raises(SilentFallback):
        capture(NPU, lambda: (shadow.step(), conv.step()))


def test_what_torch_says_of_its_debug_mode_fails_no_strict_test(conv, monkeypatch):
    """On a GPU it warns that the mode is a prototype."""
    chosen, inside = torch.npu.set_sync_debug_mode, []

    def choose(mode):
        if mode == "error":
            warnings.warn("a prototype feature", UserWarning, stacklevel=2)
        chosen(mode)

    monkeypatch.setattr(torch.npu, "set_sync_debug_mode", choose)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(NPU, lambda: inside.append(torch.npu.get_sync_debug_mode()) or conv.step())
    assert inside == [0, 2, 0]
