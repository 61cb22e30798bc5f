"""Only listed operators, no wait for the device, and the state written where it lies."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sconv
from sconv import ForwardBatch, ForwardMode, StateSpec, Stream
from sconv.testing.harness import Harness
from sconv.testing.steps import Step
from sconv.testing.strategies import Adopted, adopted_pools, dtypes, live_slots, specs, steps
from sconv_ascend.operators import OPERATORS, OUT_OF_GRAPH
from sconv_contract import simulated_npu
from sconv_contract.simulated_npu import HostSync, UnlistedOperator
from sconv_contract.simulated_npu.table import table

LISTED = OPERATORS | OUT_OF_GRAPH
LIVE = [9, 2, 7, 4]
ROWS = 6
#: Two padded rows on the dummy slot and one without any: none of them may write what shows.
SLOTS = (9, 0, 2, -1, 0, 7)
#: A snapshot in the dummy slot means nothing, and several may be due there.
TARGETS = (1, 0, 3, -1, 0, 0)


def spec_of(axis: str, layout: str) -> StateSpec:
    return StateSpec(
        num_layers=2,
        streams=[Stream("k", 5), Stream("v", 64)],
        kernel_size=4,
        num_slots=10,
        max_requests=ROWS,
        window_axis=axis,  # type: ignore[arg-type]
        max_draft_tokens=3,
        draft_topk=1 if layout == "dedup" else 2,
        track_interval=4,
        chunk_size=2,
        window_layout=layout,  # type: ignore[arg-type]
    )


def step_of(mode: ForwardMode, *, tree: bool) -> Step:
    before = (3, 0, 0, 2, 5, 7)
    common = {"slots": SLOTS, "before": before, "by_slots": False}
    match mode:
        case ForwardMode.DECODE:
            return Step(mode, lengths=(1,) * ROWS, track_slots=TARGETS, **common)
        case ForwardMode.EXTEND | ForwardMode.MIXED:
            lengths = (2, 1, 5, 0, 3, 4)
            ends = (4, 1, 3, -1, 6, 8)
            return Step(mode, lengths=lengths, track_slots=TARGETS, track_lengths=ends, **common)
        case ForwardMode.DRAFT_EXTEND:
            accepts = (3, 1, 0, -1, 2, 2)
            return Step(
                mode,
                lengths=(3,) * ROWS,
                draft_tokens=3,
                accepts=accepts,
                track_slots=TARGETS,
                **common,
            )
        case ForwardMode.IDLE:
            return Step(mode, (-1,) * ROWS, (0,) * ROWS, before)
        case _:
            rng = random.Random(0)
            parents = tuple((-1, 0, rng.randrange(2)) for _ in SLOTS) if tree else None
            return Step(
                mode, lengths=(3,) * ROWS, draft_tokens=3, parents=parents, links=tree, **common
            )


@pytest.mark.parametrize("layout", ["dense", "inputs", "dedup"])
@pytest.mark.parametrize("axis", ["time", "channel"])
@pytest.mark.parametrize("mode", list(ForwardMode))
def test_the_recordable_part_uses_listed_operators_alone(
    mode: ForwardMode, axis: str, layout: str
) -> None:
    backend = sconv.load_backend("ascend", spec=spec_of(axis, layout))
    assert backend.device == torch.device("npu:0")
    backend.init_graph_state(ROWS, 18)
    harness = Harness(
        backend, seed=1, live=LIVE, x_dtype=torch.bfloat16, activation="silu", strided=True
    )
    step = step_of(mode, tree=layout != "dedup")
    inputs, before = harness.inputs(step.num_tokens), harness.state()
    batch = harness.batch(step)
    kept = torch.tensor([1, -1, 2, 0, 0, 1], device=backend.device)
    targets = torch.tensor(TARGETS, device=backend.device)
    with simulated_npu.region(in_graph=False, allow=LISTED):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
    with simulated_npu.region(in_graph=True, allow=OPERATORS) as counters:
        backend.init_forward_metadata_in_graph(batch)
        outputs = harness.convolve(batch, inputs)
        if mode is ForwardMode.TARGET_VERIFY:
            rows = batch.req_pool_indices
            backend.update_mamba_state_after_mtp_verify(kept, targets, kept, rows)
    for event in counters:
        assert event.startswith(("op.", "alloc")), event
    if mode is not ForwardMode.TARGET_VERIFY:
        harness.check(step, inputs, before, outputs)


@settings(max_examples=60)
@given(data=st.data())
def test_memory_that_an_engine_owns_needs_no_other_operators(data: st.DataObject) -> None:
    """Any widths, strides, dtypes, steps and translations of slot ids; a commit with snapshots."""
    spec = data.draw(specs(draft=True))
    engine = data.draw(adopted_pools(spec, "npu:0"))
    backend = sconv.load_backend("ascend", spec=spec, pool=engine.pool)
    live = data.draw(live_slots())
    harness = Harness(
        backend,
        seed=data.draw(st.integers(0, 2**16)),
        live=live,
        x_dtype=data.draw(dtypes),
        activation=data.draw(st.sampled_from((None, "silu"))),
        strided=data.draw(st.booleans()),
        slot_ids=engine.slot_ids,
        null_id=engine.null_id,
    )
    step = data.draw(steps(spec, live, data.draw(st.sampled_from(list(ForwardMode)))))
    inputs, before = harness.inputs(step.num_tokens), harness.state()
    rows = harness.request_rows(step)
    batch = step.batch(rows, harness.slot_id, backend.device)
    with simulated_npu.region(in_graph=False, allow=None if ids_by_function(engine) else LISTED):
        backend.init_forward_metadata(batch)
    with simulated_npu.region(in_graph=True, allow=OPERATORS):
        outputs = harness.convolve(batch, inputs)
    harness.check(step, inputs, before, outputs)
    if step.mode is not ForwardMode.TARGET_VERIFY:
        return
    names = [harness.slot_id(slot) for slot in step.slots] if step.by_slots else rows
    slots = torch.tensor(names, dtype=torch.int64, device=backend.device)
    none = torch.full_like(slots, -1)
    with simulated_npu.region(in_graph=True, allow=None if ids_by_function(engine) else OPERATORS):
        backend.update_mamba_state_after_mtp_verify(none, none, none, slots)


def ids_by_function(engine: Adopted) -> bool:
    """Whether the engine translates slot ids by a function, whose operators are its own."""
    return engine.pool.translates_on_host


def test_a_request_lives_on_listed_operators() -> None:
    """What a pool does for a request is outside of graphs, and on the device all the same."""
    backend = sconv.load_backend("ascend", spec=spec_of("time", "dense"))
    pool = backend.pool
    with simulated_npu.region(in_graph=False, cpu="count", allow=LISTED) as seen:
        slots = pool.alloc(3)
        pool.assign([1, 2, 3], slots)
        pool.clear(slots)
        copy = pool.fork(slots[:1])
        pool.restore(copy, pool.export(slots[1:2]))
        pool.free(slots)
    assert "op.aten::index_copy_" in seen
    assert pool.req_to_slot.tolist()[1:4] == [-1, -1, -1]


def test_the_state_is_written_on_the_device() -> None:
    """Not by a copy from the host, which is what a shadow of the state would come back with."""
    backend = sconv.load_backend("ascend", spec=spec_of("time", "dense"))
    before = simulated_npu.ledger(backend.pool.layers[0])
    batch = ForwardBatch.decode(slots=torch.tensor([4, 2], device=backend.device))
    x = torch.randn(2, 64).to(torch.bfloat16).to(backend.device)
    weight = torch.randn(64, 4).to(backend.device)
    backend.init_forward_metadata(batch)
    backend.short_conv(x, weight, layer_id=0, stream="v", forward_batch=batch)
    after = simulated_npu.ledger(backend.pool.layers[0])
    wrote = {name: count - before.get(name, 0) for name, count in after.items()}
    assert {name for name, count in wrote.items() if count} == {"aten::index_copy_"}


def test_every_listed_operator_has_a_kernel_in_torch_npu() -> None:
    direct = {name.partition(".")[0] for name in table().direct}
    for name in OPERATORS | OUT_OF_GRAPH:
        assert name.removeprefix("aten::") in direct, name


def test_what_is_not_listed_is_refused() -> None:
    """The list is asked for: without one of its operators the first test above fails."""
    backend = sconv.load_backend("ascend", spec=spec_of("time", "dense"))
    backend.init_graph_state(ROWS, 18)
    batch = ForwardBatch.decode(slots=torch.tensor([4, 2], device=backend.device))
    less = OPERATORS - {"aten::clamp_"}
    with (
        simulated_npu.region(in_graph=True, allow=less),
        pytest.raises(UnlistedOperator, match="clamp_"),
    ):
        backend.init_forward_metadata_in_graph(batch)


def test_reading_lengths_is_left_to_the_host_part() -> None:
    """An engine that does not count its tokens waits for them once per step, outside of a graph."""
    backend = sconv.load_backend("ascend", spec=spec_of("time", "dense"))
    backend.init_graph_state(ROWS, 18)
    device = backend.device
    lengths = torch.tensor([2, 3], device=device)
    slots = torch.tensor([4, 2], device=device)
    batch = ForwardBatch.extend(None, lengths, torch.zeros_like(lengths), slots=slots)
    with simulated_npu.region(in_graph=True), pytest.raises(HostSync):
        backend.init_forward_metadata_out_graph(batch, in_capture=False)
    backend.init_forward_metadata_out_graph(batch, in_capture=False)
    with simulated_npu.region(in_graph=True):
        backend.init_forward_metadata_in_graph(batch)
