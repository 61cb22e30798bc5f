"""A server's day: thousands of random, right steps against an oracle that only knows tokens.

The oracle keeps each request's tokens in a list and computes windows and outputs from them in
Python's integers, so it shares nothing with any backend and cannot drift with the pool. After each
event every live window, running or snapshot, must equal it, every slot that nobody owns must be as
it was left, and every slot must be accounted for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from ..engine.backend import Backend
from ..reference import time_axis
from ..state.spec import StateSpec, Stream
from ..step.batch import ForwardBatch, ForwardMode
from ..step.tracking import crossing_steps, decode_track_mask, verify_step_indices
from .captures import load_into
from .steps import grow_tree

__all__ = ["EVENTS", "Capture", "Fuzzer", "Oracle", "Request", "fuzzed_spec"]

VOCABULARY: Final = 50
#: What a window holds before the first token.
PAD: Final = -1
ROWS: Final = 7
SLOTS: Final = 14
CHUNK: Final = 4
DRAFTS: Final = 6
#: What happens, and how often.
EVENTS: Final = {
    "admit": 4,
    "begin": 1,
    "prefill": 6,
    "decode": 4,
    "speculate": 6,
    "draft_extend": 2,
    "branch": 1,
    "offload": 1,
    "abort": 2,
    "idle": 1,
}


class Captured(Protocol):
    """A captured step: :class:`sconv.CapturedStep`, or a recording."""

    result: Any

    def replay(self) -> None:
        """Run it again on the same memory."""


#: Captures a call; None = static steps are run without a capture.
Capture = Callable[[Callable[[], Any]], Captured]


def fuzzed_spec(**changes: Any) -> StateSpec:
    """Return a spec of two layers with different streams, for every mode."""
    given: dict[str, Any] = {
        "num_layers": 2,
        "streams": [[Stream("a", 2), Stream("b", 1)], [Stream("a", 3)]],
        "num_slots": SLOTS,
        "max_requests": ROWS,
        "kernel_size": 4,
        "track_interval": 8,
        "chunk_size": CHUNK,
        "max_draft_tokens": DRAFTS,
        "draft_topk": 1 if changes.get("window_layout") == "dedup" else 3,
    }
    return StateSpec(**(given | changes))


@dataclass(eq=False)
class Request:
    """A request.

    Attributes:
        row: Its request row.
        slot: Its slot.
        tokens: The tokens in its state.
        prompt: What is left of its prompt.
        written: Whether its slot holds its state.
    """

    row: int
    slot: int
    tokens: list[int]
    prompt: list[int] = field(default_factory=list)
    written: bool = True


class Oracle:
    """Inputs, windows and outputs of a token with its past, in integers; exact in every dtype."""

    def __init__(self, spec: StateSpec) -> None:
        self._kernel_size = spec.kernel_size

    def input(self, token: int, layer: int, channel: int) -> int:
        """Return a token's input: different for all tokens of a channel, 0 for padding."""
        return 0 if token == PAD else (token + 1) * (layer + channel + 2) % 53 - 26

    def weight(self, layer: int, channel: int, tap: int) -> int:
        """Return a weight of a convolution."""
        return (5 * channel + 3 * tap + layer) % 7 - 3

    def window(self, tokens: Sequence[int], layer: int, dim: int) -> list[list[int]]:
        """Return the K-1 columns of a state, oldest first."""
        return [
            [self.input(token, layer, channel) for channel in range(dim)]
            for token in self._newest(tokens, self._kernel_size - 1)
        ]

    def output(self, tokens: Sequence[int], layer: int, dim: int) -> list[int]:
        """Return the output of the last token, its residual added."""
        taps = self._newest(tokens, self._kernel_size)
        return [
            self.input(taps[-1], layer, channel)
            + sum(
                self.weight(layer, channel, tap) * self.input(token, layer, channel)
                for tap, token in enumerate(taps)
            )
            for channel in range(dim)
        ]

    @staticmethod
    def _newest(tokens: Sequence[int], count: int) -> list[int]:
        return [*[PAD] * count, *tokens][-count:]


