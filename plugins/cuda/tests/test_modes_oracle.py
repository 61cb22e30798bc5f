"""Every mode against the float64 oracle, on random specs, slot maps and batches.

State is compared bit for bit, the slots that no row names included; outputs may differ by a
rounding.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sconv
from sconv import ForwardMode
from sconv.testing.harness import Harness, assert_same_bits
from sconv.testing.strategies import (
    SENTINEL,
    adopted_pools,
    dtypes,
    live_slots,
    specs,
    steps,
)

Load = Callable[..., sconv.Backend]

#: The interpreter takes a program at a time; ``SCONV_CUDA_EXAMPLES=1000`` looks further.
few = settings(
    derandomize="SCONV_CUDA_EXAMPLES" not in os.environ,
    deadline=None,
    max_examples=int(os.environ.get("SCONV_CUDA_EXAMPLES", "12")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

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
def harnesses(draw: st.DrawFn, load: Load, device: torch.device, **options: Any) -> Harness:
    return _harness(draw, load(draw(specs(**options))))


@pytest.mark.parametrize("mode", [*WRITING, ForwardMode.IDLE])
@few
@given(data=st.data())
def test_a_step_equals_the_oracle(
    mode: ForwardMode, load: Load, device: torch.device, data: st.DataObject
) -> None:
    harness = data.draw(harnesses(load, device))
    harness.run(data.draw(steps(harness.backend.spec, harness.live, mode)))


@pytest.mark.slow
@few
@given(data=st.data())
def test_a_schedule_of_steps_equals_the_oracle(
    load: Load, device: torch.device, data: st.DataObject
) -> None:
    harness = data.draw(harnesses(load, device))
    for mode in data.draw(st.lists(st.sampled_from(WRITING), min_size=2, max_size=4)):
        harness.run(data.draw(steps(harness.backend.spec, harness.live, mode)))


@pytest.mark.slow
@few
@given(data=st.data())
def test_verify_and_commit_equal_the_oracle(
    load: Load, device: torch.device, data: st.DataObject
) -> None:
    """A request may leave, and another batch be prepared, in between: slots are looked up late."""
    harness = data.draw(harnesses(load, device, draft=True))
    spec, pool = harness.backend.spec, harness.backend.pool
    verify = data.draw(steps(spec, harness.live, ForwardMode.TARGET_VERIFY))
    inputs, at_verify = harness.inputs(verify.num_tokens), harness.state()
    rows = harness.request_rows(verify)
    batch = verify.batch(rows, harness.slot_id, device)
    harness.backend.init_forward_metadata(batch)
    harness.check(verify, inputs, at_verify, harness.convolve(batch, inputs))

    # Where the inputs alone are kept, nothing may move a slot on before its commit.
    others = [slot for slot in harness.live if slot not in verify.slots]
    others = others if pool.window_layout == "inputs" else harness.live
    if data.draw(st.booleans()):
        between = data.draw(st.sampled_from([*WRITING, ForwardMode.IDLE]))
        harness.run(data.draw(steps(spec, others, between)))
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


@pytest.mark.slow
@few
@given(data=st.data())
def test_adopted_memory_equals_the_oracle(
    load: Load, device: torch.device, data: st.DataObject
) -> None:
    spec = data.draw(specs(draft=True))
    engine = data.draw(adopted_pools(spec, device))
    backend = load(spec, engine.pool)
    harness = data.draw(
        st.composite(_harness)(backend, slot_ids=engine.slot_ids, null_id=engine.null_id)
    )
    outside = [_outside(buffer, engine.pool) for buffer in engine.buffers]
    mode = data.draw(st.sampled_from([*WRITING, ForwardMode.TARGET_VERIFY]))
    step = data.draw(steps(spec, harness.live, mode))
    inputs, at_verify = harness.inputs(step.num_tokens), harness.state()
    rows = harness.request_rows(step)
    batch = step.batch(rows, harness.slot_id, device)
    backend.init_forward_metadata(batch)
    harness.check(step, inputs, at_verify, harness.convolve(batch, inputs))
    if mode is ForwardMode.TARGET_VERIFY:
        kept = [data.draw(st.integers(-1, step.draft_tokens)) for _ in step.slots]
        harness.commit(step, inputs, at_verify, kept, request_rows=rows)
    for buffer, place in zip(engine.buffers, outside, strict=True):
        assert place.any() or buffer.numel() == place.numel()
        values = buffer[place]
        assert_same_bits(values, torch.full_like(values, SENTINEL), "memory beside the windows")


def _outside(buffer: torch.Tensor, pool: sconv.ConvStatePool) -> torch.Tensor:
    """Return where an engine's buffer holds no window."""
    saved = buffer.clone()
    buffer.fill_(0)
    for layer in pool.layers:
        layer.fill_(1)
    place = buffer == 0
    buffer.copy_(saved)
    return place
