"""What a backend says of itself, and the metadata that it publishes."""

# The names of the tests say what they ask.
# ruff: noqa: D102

from __future__ import annotations

import itertools

import pytest
import torch

import sconv
from sconv import ForwardBatch, SpecError, StateSpec, Stream
from sconv.testing.digits import fill_pool, run_digits
from sconv.testing.harness import assert_same_bits

from .rule_marks import keeps
from .rulings import extend, ints
from .subject import Subject

__all__ = ["Descriptions"]


def _spec(**changes: object) -> StateSpec:
    given: dict[str, object] = {
        "num_layers": 2,
        "streams": [Stream("k", 5), Stream("v", 3)],
        "kernel_size": 4,
        "num_slots": 4,
        "max_requests": 3,
    }
    return StateSpec(**(given | changes))  # type: ignore[arg-type]


class Descriptions:
    """Tests of :class:`sconv_contract.BackendContract`."""

    @keeps("SCV401")
    def test_it_loads_for_everything_that_it_declares(self, subject: Subject) -> None:
        can = subject.can
        low, high = can.kernel_sizes
        for axis, dtype, size in itertools.product(
            can.window_axes, can.dtypes, range(low, high + 1)
        ):
            spec = _spec(window_axis=axis, dtype=getattr(torch, dtype), kernel_size=size)
            backend = subject.build(spec)
            assert backend.spec == spec
            assert backend.pool.spec == spec
            assert backend.device.type == backend.pool.layers[0].device.type
            shape = (5, *spec.window_shape(0))
            assert tuple(backend.pool.layers[1].shape) == shape
            assert backend.pool.conv(1, "v").dtype is spec.dtype

    @keeps("SCV401")
    def test_it_refuses_what_it_does_not_declare(self, subject: Subject) -> None:
        can = subject.can
        refused = []
        if not can.rollback:
            refused.append(_spec(max_draft_tokens=2))
        if not can.trees:
            refused.append(_spec(max_draft_tokens=2, draft_topk=2))
        refused += [
            _spec(kernel_size=size)
            for size in range(2, 9)
            if not can.kernel_sizes[0] <= size <= can.kernel_sizes[1]
        ]
        refused += [
            _spec(window_axis=axis) for axis in ("time", "channel") if axis not in can.window_axes
        ]
        refused += [
            _spec(dtype=getattr(torch, dtype))
            for dtype in ("bfloat16", "float16", "float32")
            if dtype not in can.dtypes
        ]
        for spec in refused:
            with pytest.raises(SpecError):
                subject.build(spec)
        with pytest.raises(SpecError):
            _spec(kernel_size=9)

    @keeps("SCV428")
    def test_metadata_has_the_documented_fields(self, subject: Subject) -> None:
        backend = subject.digits(num_layers=2)
        fill_pool(backend.pool, {3: [1, 2, 3], 5: [4, 5, 6]})
        slots = ints(backend, 3, -1, 5)
        batch = extend(backend, slots, ints(backend, 2, 1, 0), ints(backend, 3, 2, 0))
        backend.init_forward_metadata(batch)
        meta = backend.conv_state_metadata(0, batch)
        assert backend.conv_state_metadata(1, batch) is meta
        expected = {
            "cache_indices": (torch.int32, [3, -1, 5]),
            "query_start_loc": (torch.int32, [0, 2, 3, 3]),
            "has_initial_state": (torch.bool, [True, True, False]),
            "cache_mask": (torch.bool, [[[True]], [[False]], [[False]]]),
            "safe_idx": (torch.int64, [3, 0, 5]),
            "cu": (torch.int64, [0, 2, 3, 3]),
            "si": (torch.int32, [0, 0, 1]),
            "track_conv_indices": (torch.int64, [[0, 0, 0]] * 3),
            "track_cache_indices": (torch.int64, [-1, -1, -1]),
        }
        for name, (dtype, values) in expected.items():
            field = getattr(meta, name)
            assert field.dtype is dtype, name
            assert field.tolist() == values, name
        assert (meta.batch_size, meta.num_tokens) == (3, 3)

    @keeps("SCV429")
    def test_forward_metadata_can_be_taken_away_and_put_back(self, subject: Subject) -> None:
        backend = subject.digits()
        fill_pool(backend.pool, {3: [1, 2, 3], 5: [4, 5, 6]})
        batch = ForwardBatch.decode(slots=ints(backend, 3))
        backend.init_forward_metadata(batch)
        prepared = backend.forward_metadata
        assert prepared is not None
        backend.forward_metadata = None
        with pytest.raises(sconv.MetadataError):
            backend.conv_state_metadata(0, batch)
        run_digits(backend, ForwardBatch.decode(slots=ints(backend, 5)), [7])
        backend.forward_metadata = prepared
        assert backend.conv_state_metadata(0, batch) is prepared
        assert run_digits(backend, batch, [4], prepare=False) == [4321]

    @keeps("SCV431")
    def test_a_warm_up_changes_nothing(self, subject: Subject) -> None:
        spec = _spec(max_draft_tokens=2 if subject.can.rollback else 1)
        backend = subject.build(subject.fit(spec))
        generator = torch.Generator("cpu").manual_seed(0)
        for layer in backend.pool.layers:
            values = torch.randn(
                layer.shape, generator=generator, dtype=torch.float32, device="cpu"
            )
            layer.copy_(values)
        before = [layer.clone() for layer in backend.pool.layers]
        table = backend.pool.req_to_slot.clone()
        for _ in range(2):
            backend.warmup()
        for layer, old in zip(backend.pool.layers, before, strict=True):
            # Row 0 is the dummy: what it holds means nothing.
            assert_same_bits(layer[1:], old[1:], "state")
        assert torch.equal(backend.pool.req_to_slot, table)
