"""Metadata in one launch equals what plain torch fills in, for every mode and batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sconv
from sconv import ForwardBatch, ForwardMode
from sconv.plugin import TorchBackend
from sconv.testing.harness import Harness
from sconv.testing.strategies import live_slots, specs, steps

Load = Callable[..., sconv.Backend]

#: The interpreter takes a program at a time; ``SCONV_CUDA_EXAMPLES=1000`` looks further.
few = settings(
    derandomize="SCONV_CUDA_EXAMPLES" not in os.environ,
    deadline=None,
    max_examples=int(os.environ.get("SCONV_CUDA_EXAMPLES", "12")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("mode", list(ForwardMode))
@few
@given(data=st.data())
def test_metadata_equals_that_of_the_dense_backend(
    mode: ForwardMode, load: Load, device: torch.device, data: st.DataObject
) -> None:
    spec = data.draw(specs(draft=True))
    harness = Harness(load(spec), seed=1, live=data.draw(live_slots()))
    dense = TorchBackend(spec=spec, device=device, pool=None)
    dense.pool.req_to_slot.copy_(harness.backend.pool.req_to_slot)
    batch = harness.batch(data.draw(steps(spec, harness.live, mode)))
    found, expected = _filled(harness.backend, batch), _filled(dense, batch)
    for field in fields(expected):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if not isinstance(other, torch.Tensor):
            assert one == other or field.name in ("padded", "plan"), field.name
            continue
        if field.name == "track_conv_indices":
            # A decode's snapshot is its new window: there is nothing to gather.
            wanted = expected.track_cache_indices >= 0
            one, other = one[wanted], other[wanted]
        assert torch.equal(one, other), f"{field.name}: {one} instead of {other} for {batch}"


@pytest.mark.parametrize("longest", [0, 7, 8, 32, 33])
@pytest.mark.parametrize("tail", [0, 3, 40])
def test_rows_of_tokens_are_right_on_both_sides_of_a_short_row(
    load: Load, device: torch.device, longest: int, tail: int
) -> None:
    """Short rows write their own tokens, longer ones look them up; the last has the tail too."""
    backend = load(
        sconv.StateSpec(
            num_layers=1, streams=[sconv.Stream("s", 8)], kernel_size=4, num_slots=8, max_requests=8
        )
    )
    lengths = torch.tensor([3, longest, 0, 1, 2], device=device)
    tokens = int(lengths.sum()) + tail
    slots = torch.arange(1, 6, device=device)
    batch = ForwardBatch.extend(
        None, lengths, torch.zeros_like(lengths), num_tokens=tokens, slots=slots
    )
    found = _filled(backend, batch).si
    expected = torch.arange(5, device=device).repeat_interleave(lengths)
    assert found[: tokens - tail].tolist() == expected.tolist()
    assert (found[tokens - tail :] == 4).all()


def test_a_long_batch_and_a_long_row_are_resolved_in_one_launch(
    load: Load, device: torch.device
) -> None:
    """More rows than a program adds up at once, and a row longer than the piece of one program."""
    rows = 1100
    lengths = torch.randint(0, 3, (rows,), generator=torch.Generator().manual_seed(0))
    lengths[rows // 2] = 5000
    spec = sconv.StateSpec(1, [sconv.Stream("s", 1)], 4, rows, rows)
    backend = load(spec)
    backend.pool.req_to_slot[1:] = torch.arange(rows, 0, -1, dtype=torch.int32, device=device)
    names = torch.arange(1, rows + 1, device=device)
    total = int(lengths.sum())
    batch = ForwardBatch.extend(
        names, lengths.to(device), torch.zeros_like(names), num_tokens=total + 700
    )
    meta = _filled(backend, batch)
    assert meta.cu.tolist() == [0, *lengths.cumsum(0).tolist()]
    expected = torch.repeat_interleave(torch.arange(rows), lengths)
    assert meta.si.cpu().tolist() == [*expected.tolist(), *[rows - 1] * 700]
    assert meta.cache_indices.cpu().tolist() == list(range(rows, 0, -1))


def _filled(backend: sconv.Backend | TorchBackend, batch: ForwardBatch) -> sconv.ShortConvMetadata:
    backend.init_forward_metadata(forward_batch=batch)
    meta = backend.forward_metadata
    assert meta is not None
    return meta


def test_padded_rows_of_a_static_buffer_hold_the_sentinel_graph_3(
    load: Load, device: torch.device
) -> None:
    """Nothing of the batch before is left in the rows of a smaller one."""
    spec = sconv.StateSpec(1, [sconv.Stream("s", 8)], 4, 6, 6)
    backend = load(spec)
    backend.init_graph_state(4, 4)
    places = []
    for names in ([3, 1, 4, 2], [5, 6, -1, -1], [2, -1, -1, -1]):
        batch = ForwardBatch.decode(slots=torch.tensor(names, device=device))
        backend.init_forward_metadata_out_graph(batch)
        backend.init_forward_metadata_in_graph(batch)
        meta = backend.forward_metadata
        assert meta is not None
        assert meta.cache_indices.tolist() == names
        places.append(meta.cache_indices.data_ptr())
    assert len(set(places)) == 1
