"""In float32 the backend gives the bits of the CPU backend: outputs, state, commits, snapshots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sconv
from sconv import ForwardMode
from sconv.testing.harness import Harness, assert_same_bits
from sconv.testing.steps import Step
from sconv.testing.strategies import live_slots, specs, steps


class Pair:
    """The same model, pool and values on both."""

    def __init__(self, spec: sconv.StateSpec, **options: Any) -> None:
        self.both = [
            Harness(sconv.load_backend(name, spec=spec), **options) for name in ("cpu", "ascend")
        ]

    def compare_state(self, what: str) -> None:
        cpu, npu = (harness.state() for harness in self.both)
        for key, expected in cpu.items():
            # Row 0 is the dummy: what it holds means nothing.
            assert_same_bits(npu[key][1:], expected[1:], f"state of {key} after {what}")

    def run(self, step: Step) -> list[list[int]]:
        """Run a step on both; return the request rows that each named."""
        results, named = [], []
        for harness in self.both:
            inputs, rows = harness.inputs(step.num_tokens), harness.request_rows(step)
            batch = step.batch(rows, harness.slot_id, harness.backend.device)
            harness.backend.init_forward_metadata(batch)
            results.append(harness.convolve(batch, inputs))
            named.append(rows)
        cpu, npu = results
        means = [
            slot != 0
            for slot, count in zip(step.slots, step.lengths, strict=True)
            for _ in range(count)
        ] + [True] * step.tail
        for key, expected in cpu.items():
            found = npu[key].cpu()
            assert_same_bits(found[means], expected[means], f"output of {key} of {step}")
        self.compare_state(str(step))
        return named

    def commit(self, names: list[list[int]], last: list[int], targets: list[int] | None) -> None:
        for harness, rows in zip(self.both, names, strict=True):
            device = harness.backend.device
            kept = torch.tensor(last, dtype=torch.int64, device=device)
            where = None if targets is None else torch.tensor(targets, device=device)
            harness.backend.update_mamba_state_after_mtp_verify(
                kept,
                where,
                None if targets is None else kept,
                torch.tensor(rows, dtype=torch.int64, device=device),
            )
        self.compare_state("the commit")


@settings(max_examples=500)
@given(data=st.data())
def test_float32_is_the_cpu_backend_bit_for_bit(data: st.DataObject) -> None:
    spec = replace(data.draw(specs(draft=True)), dtype=torch.float32)
    live = data.draw(live_slots())
    pair = Pair(
        spec,
        seed=data.draw(st.integers(0, 2**16)),
        live=live,
        bias=data.draw(st.booleans()),
        activation=data.draw(st.sampled_from((None, "silu"))),
        residual=data.draw(st.booleans()),
        strided=data.draw(st.booleans()),
        group=data.draw(st.booleans()),
    )
    step = data.draw(steps(spec, live, data.draw(st.sampled_from(list(ForwardMode)))))
    names = pair.run(step)
    if step.mode is not ForwardMode.TARGET_VERIFY:
        return
    last = [data.draw(st.integers(-1, step.draft_tokens)) for _ in step.slots]
    targets = None
    if data.draw(st.booleans()):
        free = sorted(set(range(1, spec.num_slots + 1)) - set(live))
        targets = (free + [-1] * step.rows)[: step.rows]
    if step.by_slots:
        names = [list(step.slots)] * 2
    pair.commit(names, last, targets)
