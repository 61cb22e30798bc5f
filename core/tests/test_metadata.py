"""Step metadata of the plain-torch backend, field by field, against the oracle's plain lists."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from sconv import (
    ConvStatePool,
    ForwardBatch,
    ForwardMode,
    ShortConvMetadata,
    StateSpec,
    Stream,
    reference,
)
from sconv.testing.steps import Step
from sconv.testing.strategies import NUM_SLOTS, live_slots, specs, steps
from sconv.torch_backend.backend import TorchBackend

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = {
    "cache_indices": torch.int32,
    "query_start_loc": torch.int32,
    "has_initial_state": torch.bool,
    "cache_mask": torch.bool,
    "safe_idx": torch.int64,
    "cu": torch.int64,
    "si": torch.int32,
    "track_conv_indices": torch.int64,
    "track_cache_indices": torch.int64,
}


def backend_of(spec: StateSpec, pool: ConvStatePool | None = None) -> TorchBackend:
    return TorchBackend(spec=spec, device=torch.device("cpu"), pool=pool)


def expected_fields(step: Step, spec: StateSpec) -> dict[str, list[Any]]:
    tokens: list[int] | None = None
    if step.mode is ForwardMode.DRAFT_EXTEND:
        assert step.accepts is not None
        tokens = [-1] * step.rows
        if spec.track_grid is not None:
            # A count that is not the row's keeps nothing, so it crosses nothing.
            accepts = [n if n <= step.draft_tokens else -1 for n in step.accepts]
            tokens = reference.crossing_tokens(
                seq_lens=step.before, accepts=accepts, grid=spec.track_grid
            )
    elif step.track_lengths is not None:
        tokens = [
            length - old if length >= 0 else -1
            for length, old in zip(step.track_lengths, step.before, strict=True)
        ]
    return reference.metadata(
        mode=step.mode,
        slots=step.slots,
        lengths=step.lengths,
        has_initial=[False] * step.rows if step.mode is ForwardMode.IDLE else step.resumes,
        kernel_size=spec.kernel_size,
        num_tokens=step.num_tokens,
        track_slots=None if step.track_slots is None else step.snapshot_targets,
        track_tokens=tokens,
    )


def assert_fields(meta: ShortConvMetadata, step: Step, spec: StateSpec) -> None:
    for name, values in expected_fields(step, spec).items():
        field = getattr(meta, name)
        assert field.tolist() == values, f"{name} of {step}"
        assert field.dtype is DTYPES[name], name
    assert meta.cache_mask.shape == (step.rows, 1, 1)
    assert meta.track_conv_indices.shape == (step.rows, spec.window_size)
    assert (meta.forward_mode, meta.batch_size) == (step.mode, step.rows)
    assert meta.num_tokens == step.num_tokens
    for row, slot in enumerate(step.slots):
        writes = bool(meta.writes[row])
        match step.mode:
            case ForwardMode.TARGET_VERIFY | ForwardMode.IDLE:
                assert not writes
            case ForwardMode.DRAFT_EXTEND:
                assert step.accepts is not None
                assert writes == (slot > 0 and 0 <= step.accepts[row] <= step.draft_tokens)
            case _:
                assert writes == (slot > 0 and step.lengths[row] > 0)


@pytest.mark.parametrize("mode", ForwardMode)
@given(data=st.data())
def test_every_field_is_the_oracles(mode: ForwardMode, data: st.DataObject) -> None:
    """Eager, and in static buffers that the steps before have filled."""
    spec = data.draw(specs(draft=True))
    live = data.draw(live_slots())
    backend = backend_of(spec)
    names = [row % spec.max_requests for row in range(NUM_SLOTS)]
    backend.init_graph_state(9, 81)
    for _ in range(2):
        step = data.draw(steps(spec, live, mode))
        batch = step.batch(names[: step.rows]) if step.by_slots else named(backend, step)
        backend.init_forward_metadata(batch)
        assert backend.forward_metadata is not None
        assert_fields(backend.forward_metadata, step, spec)
        backend.init_forward_metadata_out_graph(batch, False)
        backend.init_forward_metadata_in_graph(batch)
        assert backend.forward_metadata.padded
        assert_fields(backend.forward_metadata, step, spec)


def named(backend: TorchBackend, step: Step) -> ForwardBatch:
    """The step by request rows, of which one more row per entry is given its slot."""
    table = backend.pool.req_to_slot
    table.fill_(-1)
    table[0] = 0
    rows = [0 if slot == 0 else step.rows - row for row, slot in enumerate(step.slots)]
    for row, slot in zip(rows, step.slots, strict=True):
        if slot > 0:
            table[row] = slot
    return step.batch(rows)


def small_spec(**changes: Any) -> StateSpec:
    options: dict[str, Any] = {
        "num_layers": 1,
        "streams": [Stream("a", 2)],
        "kernel_size": 4,
        "num_slots": 8,
        "max_requests": 6,
    }
    return StateSpec(**{**options, **changes})


def test_the_literal_fields_of_a_ragged_step() -> None:
    backend = backend_of(small_spec())
    batch = ForwardBatch.extend(
        None,
        torch.tensor([2, 0, 3, 1]),
        torch.tensor([0, 5, 7, 2]),
        slots=torch.tensor([6, 2, 4, -1]),
        num_tokens=8,
        mamba_track_indices=torch.tensor([1, 3, 5, 7]),
        mamba_track_seqlens=torch.tensor([2, 5, 8, 3]),
    )
    backend.init_forward_metadata(batch)
    meta = backend.conv_state_metadata(0, batch)
    assert meta.cache_indices.tolist() == [6, 2, 4, -1]
    assert meta.safe_idx.tolist() == [6, 2, 4, 0]
    assert meta.query_start_loc.tolist() == meta.cu.tolist() == [0, 2, 2, 5, 6]
    assert meta.has_initial_state.tolist() == [False, True, True, True]
    assert meta.cache_mask.flatten().tolist() == [False, True, True, False]
    assert meta.si.tolist() == [0, 0, 2, 2, 2, 3, 3, 3]
    assert meta.track_cache_indices.tolist() == [1, -1, 5, -1]
    assert meta.track_conv_indices.tolist() == [[-1, 0, 1], [0, 0, 0], [-2, -1, 2], [0, 0, 0]]
    assert meta.writes.tolist() == [True, False, True, False]


def test_a_step_is_one_object_for_every_layer() -> None:
    backend = backend_of(small_spec(num_layers=3))
    batch = ForwardBatch.decode(slots=torch.tensor([5, 2]))
    backend.init_forward_metadata(batch)
    first = backend.conv_state_metadata(0, batch)
    assert all(backend.conv_state_metadata(layer, batch) is first for layer in range(3))
    assert first.tree_taps is None
    assert first.num_accept_tokens is None
    with pytest.raises(AttributeError):
        first.padded = True  # type: ignore[misc]


def test_a_tree_step_has_its_taps_and_a_draft_step_its_counts() -> None:
    backend = backend_of(small_spec(max_draft_tokens=3, draft_topk=2))
    rows = torch.tensor([5])
    batch = ForwardBatch.target_verify(
        None, rows, 3, slots=rows, parents=torch.tensor([[-1, 0, 0]])
    )
    backend.init_forward_metadata(batch)
    taps = backend.conv_state_metadata(0, batch).tree_taps
    assert taps is not None
    assert taps.tolist() == [[[0, 1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 5]]]
    batch = ForwardBatch.draft_extend(None, rows, 3, torch.tensor([2]), slots=rows)
    backend.init_forward_metadata(batch)
    counts = backend.conv_state_metadata(0, batch).num_accept_tokens
    assert counts is not None
    assert (counts.tolist(), counts.dtype) == ([2], torch.int32)


@pytest.mark.parametrize("function", [False, True])
def test_virtual_slots_are_physical_in_the_metadata(function: bool) -> None:
    spec = small_spec()
    table = torch.tensor([0, 7, -1, 5, 2])
    pool = ConvStatePool.adopt(
        spec,
        torch.zeros(1, 9, 3, 2, dtype=spec.dtype),
        null_slots=(0,),
        virtual_to_physical=(lambda known: table[known]) if function else table,
    )
    backend = backend_of(spec, pool)
    pool.req_to_slot[1:] = torch.tensor([4, 0, 1, 3, -1, -1])
    for batch in (
        ForwardBatch.decode(
            torch.tensor([1, 2, 3, 5]), mamba_track_indices=torch.tensor([3, 3, 0, 3])
        ),
        ForwardBatch.decode(
            slots=torch.tensor([4, 0, 1, -1]), mamba_track_indices=torch.tensor([3, 3, 0, 3])
        ),
    ):
        backend.init_forward_metadata(batch)
        meta = backend.conv_state_metadata(0, batch)
        assert meta.cache_indices.tolist() == [2, -1, 7, -1]
        assert meta.track_cache_indices.tolist() == [5, -1, -1, -1]


def test_a_step_is_the_same_whatever_ran_before_it() -> None:
    """What an eager step takes over from the one before follows from their shape alone."""
    spec = small_spec(max_draft_tokens=3, draft_topk=2)
    slots, others = torch.tensor([5, 2, -1]), torch.tensor([3, 0, 7])
    counts, before = torch.tensor([1, 2, 0]), torch.tensor([0, 3, 1])
    tree = torch.tensor([[-1, 0, 0]]).expand(3, 3)
    kinds = [
        lambda rows: ForwardBatch.decode(slots=rows),
        lambda rows: ForwardBatch.decode(slots=rows, mamba_track_indices=rows.flip(0)),
        lambda rows: ForwardBatch.decode(slots=rows[:2]),
        lambda rows: ForwardBatch.target_verify(slots=rows, draft_token_num=2),
        lambda rows: ForwardBatch.target_verify(slots=rows, draft_token_num=3),
        lambda rows: ForwardBatch.target_verify(slots=rows, draft_token_num=3, parents=tree),
        lambda rows: ForwardBatch.draft_extend(None, before, 3, counts, slots=rows),
        lambda rows: ForwardBatch.extend(None, counts, before, slots=rows),
        lambda rows: ForwardBatch.idle(3),
    ]
    backend = backend_of(spec)
    kept = []
    for first in kinds:
        for second in kinds:
            for make, rows in ((first, slots), (second, others), (second, slots)):
                batch = make(rows)
                backend.init_forward_metadata(batch)
                fresh = backend_of(spec, backend.pool)
                fresh.init_forward_metadata(batch)
                assert backend.forward_metadata is not None
                kept.append(
                    (tensors_of(backend.forward_metadata), tensors_of(fresh.forward_metadata))
                )
    # Compared at the end: no step has written what an earlier one holds.
    for mine, expected in kept:
        assert mine.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(mine[name], value), name


def test_snapshots_are_no_part_of_a_shape() -> None:
    backend = backend_of(small_spec())
    plain = ForwardBatch.decode(slots=torch.tensor([5, 2]))
    tracking = ForwardBatch.decode(
        slots=torch.tensor([5, 2]), mamba_track_indices=torch.tensor([1, -1])
    )
    for batch, alike in ((plain, True), (tracking, False)):
        backend.init_forward_metadata(batch)
        assert backend.forward_metadata is not None
        assert backend.forward_metadata.has_shape_of(plain) is alike
        assert not backend.forward_metadata.has_shape_of(tracking)


def tensors_of(meta: ShortConvMetadata | None) -> dict[str, torch.Tensor]:
    values = {field.name: getattr(meta, field.name) for field in fields(ShortConvMetadata)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def test_nothing_outlives_the_mode_that_it_was_traced_in() -> None:
    device = torch.device("meta")
    spec = small_spec()
    backend = TorchBackend(spec=spec, device=device, pool=ConvStatePool(spec, device))
    batch = ForwardBatch.decode(slots=torch.empty(2, dtype=torch.int64, device=device))
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), nullcontext()):
        with mode:
            backend.init_forward_metadata(batch)
            meta = backend.forward_metadata
            assert meta is not None
            assert isinstance(meta.cu, FakeTensor) is isinstance(mode, FakeTensorMode)
