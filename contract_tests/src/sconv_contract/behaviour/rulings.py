"""The rulings on the edges, on inputs whose outputs read as digits: 4321 is token 4 after 1 2 3."""

# The names of the tests say what they ask.
# ruff: noqa: D102

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sconv
from sconv import BatchError, ForwardBatch, MetadataError, SpecError
from sconv.testing.digits import (
    digit_inputs,
    digit_weight,
    fill_pool,
    read_window,
    run_digits,
)
from sconv.testing.harness import Harness, assert_same_bits
from sconv.testing.steps import Step, rows_of

from .rule_marks import keeps
from .subject import Subject

__all__ = ["Rulings"]


def ints(backend: sconv.Backend, *values: int) -> Tensor:
    """Return a ``[B]`` int64 tensor on the backend's device."""
    return torch.tensor(values, dtype=torch.int64, device=backend.device)


def extend(backend: sconv.Backend, slots: Tensor, lengths: Tensor, before: Tensor) -> ForwardBatch:
    """Return an extend step by slots."""
    return ForwardBatch.extend(None, lengths, before, slots=slots)


class Rulings:
    """Tests of :class:`sconv_contract.BackendContract`."""

    @keeps("SCV421")
    def test_rows_without_a_slot_read_and_write_nothing(self, subject: Subject) -> None:
        backend = subject.digits(max_draft_tokens=2 if subject.can.rollback else 1)
        fill_pool(backend.pool, {3: [1, 2, 3]})
        before = [layer.clone() for layer in backend.pool.layers]
        none = ints(backend, -1, -1)
        one = ints(backend, 1, 1)
        batches = [
            ForwardBatch.decode(slots=none),
            extend(backend, none, one, one),
            ForwardBatch.draft_extend(None, one, 1, one, slots=none),
        ]
        if subject.can.rollback:
            batches.append(ForwardBatch.target_verify(None, one, 1, slots=none))
        for batch in batches:
            assert run_digits(backend, batch, [5, 6]) == [0, 0]
        for layer, old in zip(backend.pool.layers, before, strict=True):
            assert_same_bits(layer[1:], old[1:], "state")

    @keeps("SCV421")
    def test_padded_rows_leave_their_neighbours_alone(self, subject: Subject) -> None:
        backend = subject.digits()
        fill_pool(backend.pool, {0: [0, 0, 0], 3: [1, 2, 3], 5: [4, 5, 6]}, {2: 5, 6: 3})
        batch = ForwardBatch.decode(ints(backend, 6, 0, 2, 4))
        y = run_digits(backend, batch, [4, 9, 7, 8])
        assert (y[0], y[2], y[3]) == (4321, 7654, 0)
        assert read_window(backend.pool, 3) == [2, 3, 4]
        assert read_window(backend.pool, 5) == [5, 6, 7]

    @keeps("SCV422")
    def test_rows_of_no_tokens_change_nothing(self, subject: Subject) -> None:
        backend = subject.digits()
        fill_pool(backend.pool, {3: [1, 2, 3], 5: [4, 5, 6], 7: [7, 8, 9]})
        slots = ints(backend, 3, 5, 7)
        batch = extend(backend, slots, ints(backend, 0, 1, 0), ints(backend, 3, 3, 0))
        assert run_digits(backend, batch, [7]) == [7654]
        assert [read_window(backend.pool, slot) for slot in (3, 5, 7)] == [
            [1, 2, 3],
            [5, 6, 7],
            [7, 8, 9],
        ]

    @keeps("SCV422")
    def test_empty_batches_are_legal(self, subject: Subject) -> None:
        backend = subject.digits(max_draft_tokens=2 if subject.can.rollback else 1)
        fill_pool(backend.pool, {3: [1, 2, 3]})
        none = ints(backend)
        batches = [
            ForwardBatch.idle(),
            ForwardBatch.decode(slots=none),
            extend(backend, none, none, none),
            extend(backend, ints(backend, 3), ints(backend, 0), ints(backend, 3)),
            ForwardBatch.draft_extend(None, none, 1, none, slots=none),
        ]
        if subject.can.rollback:
            batches.append(ForwardBatch.target_verify(None, none, 2, slots=none))
        for batch in batches:
            assert run_digits(backend, batch, []) == []
        if subject.can.rollback:
            backend.update_mamba_state_after_mtp_verify(none, req_pool_indices=none)
        assert read_window(backend.pool, 3) == [1, 2, 3]

    @keeps("SCV423")
    def test_a_stale_slot_never_reaches_an_output(self, subject: Subject) -> None:
        """Everything is NaN but the row that runs."""
        backend = subject.digits()
        fill_pool(backend.pool, {3: [1, 2, 3]})
        slots = ints(backend, 3, 6)
        batch = extend(backend, slots, ints(backend, 1, 2), ints(backend, 3, 0))
        assert run_digits(backend, batch, [4, 5, 6]) == [4321, 5000, 6500]
        assert read_window(backend.pool, 6) == [0, 5, 6]
        assert run_digits(backend, ForwardBatch.decode(slots=ints(backend, -1)), [4]) == [0]

    @keeps("SCV424")
    def test_a_skipped_commit_loses_nothing(self, subject: Subject) -> None:
        backend = subject.digits(max_draft_tokens=3)
        fill_pool(backend.pool, {3: [1, 2, 3]})
        slots = ints(backend, 3)
        batch = ForwardBatch.target_verify(None, ints(backend, 3), 3, slots=slots)
        assert run_digits(backend, batch, [4, 5, 6]) == [4321, 5432, 6543]
        assert read_window(backend.pool, 3) == [1, 2, 3]
        assert run_digits(backend, ForwardBatch.decode(slots=slots), [7]) == [7321]

    @keeps("SCV406")
    @pytest.mark.parametrize(
        ("last", "window"), [(-1, [1, 2, 3]), (0, [2, 3, 4]), (1, [3, 4, 5]), (2, [4, 5, 6])]
    )
    def test_the_last_kept_index_counts_from_the_root(
        self, subject: Subject, last: int, window: list[int]
    ) -> None:
        backend = subject.digits(max_draft_tokens=3)
        fill_pool(backend.pool, {3: [1, 2, 3]}, {2: 3})
        rows = ints(backend, 2)
        run_digits(backend, ForwardBatch.target_verify(rows, ints(backend, 3), 3), [4, 5, 6])
        backend.update_mamba_state_after_mtp_verify(ints(backend, last), req_pool_indices=rows)
        assert read_window(backend.pool, 3) == window

    @keeps("SCV406")
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
    def test_a_commit_counts_in_either_int(self, subject: Subject, dtype: torch.dtype) -> None:
        backend = subject.digits(max_draft_tokens=3)
        fill_pool(backend.pool, {3: [1, 2, 3], 5: [4, 5, 6]}, {2: 3, 4: 5})
        rows = ints(backend, 2, 4)
        batch = ForwardBatch.target_verify(rows, ints(backend, 3, 3), 3)
        run_digits(backend, batch, [4, 5, 6, 7, 8, 9])
        backend.update_mamba_state_after_mtp_verify(
            ints(backend, 1, 2).to(dtype),
            ints(backend, 7, 8),
            ints(backend, 0, -1).to(dtype),
            req_pool_indices=rows,
        )
        found = [read_window(backend.pool, slot) for slot in (3, 5, 7)]
        assert found == [[3, 4, 5], [7, 8, 9], [2, 3, 4]]
        assert torch.isnan(backend.pool.conv(0, "a")[8]).all()

    @keeps("SCV425")
    def test_the_commit_looks_slots_up_when_it_is_called(self, subject: Subject) -> None:
        """Between verify and commit another batch runs, and one request leaves."""
        backend = subject.digits(max_draft_tokens=2)
        windows = {3: [1, 2, 3], 5: [4, 5, 6], 7: [7, 8, 9]}
        fill_pool(backend.pool, windows, {1: 3, 2: 5, 4: 7})
        rows, lengths = ints(backend, 1, 2), ints(backend, 3, 3)
        run_digits(backend, ForwardBatch.target_verify(rows, lengths, 2), [4, 5, 7, 8])
        run_digits(backend, ForwardBatch.decode(ints(backend, 4)), [1])
        backend.pool.req_to_slot[2] = -1
        backend.update_mamba_state_after_mtp_verify(ints(backend, 1, 1), req_pool_indices=rows)
        found = {slot: read_window(backend.pool, slot) for slot in windows}
        assert found == {3: [3, 4, 5], 5: [4, 5, 6], 7: [8, 9, 1]}

    @keeps("SCV413")
    def test_a_node_reads_its_ancestors(self, subject: Subject) -> None:
        backend = subject.digits(max_draft_tokens=4, draft_topk=2)
        fill_pool(backend.pool, {3: [1, 2, 3]}, {2: 3})
        rows = ints(backend, 2)
        parents = torch.tensor([[-1, 0, 0, 1]], dtype=torch.int32, device=backend.device)
        batch = ForwardBatch.target_verify(rows, ints(backend, 3), 4, parents=parents)
        assert run_digits(backend, batch, [4, 5, 6, 7]) == [4321, 5432, 6432, 7543]
        backend.update_mamba_state_after_mtp_verify(ints(backend, 2), req_pool_indices=rows)
        assert read_window(backend.pool, 3) == [3, 4, 6]

    @keeps("SCV426")
    def test_results_do_not_depend_on_the_neighbours(self, subject: Subject) -> None:
        live = [9, 2, 7, 4, 11]
        step = Step(
            sconv.ForwardMode.EXTEND,
            slots=tuple(live),
            lengths=(3, 1, 5, 2, 4),
            before=(0, 3, 5, 0, 9),
            by_slots=True,
        )
        results: dict[int, list[tuple[Tensor, Tensor]]] = {slot: [] for slot in live}
        for order in ([0, 1, 2, 3, 4], [3, 1], [4, 2, 0], [2]):
            spec = sconv.StateSpec(
                num_layers=1,
                streams=[sconv.Stream("a", 13)],
                kernel_size=4,
                num_slots=12,
                max_requests=9,
            )
            backend = subject.build(subject.fit(spec))
            harness = Harness(backend, seed=4, live=live, activation="silu")
            tokens = [
                torch.randn(
                    (length, 13),
                    generator=torch.Generator("cpu").manual_seed(row),
                    dtype=torch.float32,
                    device="cpu",
                )
                for row, length in enumerate(step.lengths)
            ]
            part = rows_of(step, order)
            batch = harness.batch(part)
            backend.init_forward_metadata(batch)
            x = torch.cat([tokens[row] for row in order]).to(backend.device)
            y = harness.convolve(batch, {(0, "a"): x})[0, "a"]
            for row, mine in zip(order, torch.split(y, list(part.lengths)), strict=True):
                state = backend.pool.conv(0, "a")[live[row]].clone()
                results[live[row]].append((mine, state))
        for slot, runs in results.items():
            for y, state in runs[1:]:
                assert_same_bits(y, runs[0][0], f"outputs of slot {slot}")
                assert_same_bits(state, runs[0][1], f"state of slot {slot}")

    @keeps("SCV427")
    def test_a_wrong_argument_is_refused_before_anything_changes(self, subject: Subject) -> None:
        backend = subject.digits()
        fill_pool(backend.pool, {3: [1, 2, 3]})
        batch = ForwardBatch.decode(slots=ints(backend, 3))
        with pytest.raises(MetadataError):
            backend.conv_state_metadata(0, batch)
        backend.init_forward_metadata(batch)
        device = backend.device
        x, weight = digit_inputs([4], device=device), digit_weight(device=device)
        wrong: list[dict[str, Any]] = [
            {"x": digit_inputs([4, 5], device=device)},
            {"x": digit_inputs([4], dim=2, device=device)},
            {"x": x.to(torch.int64)},
            {"weight": weight[:, :3]},
            {"bias": torch.zeros(2, dtype=torch.float32, device=device)},
            {"activation": "gelu"},
            {"stream": "b"},
            {"layer_id": 1},
        ]
        for change in wrong:
            given: dict[str, Any] = {"x": x, "weight": weight, "layer_id": 0, "stream": "a"}
            with pytest.raises((BatchError, SpecError)):
                backend.short_conv(forward_batch=batch, **(given | change))
        assert read_window(backend.pool, 3) == [1, 2, 3]
        many = ints(backend, *range(1, backend.spec.max_requests + 2))
        with pytest.raises(BatchError):
            backend.init_forward_metadata(ForwardBatch.decode(slots=many))
        assert backend.conv_state_metadata(0, batch).num_tokens == 1

    @keeps("SCV430")
    def test_a_snapshot_is_the_window_at_its_length(self, subject: Subject) -> None:
        backend = subject.digits(track_interval=4)
        fill_pool(backend.pool, {3: [1, 2, 3], 5: [4, 5, 6]})
        slots, targets = ints(backend, 3, 5), ints(backend, 7, 8)
        batch = ForwardBatch.extend(
            None,
            ints(backend, 3, 3),
            ints(backend, 3, 3),
            slots=slots,
            mamba_track_indices=targets,
            mamba_track_seqlens=ints(backend, 4, -1),
        )
        run_digits(backend, batch, [4, 5, 6, 7, 8, 9])
        assert read_window(backend.pool, 7) == [2, 3, 4]
        assert torch.isnan(backend.pool.conv(0, "a")[8]).all()
        mask = torch.tensor([False, True], dtype=torch.bool, device=backend.device)
        batch = ForwardBatch.decode(slots=slots, mamba_track_mask=mask, mamba_track_indices=targets)
        run_digits(backend, batch, [7, 1])
        assert read_window(backend.pool, 7) == [2, 3, 4]
        assert read_window(backend.pool, 8) == [8, 9, 1]
