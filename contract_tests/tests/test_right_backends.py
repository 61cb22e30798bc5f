"""The behaviour suite passes a right backend, and asks it for no more than it declares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sconv
from sconv.plugin import TorchBackend
from sconv_contract import BackendContract
from sconv_contract.behaviour.subject import Subject


class TestDense(BackendContract):
    """Core's own hooks, declared recordable: every rule applies and is kept."""

    @pytest.fixture
    def backend(self, builder: Callable[..., Any]) -> Callable[..., sconv.Backend]:
        return builder(TorchBackend)


def test_a_backend_without_capabilities_is_asked_for_nothing_more(builder):
    """It may do without speculation, graphs, float16 and widths above 5."""
    can = sconv.Capabilities(window_axes=("channel",), dtypes=("float32",), kernel_sizes=(3, 5))
    subject = Subject.of(builder(TorchBackend, can))
    drawn = sconv.StateSpec(
        num_layers=1,
        streams=[sconv.Stream("a", 3)],
        kernel_size=8,
        num_slots=2,
        max_requests=2,
        max_draft_tokens=4,
        draft_topk=2,
    )
    spec = subject.fit(drawn)
    assert (spec.kernel_size, spec.window_axis, spec.dtype) == (5, "channel", torch.float32)
    assert (spec.max_draft_tokens, spec.draft_topk) == (1, 1)
    with pytest.raises(pytest.skip.Exception, match="graph_capture=False"):
        subject.needs("graph_capture")


def test_the_fixture_must_be_given():
    with pytest.raises(NotImplementedError, match="override the fixture 'backend'"):
        BackendContract.backend.__wrapped__(BackendContract())
