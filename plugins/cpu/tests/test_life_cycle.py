"""Requests that come, grow, branch, speculate and leave at any point.

Every request keeps the list of its inputs beside the pool; its window must always be the last of
them and its next output must follow from all of them, whatever else happened in the pool.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from sconv import (
    Backend,
    ForwardBatch,
    PoolExhaustedError,
    StateSpec,
    Stream,
    load_backend,
    reference,
)
from sconv.testing.digits import digit_spec, fill_pool, read_window, run_digits
from sconv.testing.harness import assert_same_bits, output_bound
from sconv.testing.steps import grow_tree

DIM, WIDTH, DRAFTS = 3, 4, 3


@dataclass(eq=False)
class Request:
    """A request row and what it has taken in."""

    row: int
    slot: int
    inputs: list[Tensor] = field(default_factory=list)


class Engine:
    """A scheduler in small: it owns request rows and calls the backend as a server would."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        spec = StateSpec(
            num_layers=1,
            streams=[Stream("a", DIM)],
            kernel_size=WIDTH,
            num_slots=6,
            max_requests=6,
            dtype=torch.float32,
            max_draft_tokens=DRAFTS,
            draft_topk=2,
        )
        self.backend: Backend = load_backend("cpu", spec=spec)
        self.pool = self.backend.pool
        self.pool.layers[0].fill_(float("nan"))
        self.weight = torch.randn(DIM, WIDTH, generator=self.generator)
        self.running: list[Request] = []
        self.free_rows = [4, 1, 6, 2, 5, 3]

    def tokens(self, count: int) -> Tensor:
        return torch.randn(count, DIM, generator=self.generator)

    def admit(self) -> None:
        """A new request; its slot holds whatever the last owner left."""
        if not self.free_rows:
            return
        try:
            slot = int(self.pool.alloc(1))
        except PoolExhaustedError:
            assert self.pool.num_free == 0
            return
        request = Request(self.free_rows.pop(), slot)
        self.pool.assign(request.row, slot)
        self.running.append(request)

    def fork(self) -> None:
        """A second request continues where one is (a beam, a shared prefix)."""
        if not self.running or not self.free_rows or self.pool.num_free == 0:
            return
        source = self.rng.choice(self.running)
        if not source.inputs:
            return
        request = Request(self.free_rows.pop(), int(self.pool.fork(source.slot)))
        request.inputs = list(source.inputs)
        self.pool.assign(request.row, request.slot)
        self.running.append(request)

    def leave(self, request: Request) -> None:
        self.pool.free(request.slot)
        self.running.remove(request)
        self.free_rows.append(request.row)
        assert int(self.pool.req_to_slot[request.row]) == -1

    def forward(self, batch: ForwardBatch, x: Tensor) -> Tensor:
        self.backend.init_forward_metadata(batch)
        return self.backend.short_conv(
            x, self.weight, layer_id=0, stream="a", forward_batch=batch, activation="silu"
        )

    def check(self, request: Request, x: Tensor, y: Tensor, parents: list[int] | None) -> None:
        """Compare outputs with a convolution over all inputs of the request."""
        history = [torch.zeros(DIM)] * (WIDTH - 1) + request.inputs
        window = torch.stack(history[-(WIDTH - 1) :])
        expected, _ = reference.row_conv(x, window, self.weight, activation="silu", parents=parents)
        size, _ = reference.row_conv(x.abs(), window.abs(), self.weight.abs(), parents=parents)
        bound = output_bound(expected, size, torch.float32, WIDTH)
        assert bool(((y.double() - expected).abs() <= bound).all())

    def extend(self) -> None:
        """Prefill chunks and decoding rows in one batch; some rows get nothing."""
        rows = self.rng.sample(self.running, self.rng.randint(0, len(self.running)))
        lengths = [self.rng.choice((0, 1, 1, 2, 5)) for _ in rows]
        x = self.tokens(sum(lengths))
        batch = ForwardBatch.mixed(
            torch.tensor([request.row for request in rows], dtype=torch.int64),
            torch.tensor(lengths, dtype=torch.int64),
            torch.tensor([len(request.inputs) for request in rows], dtype=torch.int64),
            num_tokens=len(x),
        )
        y = self.forward(batch, x)
        parts = zip(rows, x.split(lengths), y.split(lengths), strict=True)
        for request, new, out in parts:
            self.check(request, new, out, None)
            request.inputs += list(new)

    def decode(self) -> None:
        rows = [request for request in self.running if request.inputs]
        self.rng.shuffle(rows)
        x = self.tokens(len(rows) + 1)
        # One padded row at the end, on a request row that owns no slot, if there is one.
        names = [request.row for request in rows] + [self.free_rows[0] if self.free_rows else 0]
        y = self.forward(ForwardBatch.decode(torch.tensor(names)), x)
        if self.free_rows:
            assert y[-1].tolist() == [0.0] * DIM
        for request, new, out in zip(rows, x, y, strict=False):
            self.check(request, new[None], out[None], None)
            request.inputs.append(new)

    def speculate(self) -> None:
        """Verify, let something else happen, perhaps lose a request, and commit."""
        rows = [request for request in self.running if request.inputs]
        if not rows:
            return
        self.rng.shuffle(rows)
        per_row = self.rng.randint(1, DRAFTS)
        tree = per_row > 1 and self.rng.random() < 0.5
        parents = [list(grow_tree(self.rng.choice, per_row, 2 if tree else 1)) for _ in rows]
        x = self.tokens(len(rows) * per_row).view(len(rows), per_row, DIM)
        names = torch.tensor([request.row for request in rows])
        batch = ForwardBatch.target_verify(
            names,
            torch.tensor([len(request.inputs) for request in rows]),
            per_row,
            parents=torch.tensor(parents, dtype=torch.int32) if tree else None,
        )
        before = self.pool.layers[0].clone()
        y = self.forward(batch, x.flatten(0, 1)).view(x.shape)
        assert_same_bits(self.pool.layers[0], before, "the pool during verify")
        for row, request in enumerate(rows):
            self.check(request, x[row], y[row], parents[row])

        happening = self.rng.choice(("nothing", "an idle step", "a departure", "a newcomer"))
        if happening == "an idle step":
            self.backend.init_forward_metadata(ForwardBatch.idle(1))
        elif happening == "a departure":
            self.leave(rows[0])
        elif happening == "a newcomer":
            if len(rows) > 1:
                self.leave(rows[0])
            self.admit()
            newcomer = self.running[-1]
            if newcomer not in rows and not newcomer.inputs:
                x_new = self.tokens(2)
                self.forward(
                    ForwardBatch.extend(
                        torch.tensor([newcomer.row]), torch.tensor([2]), torch.tensor([0])
                    ),
                    x_new,
                )
                newcomer.inputs += list(x_new)
        last = [self.rng.randint(-1, per_row - 1) for _ in rows]
        gone = [row for row, request in enumerate(rows) if request not in self.running]
        for row in gone:
            # A row that was handed on within the step is no longer this request's.
            if int(self.pool.req_to_slot[rows[row].row]) != -1:
                last[row] = -1
        self.backend.update_mamba_state_after_mtp_verify(torch.tensor(last), req_pool_indices=names)
        for row, request in enumerate(rows):
            if request not in self.running:
                continue
            path, node = [], last[row]
            while node >= 0:
                path.append(node)
                node = parents[row][node]
            request.inputs += [x[row, node] for node in reversed(path)]

    def assert_consistent(self) -> None:
        """Every window is the last of its request's inputs; every slot has one owner."""
        for request in self.running:
            assert int(self.pool.req_to_slot[request.row]) == request.slot
            if request.inputs:
                history = [torch.zeros(DIM)] * (WIDTH - 1) + request.inputs
                expected = torch.stack(history[-(WIDTH - 1) :])
                assert_same_bits(self.pool.layers[0][request.slot], expected, "a window")
        assert self.pool.live_slots() == sorted(request.slot for request in self.running)
        assert self.pool.num_free == 6 - len(self.running)