class Fuzzer:
    """Schedules requests as an engine does; each of :data:`EVENTS` is a method.

    Attributes:
        rng: Decides everything.
        backend: The backend under test.
        pool: Its state.
        running: The requests.
        snapshots: Slot of each prefix that was snapshot.
        in_flight: Requests between their verify step and its commit, whose windows must not move.
        steps: Events so far.
        counts: How often each kind of event happened.
    """

    def __init__(
        self, backend: Backend, seed: int, *, graphs: bool = False, capture: Capture | None = None
    ) -> None:
        """Start the day of a fresh backend of :func:`fuzzed_spec`.

        Args:
            backend: The backend.
            seed: Of the schedule.
            graphs: Run some steps through one static batch per kind, refilled each time.
            capture: Captures such a step; None = both halves and the layers are called each time.
        """
        self.rng = random.Random(seed)
        self.backend, self.spec, self.pool = backend, backend.spec, backend.pool
        self.oracle = Oracle(self.spec)
        self.trees = self.spec.draft_topk > 1 and self.pool.windows.takes_trees
        self._graphs, self._capture = graphs, capture
        self._static: dict[str, _Static] = {}
        backend.init_graph_state(ROWS + 1, DRAFTS * (ROWS + 1))
        self.weights = [self._weights(layer) for layer in range(self.spec.num_layers)]
        self.running: list[Request] = []
        self.snapshots: dict[tuple[int, ...], int] = {}
        self.offloaded: dict[tuple[int, ...], Any] = {}
        self.unused_rows = list(range(1, ROWS + 1))
        self.rng.shuffle(self.unused_rows)
        self._texts = [self.words(40) for _ in range(3)]
        self.in_flight: list[Request] = []
        self.steps = 0
        self.counts: dict[str, int] = {}
        for slot in range(SLOTS + 1):
            self.poison(slot)

    def _weights(self, layer: int) -> Tensor:
        taps, dim = range(self.spec.kernel_size), self.spec.layer_dim(layer)
        values = [
            [self.oracle.weight(layer, channel, tap) for tap in taps] for channel in range(dim)
        ]
        return torch.tensor(values, dtype=torch.float32, device=self.backend.device)

    def run(self, steps: int) -> None:
        """Let this many events happen, each with its check.

        Raises:
            AssertionError: The backend and the oracle differ.
        """
        names, weights = list(EVENTS), list(EVENTS.values())
        while self.steps < steps:
            getattr(self, self.rng.choices(names, weights)[0])()
            self.check()

    def end(self) -> None:
        """Give all slots back."""
        for request in list(self.running):
            self.abort(request)
        for slot in self.snapshots.values():
            self.give_slot(slot)
        assert self.pool.num_free == SLOTS

    def words(self, count: int) -> list[int]:
        """Return random tokens."""
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def poison(self, slot: int) -> None:
        """Make a slot that nobody owns NaN, unknown to torch's count of writes."""
        for layer in self.pool.layers:
            layer.data[slot] = math.nan

    def count(self, event: str) -> None:
        """Count an event."""
        self.counts[event] = self.counts.get(event, 0) + 1

    def ints(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """Return a tensor on the backend's device."""
        return torch.tensor(list(values), dtype=dtype, device=self.backend.device)

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
        """Free a slot."""
        self.pool.free(slot)
        self.poison(slot)

    def targets(self, prefixes: Sequence[Sequence[int] | None]) -> list[int]:
        """Return slots for the snapshots of a step, -1 where there is none or it is known."""
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

    def admit(self) -> None:
        """A prompt arrives; the longest prefix that is known is copied instead of computed."""
        if not self.unused_rows:
            return
        prompt = self.rng.choice(self._texts)[: self.rng.randint(1, 30)]
        prompt = prompt + self.words(self.rng.choice((0, 1, 3)))
        known = [
            prefix
            for prefix in {**self.snapshots, **self.offloaded}
            if len(prefix) < len(prompt) and prompt[: len(prefix)] == list(prefix)
        ]
        prefix = max(known, key=len, default=())
        if not self.make_room(prefix):
            return
        if prefix in self.snapshots and self.rng.random() < 0.5:
            slot = int(self.pool.fork(self.snapshots[prefix]))
            self.count("hit by fork")
        else:
            slot = int(self.pool.alloc(1))
            if prefix in self.snapshots:
                self.pool.copy(self.snapshots[prefix], slot)
                self.count("hit by copy")
            elif prefix:
                self.pool.restore(slot, self.offloaded[prefix])
                self.count("hit by restore")
        request = Request(
            self.unused_rows.pop(), slot, list(prefix), prompt[len(prefix) :], bool(prefix)
        )
        self.pool.assign(request.row, slot)
        self.running.append(request)
        self.count("admitted")

    def begin(self) -> None:
        """A request starts by decoding: from a cleared slot, or by a length of 0."""
        if self.unused_rows and self.make_room():
            slot = int(self.pool.alloc(1))
            clears = self.rng.random() < 0.5
            if clears:
                self.pool.clear(slot)
            request = Request(self.unused_rows.pop(), slot, [], written=clears)
            self.pool.assign(request.row, slot)
            self.running.append(request)
            self.count("begun")

    def branch(self) -> None:
        """A running request gets a second continuation."""
        ready = [request for request in self.ready() if request.written]
        if ready and self.unused_rows and self.make_room():
            source = self.rng.choice(ready)
            slot = int(self.pool.fork(source.slot))
            request = Request(self.unused_rows.pop(), slot, list(source.tokens))
            self.pool.assign(request.row, slot)
            self.running.append(request)
            self.count("branched")

    def offload(self) -> None:
        """A snapshot moves to a host tier."""
        if self.snapshots:
            prefix = self.rng.choice(list(self.snapshots))
            slot = self.snapshots.pop(prefix)
            self.offloaded[prefix] = self.pool.export(slot)
            self.give_slot(slot)
            self.count("offloaded")

    def abort(self, request: Request | None = None) -> None:
        """A request ends."""
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
        """Return requests whose prompt is in their state, in random order."""
        found = [r for r in self.running if not r.prompt and r not in self.in_flight]
        self.rng.shuffle(found)
        return found

    def idle(self) -> None:
        """A step without tokens."""
        self.backend.init_forward_metadata(ForwardBatch.idle(self.rng.randint(0, 2)))
        self.count("idle")

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
        by_rows, by_slots = self.named(rows)
        batch = make(
            by_rows,
            self.ints([len(chunk) for chunk in chunks]),
            self.ints([len(r.tokens) for r in rows]),
            slots=by_slots,
            num_tokens=sum(map(len, chunks)) if self.rng.random() < 0.5 else None,
            mamba_track_indices=self.ints(targets),
            mamba_track_seqlens=self.ints(lengths),
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
            request.written |= bool(chunk)
        self.file("prefill", targets, prefixes)

    def decode(self) -> None:
        """One token for each request that is ready."""
        rows = self.ready()
        static = self.is_static()
        padding, new = self.padding(len(rows), static=static), self.words(len(rows))
        before = self.ints([len(r.tokens) for r in rows] + [0] * padding)
        grid = self.grid
        after = [[*r.tokens, token] for r, token in zip(rows, new, strict=True)]
        prefixes = [tokens if len(tokens) % grid == 0 else None for tokens in after]
        targets = self.targets(prefixes)
        by_rows, by_slots = self.named(rows, padding, static=static)
        resumes = not static and all(request.written for request in rows)
        batch = ForwardBatch.decode(
            by_rows,
            None if resumes and self.rng.random() < 0.2 else before,
            slots=by_slots,
            mamba_track_mask=decode_track_mask(before + 1, grid),
            mamba_track_indices=self.ints(targets + [-1] * padding),
        )
        self.forward(batch, [*after, *[None] * padding], static="decode" if static else "")
        for request, token in zip(rows, new, strict=True):
            request.tokens.append(token)
            request.written = True
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
        by_rows, by_slots = self.named(rows)
        batch = ForwardBatch.draft_extend(
            by_rows,
            self.ints([len(r.tokens) for r in rows]),
            count,
            self.ints(accepts, torch.int32),
            slots=by_slots,
            mamba_track_indices=self.ints(targets),
        )
        paths = [
            request.tokens + draft[: place + 1]
            for request, draft in zip(rows, drafts, strict=True)
            for place in range(count)
        ]
        self.forward(batch, paths)
        for request, draft, kept in zip(rows, drafts, accepts, strict=True):
            request.tokens += draft[: max(kept, 0)]
            request.written |= kept >= 0
        self.file("draft-extend", targets, prefixes)

    def speculate(self) -> None:
        """Verify, let other things happen, and commit: each is a step."""
        rows = self.ready()
        if not rows:
            return
        flight = self.verify(rows)
        self.in_flight = rows
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
        self.commit(flight)

    def verify(self, rows: list[Request]) -> Flight:
        """Run a verify step of these requests."""
        static = self.is_static()
        count = DRAFTS if static else self.rng.randint(1, DRAFTS)
        tree = self.trees and self.rng.random() < 0.5
        topk = self.spec.draft_topk if tree else 1
        parents = [grow_tree(self.rng.choice, count, topk) for _ in rows]
        drafts = [self.words(count) for _ in rows]
        padding = self.padding(len(rows), static=static)
        by_rows, by_slots = self.named(rows, padding, static=static)
        before = self.ints([len(r.tokens) for r in rows] + [0] * padding)
        roots = [[-1, *[0] * (count - 1)]] * padding
        batch = ForwardBatch.target_verify(
            by_rows,
            before,
            count,
            slots=by_slots,
            parents=torch.tensor([*parents, *roots], dtype=torch.int32, device=self.backend.device)
            if tree
            else None,
        )
        branches = [[_path(above, last) for last in range(count)] for above in parents]
        paths: list[list[int] | None] = [
            request.tokens + [draft[node] for node in branch]
            for request, draft, ends in zip(rows, drafts, branches, strict=True)
            for branch in ends
        ]
        kind = ("tree" if tree else "chain") if static else ""
        self.forward(batch, paths + [None] * (count * padding), static=kind)
        self.count("verify of trees" if tree else "verify of chains")
        names = by_rows if by_slots is None else by_slots
        assert names is not None
        return Flight(rows, names, before, drafts, branches, padding)

    def commit(self, flight: Flight) -> None:
        """Keep a random node of each row: what an engine derives from the accepted node ids."""
        rows, drafts = flight.rows, flight.drafts
        count = len(drafts[0])
        flat, lengths, kept = [], [], []
        for row, request in enumerate(rows):
            last = self.rng.randint(-1, count - 1)
            if request not in self.running:
                last = -1  # Its row or slot may belong to another request by now.
            nodes = flight.branches[row][last] if last >= 0 else []
            kept.append([drafts[row][node] for node in nodes])
            flat.append([row * count + node for node in nodes] + [-1] * (count - len(nodes)))
            lengths.append(len(nodes))
        padded = [[-1] * count] * flight.padding
        device = self.backend.device
        accept_index = torch.tensor(flat + padded, dtype=torch.int32, device=device)
        accept_lens = self.ints(lengths + [0] * flight.padding, torch.int32)
        prefixes = [
            self.crossed(request.tokens, tokens) if request in self.running else None
            for request, tokens in zip(rows, kept, strict=True)
        ]
        targets = self.targets(prefixes)
        self.backend.update_mamba_state_after_mtp_verify(
            verify_step_indices(accept_index, accept_lens, count),
            self.ints(targets + [-1] * flight.padding),
            crossing_steps(flight.before, accept_lens, self.grid, accept_index, count),
            flight.names,
        )
        for request, tokens in zip(rows, kept, strict=True):
            if request in self.running:
                request.tokens += tokens
                request.written |= bool(tokens)
        self.file("commit", targets, prefixes)

    @property
    def grid(self) -> int:
        """Distance of snapshots in tokens."""
        assert self.spec.track_grid is not None
        return self.spec.track_grid

    def crossed(self, tokens: list[int], kept: list[int]) -> list[int] | None:
        """Return the prefix at the newest snapshot boundary that the kept tokens reach."""
        length = (len(tokens) + len(kept)) // self.grid * self.grid
        return (tokens + kept)[:length] if length > len(tokens) else None

    def is_static(self) -> bool:
        """Whether the next step goes through a static batch."""
        return self._graphs and self.rng.random() < 0.6

    def padding(self, rows: int, *, static: bool) -> int:
        """Return how many padded rows the step has."""
        return ROWS + 1 - rows if static else self.rng.choice((0, 0, 1))

    def named(
        self, rows: Sequence[Request], padding: int = 0, *, static: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """Name rows by request rows or by slots; padded rows are the dummy, or own no slot."""
        if static or self.rng.random() < 0.7:
            names = [self.rng.choice([0, *self.unused_rows]) for _ in range(padding)]
            return self.ints([r.row for r in rows] + names), None
        names = [self.rng.choice((0, -1)) for _ in range(padding)]
        return None, self.ints([r.slot for r in rows] + names)

    def forward(
        self, batch: ForwardBatch, paths: Sequence[Sequence[int] | None], *, static: str = ""
    ) -> None:
        """Run one step and check its outputs.

        Args:
            batch: The step.
            paths: Each token with its past, None = padding.
            static: Run it through the static batch of this kind.
        """
        inputs = [self.inputs(layer, paths) for layer in range(self.spec.num_layers)]
        if static:
            self.count(f"static {static}")
            held = self._static.get(static)
            if held is None:
                held = self._static[static] = _Static(self, batch, inputs)
            outputs = held.run(batch, inputs)
        else:
            self.backend.init_forward_metadata(batch)
            outputs = [
                self.convolve(batch, layer, inputs[layer]) for layer in range(self.spec.num_layers)
            ]
        for layer, y in enumerate(outputs):
            for found, path in zip(y.tolist(), paths, strict=True):
                if path is not None:
                    expected = self.oracle.output(path, layer, self.spec.layer_dim(layer))
                    assert found == expected, (layer, batch.forward_mode, found, expected)

    def inputs(self, layer: int, paths: Sequence[Sequence[int] | None]) -> Tensor:
        """Return ``[T, D]`` inputs of one layer, all streams in parallel."""
        dim = self.spec.layer_dim(layer)
        values = [
            [self.oracle.input(path[-1] if path else PAD, layer, channel) for channel in range(dim)]
            for path in paths
        ]
        found = torch.tensor(values, dtype=torch.float32, device=self.backend.device)
        return found.reshape(len(paths), dim)

    def convolve(self, batch: ForwardBatch, layer: int, x: Tensor) -> Tensor:
        """Run the convolutions of one layer, ``[T, D]`` to ``[T, D]``."""
        names = [stream.name for stream in self.spec.layer_streams(layer)]
        parts = [self.spec.stream_slice(layer, name) for name in names]
        ys = self.backend.short_conv_group(
            [x[:, part.start : part.stop] for part in parts],
            [self.weights[layer][part.start : part.stop] for part in parts],
            layer_id=layer,
            streams=names,
            forward_batch=batch,
        )
        return torch.cat(ys, dim=1)

    def check(self) -> None:
        """Every live window is the oracle's, every free slot is untouched, no slot is lost."""
        self.steps += 1
        owned = {r.slot: r.tokens for r in self.running if r.written}
        owned |= {slot: list(prefix) for prefix, slot in self.snapshots.items()}
        fresh = [r.slot for r in self.running if not r.written]
        assert self.pool.live_slots() == sorted([*owned, *fresh])
        assert self.pool.num_free == SLOTS - len(owned) - len(fresh)
        for layer, state in enumerate(self.pool.layers):
            windows = time_axis(state.cpu(), self.spec.window_axis).tolist()
            for slot in range(1, SLOTS + 1):
                if slot in owned:
                    expected = self.oracle.window(owned[slot], layer, self.spec.layer_dim(layer))
                    assert windows[slot] == expected, (layer, slot, windows[slot], expected)
                else:
                    clean = all(math.isnan(value) for column in windows[slot] for value in column)
                    assert clean, f"slot {slot}, which nobody owns, was written"
        expected_rows = [0] + [-1] * ROWS
        for request in self.running:
            expected_rows[request.row] = request.slot
        assert self.pool.req_to_slot.tolist() == expected_rows


@dataclass(frozen=True)
class Flight:
    """A verify step whose commit is to come.

    Attributes:
        rows: Its requests.
        names: What its batch named its rows by, padding included.
        before: Tokens in each row's state.
        drafts: Tokens of each row.
        branches: Path to each node of each row.
        padding: Padded rows at its end.
    """

    rows: list[Request]
    names: Tensor
    before: Tensor
    drafts: list[list[int]]
    branches: list[list[list[int]]]
    padding: int


class _Static:
    """One kind of step on tensors that never move, captured on padded rows and then refilled."""

    def __init__(self, fuzzer: Fuzzer, batch: ForwardBatch, inputs: list[Tensor]) -> None:
        self._fuzzer = fuzzer
        rows = torch.zeros_like(fuzzer.ints([0] * batch.batch_size))
        zeros = torch.zeros_like(rows)
        if batch.forward_mode is ForwardMode.DECODE:
            self._batch = ForwardBatch.decode(
                rows,
                zeros,
                mamba_track_mask=zeros > 0,
                mamba_track_indices=zeros - 1,
            )
        else:
            parents = None if batch.parents is None else batch.parents.clone()
            self._batch = ForwardBatch.target_verify(
                rows, zeros, batch.tokens_per_row, parents=parents
            )
        self._inputs = [x.clone() for x in inputs]
        self._captured: Captured | None = None
        if fuzzer._capture is not None:
            fuzzer.backend.init_forward_metadata_out_graph(self._batch, in_capture=True)
            self._captured = fuzzer._capture(self._step)

    def _step(self) -> list[Tensor]:
        self._fuzzer.backend.init_forward_metadata_in_graph(self._batch)
        return [
            self._fuzzer.convolve(self._batch, layer, x) for layer, x in enumerate(self._inputs)
        ]

    def run(self, batch: ForwardBatch, inputs: list[Tensor]) -> list[Tensor]:
        """Refill the tensors and replay; without a capture, run the step."""
        load_into(self._batch, batch)
        for mine, x in zip(self._inputs, inputs, strict=True):
            mine.copy_(x)
        self._fuzzer.backend.init_forward_metadata_out_graph(self._batch)
        if self._captured is None:
            return self._step()
        self._captured.replay()
        outputs: list[Tensor] = self._captured.result
        return outputs


def _path(parents: Sequence[int], node: int) -> list[int]:
    return [*_path(parents, parents[node]), node] if node >= 0 else []
