"""Capturing where there is nothing to capture with; devices with graphs have tests of their own."""

from __future__ import annotations

import pytest
import torch

from sconv import SpecError
from sconv.engine.graphs import capture, has_graphs


def test_the_host_has_no_graphs():
    device = torch.device("cpu")
    assert not has_graphs(device)
    calls = []
    with pytest.raises(SpecError, match="cpu has no graphs"):
        capture(device, lambda: calls.append(1))
    assert calls == []
