"""Recordability, without a GPU where it can be had: syncs, addresses, allocations, replays."""

# The names of the tests say what they ask.
# ruff: noqa: D102

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sconv import ForwardBatch, ForwardMode, GraphBufferError
from sconv.testing.captures import (
    KINDS,
    ROWS,
    TOKENS,
    captured_spec,
    captured_step,
    load_into,
    refill,
    sized_harness,
    tensors_of,
)
from sconv.testing.harness import Harness
from sconv.testing.steps import Step, rows_of

from .capturing import capture, has_graphs
from .rule_marks import keeps
from .rulings import ints
from .subject import Subject

__all__ = ["Graphs"]

every_kind = pytest.mark.parametrize("kind", KINDS)


def _harness(subject: Subject, kind: str) -> Harness:
    subject.needs("graph_capture")
    if kind in ("chain", "tree", "links"):
        subject.needs("rollback")
    if kind in ("tree", "links"):
        subject.needs("trees")
    return sized_harness(subject.build(subject.fit(captured_spec())))


class _Births(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the memory that operators return, as long as it lives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.born: list[tuple[str, weakref.ref[Tensor], int]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and _storage(leaf) not in given:
                self.born.append((str(func), weakref.ref(leaf), leaf.nbytes))
        return out

    def alive(self) -> list[str]:
        """Return the operators whose results are still held by somebody."""
        gc.collect()
        return [name for name, reference, size in self.born if reference() is not None and size]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bucket(kind: str, rows: int, seed: int) -> Step:
    """Return a captured step's first rows, with as many packed tokens whatever the seed."""
    step = rows_of(captured_step(kind, seed), range(rows))
    if kind in ("extend", "mixed"):
        step = replace(step, tail=TOKENS - sum(step.lengths))
    return step


def _replay_as(
    harness: Harness,
    step: Step,
    batch: ForwardBatch,
    inputs: dict[tuple[int, str], Tensor],
    replay: Callable[[], None],
    outputs: dict[tuple[int, str], Tensor],
) -> None:
    """Load another step into what a graph was captured with, replay it, and ask the oracle."""
    refill(harness)
    load_into(batch, harness.batch(step))
    for key, value in harness.inputs(step.num_tokens).items():
        inputs[key].copy_(value)
    before = harness.state()
    harness.backend.init_forward_metadata_out_graph(batch)
    replay()
    harness.check(step, inputs, before, outputs)


class Graphs:
    """Tests of :class:`sconv_contract.BackendContract`."""

    @keeps("SCV441")
    @every_kind
    def test_no_mode_needs_a_value_on_the_host(self, subject: Subject, kind: str) -> None:
        harness = _harness(subject, kind)
        backend, step = harness.backend, captured_step(kind, 1)
        batch, inputs = harness.batch(step), harness.inputs(step.num_tokens)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)

        def recorded() -> dict[tuple[int, str], Tensor]:
            backend.init_forward_metadata_in_graph(batch)
            outputs = harness.convolve(batch, inputs)
            if step.mode is ForwardMode.TARGET_VERIFY:
                none = torch.full((ROWS,), -1, dtype=torch.int64, device=backend.device)
                padded = torch.zeros_like(none)
                commit = backend.update_mamba_state_after_mtp_verify
                commit(none, none, none, req_pool_indices=padded)
            return outputs

        if has_graphs(backend.device):
            # A kernel launch has no fake counterpart; the device refuses a sync in a capture.
            _, outputs = capture(backend.device, recorded)
        else:
            with FakeTensorMode(allow_non_fake_inputs=True):
                outputs = recorded()
        for key, y in outputs.items():
            assert (y.shape, y.dtype) == (inputs[key].shape, inputs[key].dtype)

    @keeps("SCV442")
    @every_kind
    def test_metadata_stays_at_its_address(self, subject: Subject, kind: str) -> None:
        """For one batch size, whatever other sizes and modes ran in between."""
        harness = _harness(subject, kind)
        backend, found = harness.backend, []
        others = ["extend", "decode", "draft_extend"] + (["chain"] if subject.can.rollback else [])
        for seed in (0, 1):
            batch = harness.batch(captured_step(kind, seed))
            backend.init_forward_metadata_out_graph(batch)
            backend.init_forward_metadata_in_graph(batch)
            meta = backend.conv_state_metadata(0, batch)
            found.append({name: value.data_ptr() for name, value in tensors_of(meta).items()})
            for other in others:
                between = harness.batch(captured_step(other, 5))
                backend.init_forward_metadata_out_graph(between)
                backend.init_forward_metadata_in_graph(between)
            del meta
            junk = [
                torch.ones(1 << 12, dtype=torch.float32, device=backend.device) for _ in range(50)
            ]
            del junk
        assert found[0] == found[1]
        assert {"cache_indices", "cu", "si", "track_conv_indices"} <= found[0].keys()

    @keeps("SCV443")
    @every_kind
    def test_a_replay_equals_the_oracle(self, subject: Subject, kind: str) -> None:
        """Capture and replay differ in slots, lengths, trees, snapshots and values."""
        harness = _harness(subject, kind)
        backend, first = harness.backend, captured_step(kind, 0)
        batch, inputs = harness.batch(first), harness.inputs(first.num_tokens)

        def step() -> dict[tuple[int, str], Tensor]:
            backend.init_forward_metadata_in_graph(batch)
            return harness.convolve(batch, inputs)

        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        replay, outputs = capture(backend.device, step)
        for seed in (1, 2, 3):
            other = captured_step(kind, seed)
            _replay_as(harness, other, batch, inputs, replay, outputs)

    @keeps("SCV443")
    def test_graphs_of_one_backend_live_side_by_side(self, subject: Subject) -> None:
        """All are captured, extends before decodes, and then all are replayed, in two orders."""
        subject.needs("graph_capture")
        harness = sized_harness(subject.build(subject.fit(captured_spec())))
        backend = harness.backend
        buckets = [("extend", 5), ("extend", 3), ("mixed", 5), ("draft_extend", 4)]
        buckets += [("chain", 5)] if subject.can.rollback else []
        buckets += [("decode", 5), ("decode", 2)]
        graphs = []
        for kind, rows in buckets:
            first = _bucket(kind, rows, 0)
            batch, inputs = harness.batch(first), harness.inputs(first.num_tokens)
            backend.init_forward_metadata_out_graph(batch, in_capture=True)

            def step(
                batch: ForwardBatch = batch, inputs: dict[tuple[int, str], Tensor] = inputs
            ) -> dict[tuple[int, str], Tensor]:
                backend.init_forward_metadata_in_graph(batch)
                return harness.convolve(batch, inputs)

            replay, outputs = capture(backend.device, step)
            graphs.append((kind, rows, batch, inputs, replay, outputs))
        for seed, order in ((1, graphs), (2, graphs[::-1])):
            for kind, rows, batch, inputs, replay, outputs in order:
                other = _bucket(kind, rows, seed)
                _replay_as(harness, other, batch, inputs, replay, outputs)

    @keeps("SCV444")
    @every_kind
    def test_the_metadata_hook_leaves_no_memory_behind(self, subject: Subject, kind: str) -> None:
        harness = _harness(subject, kind)
        backend = harness.backend
        for seed in (0, 1):
            batch = harness.batch(captured_step(kind, seed))
            backend.init_forward_metadata_out_graph(batch)
            with _Births() as births:
                backend.init_forward_metadata_in_graph(batch)
            held = births.alive()
            assert not held, f"still held after the call: {', '.join(held)}"

    @keeps("SCV445")
    def test_a_batch_that_does_not_fit_says_have_and_need(self, subject: Subject) -> None:
        subject.needs("graph_capture")
        backend = subject.digits(max_requests=8)
        batch = ForwardBatch.decode(slots=ints(backend, 1, 2, 3))
        with pytest.raises(GraphBufferError):
            backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_graph_state(2, 4)
        with pytest.raises(GraphBufferError) as caught:
            backend.init_forward_metadata_out_graph(batch)
        assert caught.value.have["max_bs"] == 2
        assert caught.value.need["max_bs"] == 3
        backend.init_graph_state(2, 4)
        with pytest.raises(GraphBufferError):
            backend.init_graph_state(3, 8)
