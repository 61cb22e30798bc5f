"""Every mode against the float64 oracle, on random specs, slots, batches and memory."""

# The names of the tests say what they ask.
# ruff: noqa: D102

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sconv import ForwardMode
from sconv.testing.harness import Harness
from sconv.testing.steps import Step
from sconv.testing.strategies import adopted_pools

from .rule_marks import keeps
from .sizes import Sizes
from .subject import Subject

__all__ = ["Modes", "examples"]

WRITING = (ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DRAFT_EXTEND)

#: The same examples everywhere, so that a vendor's CI is repeatable. A failure names its step, and
#: is not made smaller first: on a backend that fails everywhere that takes minutes per rule.
examples = settings(
    phases=(Phase.explicit, Phase.generate),
    report_multiple_bugs=False,
    max_examples=30,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


class Modes(Sizes):
    """Tests of :class:`sconv_contract.BackendContract`."""

    def _step(self, subject: Subject, data: st.DataObject, mode: ForwardMode) -> None:
        harness = subject.harness(data, data.draw(subject.specs()))
        harness.run(data.draw(subject.steps(harness.backend.spec, harness.live, mode)))

    @keeps("SCV402")
    @examples
    @given(data=st.data())
    def test_a_decode_equals_the_oracle(self, subject: Subject, data: st.DataObject) -> None:
        self._step(subject, data, ForwardMode.DECODE)

    @keeps("SCV403")
    @examples
    @given(data=st.data())
    def test_an_extend_equals_the_oracle(self, subject: Subject, data: st.DataObject) -> None:
        self._step(subject, data, ForwardMode.EXTEND)

    @keeps("SCV404")
    @examples
    @given(data=st.data())
    def test_a_mixed_step_equals_the_oracle(self, subject: Subject, data: st.DataObject) -> None:
        self._step(subject, data, ForwardMode.MIXED)

    @keeps("SCV407")
    @examples
    @given(data=st.data())
    def test_a_draft_extend_equals_the_oracle(self, subject: Subject, data: st.DataObject) -> None:
        self._step(subject, data, ForwardMode.DRAFT_EXTEND)

    @keeps("SCV408")
    @examples
    @given(data=st.data())
    def test_an_idle_step_changes_nothing(self, subject: Subject, data: st.DataObject) -> None:
        self._step(subject, data, ForwardMode.IDLE)

    @keeps("SCV409")
    @examples
    @given(data=st.data())
    def test_a_schedule_equals_the_oracle(self, subject: Subject, data: st.DataObject) -> None:
        harness = subject.harness(data, data.draw(subject.specs()))
        for mode in data.draw(st.lists(st.sampled_from(WRITING), min_size=2, max_size=4)):
            harness.run(data.draw(subject.steps(harness.backend.spec, harness.live, mode)))

    @keeps("SCV405")
    @examples
    @given(data=st.data())
    def test_a_verify_equals_the_oracle_and_writes_nothing(
        self, subject: Subject, data: st.DataObject
    ) -> None:
        subject.needs("rollback")
        harness = subject.harness(data, data.draw(subject.specs(draft=True)))
        mode = ForwardMode.TARGET_VERIFY
        harness.run(data.draw(subject.steps(harness.backend.spec, harness.live, mode)))

    @keeps("SCV406")
    @examples
    @given(data=st.data())
    def test_a_commit_equals_the_oracle(self, subject: Subject, data: st.DataObject) -> None:
        """A step of other requests may come in between, and a request may leave."""
        subject.needs("rollback")
        harness = subject.harness(data, data.draw(subject.specs(draft=True)))
        spec, pool = harness.backend.spec, harness.backend.pool
        step = data.draw(subject.steps(spec, harness.live, ForwardMode.TARGET_VERIFY))
        inputs, at_verify, rows = _verify(harness, step)
        if data.draw(st.booleans()):
            # The layout "inputs" makes windows from the row's own, which must not have moved on.
            others = [slot for slot in harness.live if slot not in step.slots]
            between = data.draw(st.sampled_from([*WRITING, ForwardMode.IDLE]))
            harness.run(data.draw(subject.steps(spec, others, between)))
        slots = list(step.slots)
        if not step.by_slots:
            for row, slot in enumerate(slots):
                if slot > 0 and data.draw(st.integers(0, 3)) == 0:
                    pool.req_to_slot[rows[row]] = -1
                    slots[row] = -1
        snapshots: dict[str, Any] = {}
        if data.draw(st.booleans()):
            free = [slot for slot in range(1, spec.num_slots + 1) if slot not in harness.live]
            targets = [
                slot if data.draw(st.booleans()) else -1
                for slot in data.draw(st.permutations(free))
            ]
            snapshots = {
                "track_slots": (targets + [-1] * step.rows)[: step.rows],
                "track_steps": [data.draw(st.integers(-1, step.draft_tokens)) for _ in slots],
            }
        last = [data.draw(st.integers(-1, step.draft_tokens)) for _ in slots]
        harness.commit(step, inputs, at_verify, last, slots=slots, request_rows=rows, **snapshots)

    @keeps("SCV412")
    @examples
    @given(data=st.data())
    def test_every_layout_restores_the_same_windows(
        self, subject: Subject, data: st.DataObject
    ) -> None:
        subject.needs("rollback")
        layout = data.draw(st.sampled_from(subject.can.window_layouts))
        drawn = data.draw(subject.specs(draft=True))
        topk = 1 if layout == "dedup" else drawn.draft_topk
        spec = subject.fit(drawn, window_layout=layout, draft_topk=topk)
        harness = subject.harness(data, spec)
        assert harness.backend.pool.window_layout == layout
        step = data.draw(subject.steps(spec, harness.live, ForwardMode.TARGET_VERIFY))
        if topk == 1:
            step = _chain(step)
        inputs, at_verify, rows = _verify(harness, step)
        last = [data.draw(st.integers(-1, step.draft_tokens - 1)) for _ in step.slots]
        harness.commit(step, inputs, at_verify, last, request_rows=rows)

    @keeps("SCV410")
    @examples
    @given(data=st.data())
    def test_a_group_equals_the_oracle(self, subject: Subject, data: st.DataObject) -> None:
        harness = subject.harness(data, data.draw(subject.specs()), group=True)
        mode = data.draw(st.sampled_from(WRITING))
        harness.run(data.draw(subject.steps(harness.backend.spec, harness.live, mode)))

    @keeps("SCV411")
    @examples
    @given(data=st.data())
    def test_engine_memory_equals_the_oracle(self, subject: Subject, data: st.DataObject) -> None:
        spec = data.draw(subject.specs(draft=True))
        device = subject.build(spec).device
        engine = data.draw(adopted_pools(spec, device))
        harness = subject.harness(
            data, spec, pool=engine.pool, slot_ids=engine.slot_ids, null_id=engine.null_id
        )
        outside = engine.outside()
        modes = [*WRITING, *([ForwardMode.TARGET_VERIFY] if subject.can.rollback else [])]
        mode = data.draw(st.sampled_from(modes))
        step = data.draw(subject.steps(spec, harness.live, mode))
        inputs, before, rows = _verify(harness, step)
        if mode is ForwardMode.TARGET_VERIFY:
            kept = [data.draw(st.integers(-1, step.draft_tokens)) for _ in step.slots]
            harness.commit(step, inputs, before, kept, request_rows=rows)
        engine.assert_untouched(outside)


def _verify(
    harness: Harness, step: Step
) -> tuple[dict[tuple[int, str], torch.Tensor], dict[tuple[int, str], torch.Tensor], list[int]]:
    """Run a step and compare it; return its inputs, the state before it, and its request rows."""
    inputs, before = harness.inputs(step.num_tokens), harness.state()
    rows = harness.request_rows(step)
    batch = step.batch(rows, harness.slot_id, harness.backend.device)
    harness.backend.init_forward_metadata(batch)
    harness.check(step, inputs, before, harness.convolve(batch, inputs))
    return inputs, before, rows


def _chain(step: Step) -> Step:
    return replace(step, parents=None)