@pytest.mark.parametrize("seed", range(12))
def test_requests_are_what_their_inputs_say(seed: int) -> None:
    engine = Engine(seed)
    actions = (engine.admit, engine.extend, engine.extend, engine.decode, engine.speculate)
    for _ in range(30):
        engine.rng.choice((*actions, engine.fork))()
        if engine.running and engine.rng.random() < 0.15:
            engine.leave(engine.rng.choice(engine.running))
        engine.assert_consistent()
    assert engine.running or engine.free_rows
    for request in list(engine.running):
        engine.leave(request)
    assert engine.pool.num_free == 6
    assert engine.pool.req_to_slot.tolist() == [0] + [-1] * 6


ABORTS = ("before a slot", "before prefill", "in prefill", "decoding", "in verify", "after commit")


@pytest.mark.parametrize("point", ABORTS)
def test_an_aborted_request_gives_its_slot_back(point: str) -> None:
    """And takes nothing along: its neighbour, and the next owner of its slot, are as they were."""
    backend = load_backend("cpu", spec=digit_spec(num_slots=2, max_draft_tokens=2))
    pool = backend.pool
    fill_pool(pool, {})
    pool.assign(1, pool.alloc(1))
    neighbour = ForwardBatch.extend(torch.tensor([1]), torch.tensor([3]), torch.tensor([0]))
    run_digits(backend, neighbour, [1, 2, 3])
    free, reached = pool.num_free, ABORTS.index(point)

    if reached >= 1:
        pool.assign(2, pool.alloc(1))
    if reached >= 2:
        chunk = ForwardBatch.extend(torch.tensor([2]), torch.tensor([2]), torch.tensor([0]))
        assert run_digits(backend, chunk, [7, 8]) == [7000, 8700]
    if reached >= 3:
        assert run_digits(backend, ForwardBatch.decode(torch.tensor([2])), [9]) == [9870]
    if reached >= 4:
        rows = torch.tensor([2, 1])
        batch = ForwardBatch.target_verify(rows, torch.tensor([3, 3]), 2)
        assert run_digits(backend, batch, [5, 6, 4, 5]) == [5987, 6598, 4321, 5432]
    commit = backend.update_mamba_state_after_mtp_verify
    if point == "after commit":
        commit(torch.tensor([1, 0]), req_pool_indices=rows)
    if reached >= 1:
        pool.free(int(pool.req_to_slot[2]))
    if point == "in verify":
        commit(torch.tensor([1, 0]), req_pool_indices=rows)

    assert pool.num_free == free
    assert int(pool.req_to_slot[2]) == -1
    assert run_digits(backend, ForwardBatch.decode(torch.tensor([2])), [7]) == [0]
    assert read_window(pool, 1) == ([2, 3, 4] if reached >= 4 else [1, 2, 3])

    pool.assign(3, pool.alloc(1))
    batch = ForwardBatch.extend(torch.tensor([3]), torch.tensor([2]), torch.tensor([0]))
    assert run_digits(backend, batch, [4, 5]) == [4000, 5400]
    assert read_window(pool, int(pool.req_to_slot[3])) == [0, 4, 5]


def test_a_branch_writes_to_its_own_copy() -> None:
    backend = load_backend("cpu", spec=digit_spec(num_layers=2, streams=("a", "b")))
    pool = backend.pool
    pool.assign(1, pool.alloc(1))
    fill_pool(pool, {1: [1, 2, 3]}, {1: 1})
    branch = pool.fork([1, 1])
    pool.assign([2, 3], branch)
    batch = ForwardBatch.decode(torch.tensor([3, 1, 2]))
    assert run_digits(backend, batch, [4, 5, 6], layer_id=1, stream="b") == [4321, 5321, 6321]
    windows = [read_window(pool, slot, layer_id=1, stream="b") for slot in (1, *branch.tolist())]
    assert windows == [[2, 3, 5], [2, 3, 6], [2, 3, 4]]
    assert [read_window(pool, slot) for slot in branch.tolist()] == [[1, 2, 3]] * 2
