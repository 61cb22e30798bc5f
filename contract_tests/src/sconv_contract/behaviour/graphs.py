"""Recordability, without a GPU where it can be had: syncs, addresses, allocations, replays."""

# The names of the tests say what they ask.
# ruff: noqa: D102

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sconv import ForwardBatch, ForwardMode, GraphBufferError, StateSpec, Stream
from sconv.testing.harness import Harness
from sconv.testing.steps import Step, grow_tree

from .capturing import capture, has_graphs
from .rules import keeps
from .rulings import ints
from .subject import Subject

__all__ = ["Graphs"]

ROWS, TOKENS, DRAFTS = 5, 17, 3
LIVE, FREE = [9, 2, 7, 4, 11, 5], [1, 3, 6, 8, 10, 12]
KINDS = ("decode", "extend", "mixed", "draft_extend", "idle", "chain", "tree")

every_kind = pytest.mark.parametrize("kind", KINDS)


def _harness(subject: Subject, kind: str) -> Harness:
    subject.needs("graph_capture")
    if kind in ("chain", "tree"):
        subject.needs("rollback")
    if kind == "tree":
        subject.needs("trees")
    spec = StateSpec(
        num_layers=2,
        streams=[[Stream("k", 5), Stream("v", 64)], [Stream("k", 3)]],
        kernel_size=4,
        num_slots=12,
        max_requests=8,
        max_draft_tokens=DRAFTS,
        draft_topk=2,
        track_interval=4,
        chunk_size=2,
    )
    backend = subject.build(subject.fit(spec))
    backend.init_graph_state(ROWS, TOKENS)
    return Harness(backend, seed=1, live=LIVE, x_dtype=torch.bfloat16, activation="silu")


def _step(kind: str, seed: int) -> Step:
    """Draw a step; all steps of a kind have the same shapes and the same optional tensors."""
    rng = random.Random(seed)
    slots = rng.sample(LIVE, ROWS)
    for row in rng.sample(range(ROWS), 1 + seed % 2):
        slots[row] = rng.choice((-1, -1, 0))
    before = tuple(rng.choice((0, 2, 3, 7)) for _ in slots)
    common: dict[str, Any] = {"slots": tuple(slots), "before": before}
    snapshot: dict[str, Any] = {
        "track_slots": tuple(
            target if slot > 0 and rng.random() < 0.7 else -1
            for slot, target in zip(slots, rng.sample(FREE, ROWS), strict=True)
        ),
        "track_mask": tuple(rng.random() < 0.8 for _ in slots),
    }
    match kind:
        case "decode":
            return Step(ForwardMode.DECODE, lengths=(1,) * ROWS, **common, **snapshot)
        case "extend" | "mixed":
            lengths = [0] * ROWS
            for _ in range(rng.randint(6, TOKENS)):
                lengths[rng.randrange(ROWS)] += 1
            ends = tuple(
                rng.choice((-1, old + rng.randint(0, new)))
                for old, new in zip(before, lengths, strict=True)
            )
            tail = TOKENS - sum(lengths)
            return Step(
                ForwardMode(kind),
                lengths=tuple(lengths),
                tail=tail,
                track_lengths=ends,
                **common,
                **snapshot,
            )
        case "draft_extend":
            return Step(
                ForwardMode.DRAFT_EXTEND,
                lengths=(DRAFTS,) * ROWS,
                draft_tokens=DRAFTS,
                accepts=tuple(rng.randint(-1, DRAFTS) for _ in slots),
                **common,
                **snapshot,
            )
        case "idle":
            return Step(ForwardMode.IDLE, (-1,) * ROWS, (0,) * ROWS, before)
        case _:
            parents = tuple(grow_tree(rng.choice, DRAFTS, 2) for _ in slots)
            return Step(
                ForwardMode.TARGET_VERIFY,
                lengths=(DRAFTS,) * ROWS,
                draft_tokens=DRAFTS,
                parents=parents if kind == "tree" else None,
                **common,
            )


def _tensors(holder: Any) -> dict[str, Tensor]:
    values = {field.name: getattr(holder, field.name) for field in fields(holder)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


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


class Graphs:
    """Tests of :class:`sconv_contract.BackendContract`."""

    @keeps("SCV441")
    @every_kind
    def test_no_mode_needs_a_value_on_the_host(self, subject: Subject, kind: str) -> None:
        harness = _harness(subject, kind)
        backend, step = harness.backend, _step(kind, 1)
        batch, inputs = harness.batch(step), harness.inputs(step.num_tokens)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)

        def recorded() -> dict[tuple[int, str], Tensor]:
            backend.init_forward_metadata_in_graph(batch)
            outputs = harness.convolve(batch, inputs)
            if step.mode is ForwardMode.TARGET_VERIFY:
                none = torch.full((ROWS,), -1, device=backend.device)
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
            batch = harness.batch(_step(kind, seed))
            backend.init_forward_metadata_out_graph(batch)
            backend.init_forward_metadata_in_graph(batch)
            meta = backend.conv_state_metadata(0, batch)
            found.append({name: value.data_ptr() for name, value in _tensors(meta).items()})
            for other in others:
                between = harness.batch(_step(other, 5))
                backend.init_forward_metadata_out_graph(between)
                backend.init_forward_metadata_in_graph(between)
            del meta
            junk = [torch.ones(1 << 12, device=backend.device) for _ in range(50)]
            del junk
        assert found[0] == found[1]
        assert {"cache_indices", "cu", "si", "track_conv_indices"} <= found[0].keys()

    @keeps("SCV443")
    @every_kind
    def test_a_replay_equals_the_oracle(self, subject: Subject, kind: str) -> None:
        """Capture and replay differ in slots, lengths, trees, snapshots and values."""
        harness = _harness(subject, kind)
        backend, first = harness.backend, _step(kind, 0)
        batch, inputs = harness.batch(first), harness.inputs(first.num_tokens)

        def step() -> dict[tuple[int, str], Tensor]:
            backend.init_forward_metadata_in_graph(batch)
            return harness.convolve(batch, inputs)

        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        replay, outputs = capture(backend.device, step)
        for seed in (1, 2, 3):
            other = _step(kind, seed)
            for layer in backend.pool.layers:
                layer[LIVE] = torch.randn(len(LIVE), *layer.shape[1:]).to(layer)
            theirs = _tensors(harness.batch(other))
            for name, mine in _tensors(batch).items():
                mine.copy_(theirs[name])
            for key, value in harness.inputs(other.num_tokens).items():
                inputs[key].copy_(value)
            before = harness.state()
            backend.init_forward_metadata_out_graph(batch)
            replay()
            harness.check(other, inputs, before, outputs)

    @keeps("SCV444")
    @every_kind
    def test_the_metadata_hook_leaves_no_memory_behind(self, subject: Subject, kind: str) -> None:
        harness = _harness(subject, kind)
        backend = harness.backend
        for seed in (0, 1):
            batch = harness.batch(_step(kind, seed))
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
