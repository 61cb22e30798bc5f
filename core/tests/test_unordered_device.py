"""What only devices without an order of writes do, compared on the CPU with what a host does."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sconv
from sconv import ForwardMode, ShortConvMetadata, StateSpec
from sconv.plugin import TorchBackend
from sconv.testing.harness import Harness
from sconv.testing.strategies import live_slots, specs, steps


def unordered(spec: StateSpec) -> TorchBackend:
    """Return a backend that believes that its device does not order writes to one place."""
    backend = TorchBackend(spec=spec, device=torch.device("cpu"), pool=None)
    backend._ordered = False
    return backend


@pytest.mark.parametrize("mode", ForwardMode)
@given(data=st.data())
def test_gpu_1_metadata_does_not_depend_on_the_order_of_writes(
    mode: ForwardMode, data: st.DataObject
) -> None:
    spec = data.draw(specs(draft=True))
    harness = Harness(sconv.load_backend("cpu", spec=spec), seed=1, live=data.draw(live_slots()))
    other = unordered(spec)
    other.pool.req_to_slot.copy_(harness.backend.pool.req_to_slot)
    batch = harness.batch(data.draw(steps(spec, harness.live, mode)))
    harness.backend.init_forward_metadata(batch)
    other.init_forward_metadata(forward_batch=batch)
    expected, found = harness.backend.forward_metadata, other.forward_metadata
    assert expected is not None
    assert found is not None
    for field in fields(ShortConvMetadata):
        value = getattr(expected, field.name)
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(found, field.name), value), field.name
    assert not found.writes[found.cache_indices <= 0].any()
