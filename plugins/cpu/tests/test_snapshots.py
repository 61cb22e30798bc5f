"""Prefix-cache snapshots: one grid and one convention in every mode.

A snapshot labelled n is the window after exactly n tokens. Whatever modes a request goes through,
the newest snapshot it has is the one at the last multiple of the grid that it passed.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from sconv import (
    BatchError,
    ForwardBatch,
    StateSpec,
    Stream,
    crossing_steps,
    decode_track_mask,
    load_backend,
    verify_step_indices,
)
from sconv.testing.digits import digit_spec, fill_pool, read_window, run_digits
from sconv.testing.harness import assert_same_bits

WIDTH, DRAFTS = 4, 4
#: Two layers, three convolutions, of different widths.
CONVOLUTIONS = ((0, "k", 3), (0, "v", 2), (1, "k", 3))


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


class Run:
    """Requests that advance together, each with a live slot and a snapshot slot."""

    def __init__(self, seed: int, rows: int) -> None:
        self.rng = random.Random(seed)
        self.spec = StateSpec(
            num_layers=2,
            streams=[[Stream("k", 3), Stream("v", 2)], [Stream("k", 3)]],
            kernel_size=WIDTH,
            num_slots=2 * rows,
            max_requests=rows,
            dtype=torch.float32,
            max_draft_tokens=DRAFTS,
            draft_topk=DRAFTS,
            track_interval=6,
            chunk_size=4,
        )
        assert self.spec.track_grid == 12
        self.grid = 12
        self.backend = load_backend("cpu", spec=self.spec)
        for layer in self.backend.pool.layers:
            layer.fill_(float("nan"))
        slots = list(range(1, 2 * rows + 1))
        self.rng.shuffle(slots)
        self.slots, self.targets = slots[:rows], slots[rows:]
        #: Inputs of every row of every convolution.
        self.inputs: list[list[list[Tensor]]] = [[[] for _ in CONVOLUTIONS] for _ in slots[:rows]]

    @property
    def lengths(self) -> list[int]:
        return [len(row[0]) for row in self.inputs]

    def forward(self, batch: ForwardBatch, tokens: int) -> list[Tensor]:
        self.backend.init_forward_metadata(batch)
        found = []
        for layer_id, stream, dim in CONVOLUTIONS:
            x = torch.randn(tokens, dim)
            self.backend.short_conv(
                x,
                torch.randn(dim, WIDTH),
                layer_id=layer_id,
                stream=stream,
                forward_batch=batch,
            )
            found.append(x)
        return found

    def take(self, xs: list[Tensor], lengths: list[int], kept: list[list[int]]) -> None:
        """Append tokens ``kept[row]`` of each row to its inputs."""
        for number, x in enumerate(xs):
            for row, part in enumerate(x.split(lengths)):
                self.inputs[row][number] += [part[token] for token in kept[row]]

    def extend(self) -> None:
        before = self.lengths
        lengths = [self.rng.choice((0, 1, 3, 14, 26)) for _ in self.slots]
        ends = [old + new for old, new in zip(before, lengths, strict=True)]
        points = [end // self.grid * self.grid for end in ends]
        wanted = [point if point > old else -1 for point, old in zip(points, before, strict=True)]
        batch = ForwardBatch.extend(
            None,
            ints(lengths),
            ints(before),
            slots=ints(self.slots),
            num_tokens=sum(lengths),
            mamba_track_indices=ints(self.targets),
            mamba_track_seqlens=ints(wanted),
        )
        xs = self.forward(batch, sum(lengths))
        self.take(xs, lengths, [list(range(length)) for length in lengths])

    def decode(self) -> None:
        before = ints(self.lengths)
        batch = ForwardBatch.decode(
            None,
            before,
            slots=ints(self.slots),
            mamba_track_mask=decode_track_mask(before + 1, self.grid),
            mamba_track_indices=ints(self.targets),
        )
        xs = self.forward(batch, len(self.slots))
        self.take(xs, [1] * len(self.slots), [[0]] * len(self.slots))

    def draft_extend(self) -> None:
        accepts = [self.rng.randint(0, DRAFTS) for _ in self.slots]
        batch = ForwardBatch.draft_extend(
            None,
            ints(self.lengths),
            DRAFTS,
            ints(accepts),
            slots=ints(self.slots),
            mamba_track_indices=ints(self.targets),
        )
        xs = self.forward(batch, DRAFTS * len(self.slots))
        self.take(xs, [DRAFTS] * len(self.slots), [list(range(count)) for count in accepts])

    def verify(self) -> None:
        """A tree whose accepted path skips nodes, so that a count is not a node."""
        rows, before = len(self.slots), ints(self.lengths)
        paths = [
            [0, *sorted(self.rng.sample(range(1, DRAFTS), self.rng.randint(0, DRAFTS - 1)))]
            for _ in self.slots
        ]
        parents = torch.full((rows, DRAFTS), -1, dtype=torch.int32)
        for row, path in enumerate(paths):
            for node in range(1, DRAFTS):
                parents[row, node] = path[path.index(node) - 1] if node in path else 0
        batch = ForwardBatch.target_verify(
            None, before, DRAFTS, slots=ints(self.slots), parents=parents
        )
        xs = self.forward(batch, DRAFTS * rows)
        accept_index = torch.full((rows, DRAFTS), -1)
        for row, path in enumerate(paths):
            accept_index[row, : len(path)] = ints(path) + row * DRAFTS
        accept_lens = ints([len(path) for path in paths])
        self.backend.update_mamba_state_after_mtp_verify(
            verify_step_indices(accept_index, accept_lens, DRAFTS),
            ints(self.targets),
            crossing_steps(before, accept_lens, self.grid, accept_index, DRAFTS),
            req_pool_indices=ints(self.slots),
        )
        self.take(xs, [DRAFTS] * rows, paths)

    def assert_snapshots(self) -> None:
        for row, length in enumerate(self.lengths):
            point = length // self.grid * self.grid
            for number, (layer_id, stream, dim) in enumerate(CONVOLUTIONS):
                state = self.backend.pool.conv(layer_id, stream)
                history = [torch.zeros(dim)] * (WIDTH - 1) + self.inputs[row][number]
                if length:
                    window = torch.stack(history[-(WIDTH - 1) :])
                    assert_same_bits(state[self.slots[row]], window, f"window of row {row}")
                snapshot = state[self.targets[row]]
                if point:
                    window = torch.stack(history[point : point + WIDTH - 1])
                    assert_same_bits(snapshot, window, f"snapshot {point} of row {row}")
                else:
                    assert bool(snapshot.isnan().all())


@pytest.mark.parametrize("seed", range(10))
def test_the_newest_snapshot_is_the_last_grid_point(seed: int) -> None:
    run = Run(seed, rows=3)
    run.extend()
    while not all(run.lengths):
        run.extend()
    for _ in range(25):
        run.rng.choice((run.extend, run.decode, run.draft_extend, run.verify))()
        run.assert_snapshots()
    assert max(run.lengths) > 4 * run.grid


def test_a_mask_chooses_rows_and_a_slot_of_minus_one_is_none() -> None:
    backend = load_backend("cpu", spec=digit_spec())
    windows = {slot: [slot, slot, slot] for slot in range(1, 10)}
    fill_pool(backend.pool, windows)
    batch = ForwardBatch.decode(
        slots=ints([1, 2, 3, -1]),
        mamba_track_mask=torch.tensor([True, False, True, True]),
        mamba_track_indices=ints([7, 8, -1, 9]),
    )
    assert run_digits(backend, batch, [5, 5, 5, 5]) == [5111, 5222, 5333, 0]
    snapshots = {slot: read_window(backend.pool, slot) for slot in (7, 8, 9)}
    assert snapshots == {7: [1, 1, 5], 8: [8, 8, 8], 9: [9, 9, 9]}
    meta = backend.conv_state_metadata(0, batch)
    assert meta.track_cache_indices.tolist() == [7, -1, -1, -1]
    assert meta.track_conv_indices.tolist() == [[0, 0, 0]] * 4


@pytest.mark.parametrize("length", range(-1, 12))
def test_an_extend_is_snapshot_at_any_length_of_its_own(length: int) -> None:
    """Prefix 4, 5 new tokens: lengths 4 to 9 are in the step, 4 being the old window."""
    backend = load_backend("cpu", spec=digit_spec())
    fill_pool(backend.pool, {3: [2, 3, 4], 8: [0, 0, 0]})
    batch = ForwardBatch.extend(
        None,
        ints([2, 5]),
        ints([0, 4]),
        slots=ints([6, 3]),
        num_tokens=7,
        mamba_track_indices=ints([-1, 8]),
        mamba_track_seqlens=ints([-1, length]),
    )
    run_digits(backend, batch, [9, 9, 5, 6, 7, 8, 9])
    inside = 4 <= length <= 9
    expected = [length - 2, length - 1, length] if inside else [0, 0, 0]
    assert read_window(backend.pool, 8) == expected
    meta = backend.conv_state_metadata(0, batch)
    assert meta.track_cache_indices.tolist() == [-1, 8 if inside else -1]
    if inside:
        taken = length - 4
        old_then_new = [-3, -2, -1, 2, 3, 4, 5, 6]
        assert meta.track_conv_indices[1].tolist() == old_then_new[taken : taken + 3]


def test_without_lengths_an_extend_is_snapshot_at_its_end() -> None:
    backend = load_backend("cpu", spec=digit_spec())
    fill_pool(backend.pool, {3: [2, 3, 4]})
    batch = ForwardBatch.extend(
        None, ints([2]), ints([4]), slots=ints([3]), mamba_track_indices=ints([8])
    )
    run_digits(backend, batch, [5, 6])
    assert read_window(backend.pool, 8) == read_window(backend.pool, 3) == [4, 5, 6]


def test_a_draft_extend_without_a_grid_takes_no_snapshot() -> None:
    backend = load_backend("cpu", spec=digit_spec())
    fill_pool(backend.pool, {3: [2, 3, 4], 8: [0, 0, 0]})
    batch = ForwardBatch.draft_extend(
        None, ints([3]), 3, ints([3]), slots=ints([3]), mamba_track_indices=ints([8])
    )
    run_digits(backend, batch, [5, 6, 7])
    assert read_window(backend.pool, 8) == [0, 0, 0]


def test_a_mask_without_slots_is_refused() -> None:
    backend = load_backend("cpu", spec=digit_spec())
    batch = ForwardBatch.decode(slots=ints([3]), mamba_track_mask=torch.tensor([True]))
    with pytest.raises(BatchError, match="mamba_track_indices is missing"):
        backend.init_forward_metadata(batch)
    batch = ForwardBatch.extend(
        None, ints([1]), ints([0]), slots=ints([3]), mamba_track_seqlens=ints([1])
    )
    with pytest.raises(BatchError, match="mamba_track_indices is missing"):
        backend.init_forward_metadata(batch)
