"""Every mode against the float64 oracle, on random specs, slot maps and batches.

State is compared bit for bit, slots that no row names included; outputs may differ by a rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sconv
import sconv.torch_backend.convolution
import sconv.torch_backend.state_rows
import sconv_cpu.backend
from sconv import ForwardMode
from sconv.testing.harness import Harness
from sconv.testing.strategies import adopted_pools, dtypes, live_slots, specs, steps

WRITING = [ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DRAFT_EXTEND]


def _harness(draw: st.DrawFn, backend: sconv.Backend, **options: Any) -> Harness:
    return Harness(
        backend,
        seed=draw(st.integers(0, 2**16)),
        live=draw(live_slots()),
        x_dtype=draw(dtypes),
        weight_dtype=draw(dtypes),
        bias=draw(st.booleans()),
        activation=draw(st.sampled_from((None, "silu", "swish"))),
        residual=draw(st.booleans()),
        strided=draw(st.booleans()),
        group=draw(st.booleans()),
        **options,
    )


@st.composite
def harnesses(draw: st.DrawFn, **options: Any) -> Harness:
    spec = draw(specs(**options))
    return _harness(draw, sconv.load_backend("cpu", spec=spec))


@pytest.mark.parametrize("mode", [*WRITING, ForwardMode.IDLE])
@given(data=st.data())
def test_a_step_equals_the_oracle(mode: ForwardMode, data: st.DataObject) -> None:
    harness = data.draw(harnesses())
    harness.run(data.draw(steps(harness.backend.spec, harness.live, mode)))


@given(data=st.data())
def test_a_schedule_of_steps_equals_the_oracle(data: st.DataObject) -> None:
    harness = data.draw(harnesses())
    for mode in data.draw(st.lists(st.sampled_from(WRITING), min_size=2, max_size=4)):
        harness.run(data.draw(steps(harness.backend.spec, harness.live, mode)))


@pytest.mark.parametrize("mode", WRITING)
@given(data=st.data())
def test_the_ways_of_large_shapes_equal_the_oracle(mode: ForwardMode, data: st.DataObject) -> None:
    """Words instead of elements, blocks of a few rows, oneDNN: as if every shape were large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sconv.torch_backend.state_rows, "_FEW", 0)
        patch.setattr(sconv.torch_backend.convolution, "_BLOCK", 500)
        patch.setattr(sconv_cpu.backend, "_MIN_ELEMENTS", 0)
        harness = data.draw(harnesses())
        harness.run(data.draw(steps(harness.backend.spec, harness.live, mode)))


@given(data=st.data())
def test_verify_and_commit_equal_the_oracle(data: st.DataObject) -> None:
    """Another step may come in between, and a request may leave: slots are looked up now."""
    harness = data.draw(harnesses(draft=True))
    spec, pool = harness.backend.spec, harness.backend.pool
    verify = data.draw(steps(spec, harness.live, ForwardMode.TARGET_VERIFY))
    inputs = harness.inputs(verify.num_tokens)
    at_verify = harness.state()
    rows = harness.request_rows(verify)
    batch = verify.batch(rows, harness.slot_id)
    harness.backend.init_forward_metadata(batch)
    outputs = harness.convolve(batch, inputs)
    harness.check(verify, inputs, at_verify, outputs)

    # These windows are made from the row's own, which must not have moved on.
    if pool.window_layout != "inputs" and data.draw(st.booleans()):
        between = data.draw(st.sampled_from([*WRITING, ForwardMode.IDLE]))
        harness.run(data.draw(steps(spec, harness.live, between)))
    slots = list(verify.slots)
    if not verify.by_slots:
        for row, slot in enumerate(slots):
            if slot > 0 and data.draw(st.integers(0, 3)) == 0:
                pool.req_to_slot[rows[row]] = -1
                slots[row] = -1
    free = [slot for slot in range(1, spec.num_slots + 1) if slot not in harness.live]
    track_slots = track_steps = None
    if data.draw(st.booleans()):
        targets = data.draw(st.permutations(free))
        track_slots = [slot if data.draw(st.booleans()) else -1 for slot in targets]
        track_slots = (track_slots + [-1] * verify.rows)[: verify.rows]
        track_steps = [data.draw(st.integers(-1, verify.draft_tokens)) for _ in slots]
    harness.commit(
        verify,
        inputs,
        at_verify,
        [data.draw(st.integers(-1, verify.draft_tokens)) for _ in slots],
        slots=slots,
        track_slots=track_slots,
        track_steps=track_steps,
        request_rows=rows,
    )


@given(data=st.data())
def test_adopted_memory_equals_the_oracle(data: st.DataObject) -> None:
    spec = data.draw(specs(draft=True))
    engine = data.draw(adopted_pools(spec))
    backend = sconv.load_backend("cpu", spec=spec, pool=engine.pool)
    harness = data.draw(
        st.composite(_harness)(backend, slot_ids=engine.slot_ids, null_id=engine.null_id)
    )
    outside = engine.outside()
    mode = data.draw(st.sampled_from([*WRITING, ForwardMode.TARGET_VERIFY]))
    step = data.draw(steps(spec, harness.live, mode))
    inputs, at_verify, rows = harness.inputs(step.num_tokens), harness.state(), None
    rows = harness.request_rows(step)
    batch = step.batch(rows, harness.slot_id)
    backend.init_forward_metadata(batch)
    harness.check(step, inputs, at_verify, harness.convolve(batch, inputs))
    if mode is ForwardMode.TARGET_VERIFY:
        kept = [data.draw(st.integers(-1, step.draft_tokens)) for _ in step.slots]
        harness.commit(step, inputs, at_verify, kept, request_rows=rows)
    engine.assert_untouched(outside)
