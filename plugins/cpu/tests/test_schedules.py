"""A server's day: thousands of random steps against a model that only knows tokens.

The model recomputes every window from the tokens of its request, so it cannot drift with the pool.
After each step every live window, running or snapshot, must equal it bit for bit, every slot that
nobody owns must be as it was left, and every slot must be accounted for.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from sconv import (
    Backend,
    ForwardBatch,
    StateSpec,
    Stream,
    crossing_steps,
    decode_track_mask,
    load_backend,
    verify_step_indices,
)
from sconv.reference import time_axis
from sconv.testing.harness import assert_same_bits, output_bound
from sconv.testing.steps import grow_tree

STEPS = 2000
VOCABULARY, PAD = 50, 50
ROWS, SLOTS, CHUNK = 7, 14, 4
LAYERS = [[Stream("a", 2), Stream("b", 1)], [Stream("a", 3)]]


@dataclass(eq=False)
class Request:
    """A request: its row and slot, the tokens in its state, and what is left of its prompt."""

    row: int
    slot: int
    tokens: list[int]
    prompt: list[int] = field(default_factory=list)


class Model:
    """Every token has a fixed input per channel; windows and outputs follow from tokens alone."""

    def __init__(self, spec: StateSpec, generator: torch.Generator) -> None:
        self.spec = spec
        self.tables, self.weights = [], []
        for layer in range(spec.num_layers):
            # Exact in every dtype, so that the state's rounding is none.
            table = torch.randn(VOCABULARY + 1, spec.layer_dim(layer), generator=generator)
            table[PAD] = 0
            self.tables.append(table.bfloat16().float())
            weight = torch.randn(spec.layer_dim(layer), spec.kernel_size, generator=generator)
            self.weights.append(weight)

    def windows(self, layer: int, histories: Sequence[Sequence[int]]) -> Tensor:
        """``[n, K-1, D]`` in the state's dtype."""
        size = self.spec.window_size
        index = [([PAD] * size + list(tokens)[-size:])[-size:] for tokens in histories]
        return self.tables[layer][torch.tensor(index, dtype=torch.int64).view(-1, size)].to(
            self.spec.dtype
        )

    def outputs(self, layer: int, paths: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Exact outputs ``[T, D]`` for tokens given with their pasts, and their magnitudes."""
        width = self.spec.kernel_size
        index = [([PAD] * width + list(path)[-width:])[-width:] for path in paths]
        taps = self.tables[layer][
            torch.tensor(index, dtype=torch.int64).view(-1, width)
        ].double()  # [T, K, D]
        products = taps * self.weights[layer].double().t()
        size = products.abs().sum(1) + taps[:, -1].abs()
        return products.sum(1) + taps[:, -1], size


class Server:
    """Schedules requests as an engine does; every method is one event."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.rng = random.Random(seed)
        self.spec = StateSpec(
            num_layers=len(LAYERS),
            streams=LAYERS,
            num_slots=SLOTS,
            max_requests=ROWS,
            track_interval=8,
            chunk_size=CHUNK,
            **options,
        )
        self.backend: Backend = load_backend("cpu", spec=self.spec)
        self.backend.init_graph_state(ROWS + 1, 8 * (ROWS + 1))  # Room for a padded row.
        self.pool = self.backend.pool
        self.model = Model(self.spec, torch.Generator().manual_seed(seed))
        self.trees = self.pool.windows.takes_trees
        self.running: list[Request] = []
        self.snapshots: dict[tuple[int, ...], int] = {}
        self.unused_rows = list(range(1, ROWS + 1))
        self.rng.shuffle(self.unused_rows)
        self.texts = [self.words(40) for _ in range(3)]
        #: Requests between their verify step and its commit, whose windows must not move.
        self.in_flight: list[Request] = []
        self.steps = 0
        self.counts: dict[str, int] = {}
        for slot in range(SLOTS + 1):
            self.poison(slot)

    def words(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def poison(self, slot: int) -> None:
        for layer in self.pool.layers:
            layer[slot] = float("nan")

    def count(self, event: str) -> None:
        self.counts[event] = self.counts.get(event, 0) + 1

    # Slots.

    def make_room(self, keep: tuple[int, ...] = ()) -> bool:
        """Have a free slot, at the cost of a snapshot if need be."""
        if self.pool.num_free == 0:
            known = [prefix for prefix in self.snapshots if prefix != keep]
            if not known:
                return False
            self.give_slot(self.snapshots.pop(self.rng.choice(known)))
            self.count("evicted")
        return True

    def give_slot(self, slot: int) -> None:
        self.pool.free(slot)
        self.poison(slot)

    def targets(self, prefixes: Sequence[Sequence[int] | None]) -> list[int]:
        """Slots for the snapshots of a step, -1 where there is none to take or it is known."""
        slots, seen = [], set(self.snapshots)
        for prefix in prefixes:
            wanted = bool(prefix) and tuple(prefix or ()) not in seen and self.make_room()
            slots.append(int(self.pool.alloc(1)) if wanted else -1)
            seen.add(tuple(prefix or ()))
        return slots

    def file(
        self, event: str, targets: Sequence[int], prefixes: Sequence[Sequence[int] | None]
    ) -> None:
        """Remember the snapshots that a step took."""
        self.count(event)
        for slot, prefix in zip(targets, prefixes, strict=True):
            if slot >= 0 and prefix is not None:
                self.snapshots[tuple(prefix)] = slot
                self.count(f"snapshot by {event}")

    # Requests.

    def admit(self) -> None:
        """A prompt; the longest prefix that is known is copied instead of computed."""
        if not self.unused_rows:
            return
        prompt = self.rng.choice(self.texts)[: self.rng.randint(1, 30)]
        prompt = prompt + self.words(self.rng.choice((0, 1, 3)))
        known = [p for p in self.snapshots if len(p) < len(prompt) and prompt[: len(p)] == list(p)]
        prefix = max(known, key=len, default=())
        if not self.make_room(prefix):
            return
        if prefix:
            slot = int(self.pool.fork(self.snapshots[prefix]))
            self.count("prefix hit")
        else:
            slot = int(self.pool.alloc(1))
        request = Request(self.unused_rows.pop(), slot, list(prefix), prompt[len(prefix) :])
        self.pool.assign(request.row, slot)
        self.running.append(request)
        self.count("admitted")

    def branch(self) -> None:
        """A second continuation of a running request."""
        ready = self.ready()
        if ready and self.unused_rows and self.make_room():
            source = self.rng.choice(ready)
            slot = int(self.pool.fork(source.slot))
            request = Request(self.unused_rows.pop(), slot, list(source.tokens))
            self.pool.assign(request.row, slot)
            self.running.append(request)
            self.count("branched")

    def abort(self, request: Request | None = None) -> None:
        if request is None:
            if not self.running:
                return
            request = self.rng.choice(self.running)
        self.running.remove(request)
        self.give_slot(request.slot)
        self.unused_rows.insert(0, request.row)
        assert int(self.pool.req_to_slot[request.row]) == -1
        self.count("aborted")

    def ready(self) -> list[Request]:
        """Requests whose prompt is in their state, in random order."""
        found = [r for r in self.running if not r.prompt and r not in self.in_flight]
        self.rng.shuffle(found)
        return found

    # Steps.

    def forward(self, batch: ForwardBatch, paths: Sequence[Sequence[int] | None]) -> None:
        """Run one step and check its outputs; a path is a token with its past, None = padding."""
        self.backend.init_forward_metadata(batch)
        last = torch.tensor([path[-1] if path else PAD for path in paths], dtype=torch.int64)
        known = torch.tensor([path is not None for path in paths], dtype=torch.bool)
        for layer, streams in enumerate(LAYERS):
            names = [stream.name for stream in streams]
            parts = [self.spec.stream_slice(layer, name) for name in names]
            x = self.model.tables[layer][last]
            ys = self.backend.short_conv_group(
                [x[:, part.start : part.stop] for part in parts],
                [self.model.weights[layer][part.start : part.stop] for part in parts],
                layer_id=layer,
                streams=names,
                forward_batch=batch,
            )
            y = torch.cat(ys, dim=1).double()
            exact, size = self.model.outputs(layer, [path or [PAD] for path in paths])
            bound = output_bound(exact, size, torch.float32, self.spec.kernel_size)
            assert bool(((y - exact).abs() <= bound)[known].all()), (layer, batch.forward_mode)

    def padding(self) -> list[int]:
        """Request rows of padded rows: the dummy, or one that owns no slot."""
        return [self.rng.choice([0, *self.unused_rows]) for _ in range(self.rng.choice((0, 0, 1)))]

    def prefill(self) -> None:
        """Chunks of prompts, decoding rows and rows without tokens in one batch."""
        waiting = [r for r in self.running if r.prompt]
        rows = self.rng.sample(waiting, self.rng.randint(0, len(waiting)))
        rows += self.ready()[: self.rng.choice((0, 0, 1, 2))]
        self.rng.shuffle(rows)
        chunks, lengths, prefixes = [], [], []
        for request in rows:
            chunk = request.prompt[: self.rng.randint(0, 9)] if request.prompt else self.words(1)
            chunks.append(chunk)
            after = request.tokens + chunk
            boundary = len(after) // CHUNK * CHUNK
            due = chunk and boundary > len(request.tokens)
            lengths.append(boundary if due else -1)
            prefixes.append(after[:boundary] if due else None)
        targets = self.targets(prefixes)
        make = self.rng.choice((ForwardBatch.extend, ForwardBatch.mixed))
        batch = make(
            torch.tensor([r.row for r in rows], dtype=torch.int64),
            torch.tensor([len(chunk) for chunk in chunks], dtype=torch.int64),
            torch.tensor([len(r.tokens) for r in rows], dtype=torch.int64),
            mamba_track_indices=torch.tensor(targets, dtype=torch.int64),
            mamba_track_seqlens=torch.tensor(lengths, dtype=torch.int64),
        )
        paths = [
            request.tokens + chunk[: place + 1]
            for request, chunk in zip(rows, chunks, strict=True)
            for place in range(len(chunk))
        ]
        self.forward(batch, paths)
        for request, chunk in zip(rows, chunks, strict=True):
            request.tokens += chunk
            request.prompt = request.prompt[len(chunk) :]
        self.file("prefill", targets, prefixes)

    def decode(self) -> None:
        rows = self.ready()
        padding, new = self.padding(), self.words(len(rows))
        before = torch.tensor([len(r.tokens) for r in rows] + [0] * len(padding)).long()
        grid = self.spec.track_grid
        assert grid is not None
        after = [[*r.tokens, token] for r, token in zip(rows, new, strict=True)]
        prefixes = [tokens if len(tokens) % grid == 0 else None for tokens in after]
        targets = self.targets(prefixes)
        batch = ForwardBatch.decode(
            torch.tensor([r.row for r in rows] + padding, dtype=torch.int64),
            before,
            mamba_track_mask=decode_track_mask(before + 1, grid),
            mamba_track_indices=torch.tensor(targets + [-1] * len(padding), dtype=torch.int64),
        )
        self.forward(batch, [*after, *[None] * len(padding)])
        for request, token in zip(rows, new, strict=True):
            request.tokens.append(token)
        self.file("decode", targets, prefixes)

    def draft_extend(self) -> None:
        """As many tokens for every row, of which each keeps its own number, or leaves all be."""
        rows = self.ready()
        count = self.rng.randint(1, 5)
        accepts = [self.rng.randint(-1, count) for _ in rows]
        drafts = [self.words(count) for _ in rows]
        prefixes = [
            self.crossed(request.tokens, draft[: max(kept, 0)])
            for request, draft, kept in zip(rows, drafts, accepts, strict=True)
        ]
        targets = self.targets(prefixes)
        batch = ForwardBatch.draft_extend(
            torch.tensor([r.row for r in rows], dtype=torch.int64),
            torch.tensor([len(r.tokens) for r in rows], dtype=torch.int64),
            count,
            torch.tensor(accepts, dtype=torch.int32),
            mamba_track_indices=torch.tensor(targets, dtype=torch.int64),
        )
        paths = [
            request.tokens + draft[: place + 1]
            for request, draft in zip(rows, drafts, strict=True)
            for place in range(count)
        ]
        self.forward(batch, paths)
        for request, draft, kept in zip(rows, drafts, accepts, strict=True):
            request.tokens += draft[: max(kept, 0)]
        self.file("draft-extend", targets, prefixes)

    def crossed(self, tokens: list[int], kept: list[int]) -> list[int] | None:
        """The prefix at the newest snapshot boundary that the kept tokens reach."""
        grid = self.spec.track_grid
        assert grid is not None
        length = (len(tokens) + len(kept)) // grid * grid
        return (tokens + kept)[:length] if length > len(tokens) else None

    def idle(self) -> None:
        self.backend.init_forward_metadata(ForwardBatch.idle(self.rng.randint(0, 2)))
        self.count("idle")

    def speculate(self) -> None:
        """Verify, let other things happen, and commit: a step of its own each time."""
        rows = self.ready()
        if not rows:
            return
        count = self.rng.randint(1, self.spec.max_draft_tokens)
        tree = self.trees and self.rng.random() < 0.5
        topk = self.spec.draft_topk if tree else 1
        parents = [grow_tree(self.rng.choice, count, topk) for _ in rows]
        drafts = [self.words(count) for _ in rows]
        padding = self.padding()
        names = torch.tensor([r.row for r in rows] + padding, dtype=torch.int64)
        before = torch.tensor([len(r.tokens) for r in rows] + [0] * len(padding)).long()
        roots = [[-1, *[0] * (count - 1)]] * len(padding)
        batch = ForwardBatch.target_verify(
            names,
            before,
            count,
            parents=torch.tensor([*parents, *roots], dtype=torch.int32) if tree else None,
        )
        branches = [[_path(above, last) for last in range(count)] for above in parents]
        paths: list[list[int] | None] = [
            request.tokens + [draft[node] for node in branch]
            for request, draft, ends in zip(rows, drafts, branches, strict=True)
            for branch in ends
        ]
        self.forward(batch, paths + [None] * (count * len(padding)))
        self.in_flight = rows
        self.count("verify of trees" if tree else "verify of chains")
        self.check()

        for _ in range(self.rng.choice((0, 0, 1, 2, 3))):
            event = self.rng.choice(("idle", "decode", "prefill", "admit", "abort", "abort row"))
            if event == "abort row":
                left = [r for r in rows if r in self.running]
                if left:
                    self.abort(self.rng.choice(left))
                    self.count("aborted in flight")
            else:
                getattr(self, event)()
            self.check()
        self.in_flight = []
        if self.rng.random() < 0.05:
            self.count("never committed")
            return
        self.commit(rows, names, before, drafts, branches)

    def commit(
        self,
        rows: list[Request],
        names: Tensor,
        before: Tensor,
        drafts: list[list[int]],
        branches: list[list[list[int]]],
    ) -> None:
        """Keep a random node of each row: what an engine derives from the accepted node ids."""
        count = len(drafts[0])
        depth, flat, lengths, kept = count, [], [], []
        owners = {request.row for request in self.running}
        for row, request in enumerate(rows):
            last = self.rng.randint(-1, count - 1)
            if request not in self.running and request.row in owners:
                last = -1  # The request row belongs to another request by now.
            nodes = branches[row][last] if last >= 0 else []
            kept.append([drafts[row][node] for node in nodes])
            flat.append([row * count + node for node in nodes] + [-1] * (depth - len(nodes)))
            lengths.append(len(nodes))
        padded = len(names) - len(rows)
        accept_index = torch.tensor(flat + [[-1] * depth] * padded, dtype=torch.int32)
        accept_lens = torch.tensor(lengths + [0] * padded, dtype=torch.int32)
        prefixes = [
            self.crossed(request.tokens, tokens) if request in self.running else None
            for request, tokens in zip(rows, kept, strict=True)
        ]
        targets = self.targets(prefixes)
        grid = self.spec.track_grid
        assert grid is not None
        self.backend.update_mamba_state_after_mtp_verify(
            verify_step_indices(accept_index, accept_lens, count),
            torch.tensor(targets + [-1] * padded, dtype=torch.int64),
            crossing_steps(before, accept_lens, grid, accept_index, count),
            names,
        )
        for request, tokens in zip(rows, kept, strict=True):
            if request in self.running:
                request.tokens += tokens
        self.file("commit", targets, prefixes)

    def check(self) -> None:
        """Every live window is the model's, every free slot is untouched, no slot is lost."""
        self.steps += 1
        owned = {r.slot: r.tokens for r in self.running if r.tokens}
        owned |= {slot: list(prefix) for prefix, slot in self.snapshots.items()}
        fresh = [r.slot for r in self.running if not r.tokens]
        assert self.pool.live_slots() == sorted([*owned, *fresh])
        assert self.pool.num_free == SLOTS - len(owned) - len(fresh)
        free = sorted(set(range(1, SLOTS + 1)) - set(owned))
        for layer, state in enumerate(self.pool.layers):
            windows = time_axis(state, self.spec.window_axis)
            assert_same_bits(
                windows[list(owned)], self.model.windows(layer, list(owned.values())), "windows"
            )
            assert bool(windows[free].isnan().all()), "a slot that nobody owns was written"
        table = self.pool.req_to_slot.tolist()
        expected = [0] + [-1] * ROWS
        for request in self.running:
            expected[request.row] = request.slot
        assert table == expected


def _path(parents: Sequence[int], node: int) -> list[int]:
    return [*_path(parents, parents[node]), node] if node >= 0 else []


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Not here, where it triples the time: every other test of this folder has it."""


EVENTS = {
    "admit": 4,
    "prefill": 6,
    "decode": 4,
    "speculate": 6,
    "draft_extend": 2,
    "branch": 1,
    "abort": 2,
    "idle": 1,
}


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (0, {"window_layout": "dense", "window_axis": "time", "kernel_size": 4}),
        (1, {"window_layout": "dense", "window_axis": "channel", "kernel_size": 8}),
        (2, {"window_layout": "inputs", "window_axis": "channel", "kernel_size": 4}),
        (3, {"window_layout": "inputs", "window_axis": "time", "kernel_size": 2}),
        (4, {"window_layout": "dedup", "window_axis": "time", "kernel_size": 3}),
        (5, {"window_layout": "dedup", "window_axis": "channel", "kernel_size": 4}),
    ],
)
def test_two_thousand_steps_keep_every_window(seed: int, options: dict[str, Any]) -> None:
    trees = options["window_layout"] != "dedup"
    dtype = torch.bfloat16 if seed % 2 else torch.float32
    server = Server(seed, dtype=dtype, max_draft_tokens=6, draft_topk=3 if trees else 1, **options)
    assert server.pool.window_layout == options["window_layout"]
    names, weights = list(EVENTS), list(EVENTS.values())
    while server.steps < STEPS:
        getattr(server, server.rng.choices(names, weights)[0])()
        server.check()
    # It was a day on which everything happened, and not only now and then.
    happened = {
        "admitted": 80,
        "prefix hit": 20,
        "branched": 10,
        "aborted": 80,
        "aborted in flight": 20,
        "evicted": 50,
        "prefill": 200,
        "decode": 100,
        "draft-extend": 50,
        "idle": 50,
        "verify of chains": 60,
        "commit": 100,
        "never committed": 2,
        "snapshot by prefill": 50,
        "snapshot by decode": 10,
        "snapshot by draft-extend": 10,
        "snapshot by commit": 10,
        **({"verify of trees": 50} if trees else {}),
    }
    rare = {name: server.counts.get(name, 0) for name in happened}
    assert not {name: count for name, count in rare.items() if count < happened[name]}, rare
    for request in list(server.running):
        server.abort(request)
    for slot in server.snapshots.values():
        server.give_slot(slot)
    assert server.pool.num_free == SLOTS
