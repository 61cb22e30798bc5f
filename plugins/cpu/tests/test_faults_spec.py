"""Verify, rollback and commit: faults that other systems had, with the inputs that show them.

Names carry the id of the entry in docs/reference/known-faults.md. Outputs read as digits: 4321 is
token 4 after the window [1, 2, 3]. An entry's accept count a is the commit's index a - 1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sconv
from sconv import (
    Available,
    Backend,
    BackendInfo,
    BatchError,
    Capabilities,
    ForwardBatch,
    MetadataError,
    SpecError,
    load_backend,
)
from sconv.engine.loading import check_spec
from sconv.testing.digits import (
    digit_inputs,
    digit_spec,
    digit_weight,
    fill_pool,
    read_window,
    run_digits,
)
from sconv.testing.harness import assert_same_bits


def cpu(**options: Any) -> Backend:
    return load_backend("cpu", spec=digit_spec(**{"max_draft_tokens": 3, **options}))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def verify(backend: Backend, rows: list[int], tokens: list[int], **tree: Tensor) -> list[int]:
    per_row = len(tokens) // len(rows)
    batch = ForwardBatch.target_verify(ints(*rows), ints(*[3] * len(rows)), per_row, **tree)
    return run_digits(backend, batch, tokens)


def commit(backend: Backend, last: list[int], rows: list[int], **track: Tensor) -> None:
    backend.update_mamba_state_after_mtp_verify(ints(*last), req_pool_indices=ints(*rows), **track)


def declares(**capabilities: Any) -> BackendInfo:
    return BackendInfo(
        "npu",
        "npu",
        (1, 0),
        "nowhere:create",
        lambda: Available(1),
        capabilities=Capabilities(**capabilities),
    )


@pytest.mark.parametrize(
    ("accepted", "window", "following"),
    [(1, [2, 3, 4], 7432), (2, [3, 4, 5], 7543), (3, [4, 5, 6], 7654)],
)
def test_spec_1_a_rejected_draft_leaves_plain_decoding_unchanged(
    accepted: int, window: list[int], following: int
) -> None:
    backend = cpu()
    fill_pool(backend.pool, {5: [1, 2, 3]}, {2: 5})
    assert verify(backend, [2], [4, 5, 6]) == [4321, 5432, 6543]
    commit(backend, [accepted - 1], [2])
    assert read_window(backend.pool, 5) == window
    assert run_digits(backend, ForwardBatch.decode(ints(2)), [7]) == [following]


def test_spec_1_and_8_speculation_is_refused_where_nothing_can_be_rolled_back() -> None:
    spec = digit_spec(max_draft_tokens=3)
    assert Capabilities().rollback is False
    with pytest.raises(SpecError, match=r"'npu'.*rollback, which max_draft_tokens=3 needs"):
        check_spec(declares(), spec)
    check_spec(declares(rollback=True), spec)
    check_spec(declares(), digit_spec())


def test_spec_3_a_forgotten_commit_keeps_nothing_and_breaks_nothing() -> None:
    backend = cpu()
    fill_pool(backend.pool, {5: [1, 2, 3]}, {2: 5})
    before = backend.pool.layers[0].clone()
    assert verify(backend, [2], [4, 5, 6]) == [4321, 5432, 6543]
    assert verify(backend, [2], [4, 8, 9]) == [4321, 8432, 9843]
    assert_same_bits(backend.pool.layers[0], before, "the pool after two verify steps")


def test_spec_3_an_observer_sees_a_worker_that_never_commits() -> None:
    class Balance:
        verified = committed = 0

        @sconv.hookimpl(wrapper=True)
        def init_forward_metadata(self, forward_batch: ForwardBatch) -> Any:
            self.verified += forward_batch.forward_mode is sconv.ForwardMode.TARGET_VERIFY
            return (yield)

        @sconv.hookimpl(wrapper=True)
        def update_mamba_state_after_mtp_verify(self) -> Any:
            self.committed += 1
            return (yield)

    backend, balance = cpu(), Balance()
    backend.add_observer(balance)
    fill_pool(backend.pool, {5: [1, 2, 3]}, {2: 5})
    verify(backend, [2], [4, 5, 6])
    commit(backend, [0], [2])
    assert (balance.verified, balance.committed) == (1, 1)
    verify(backend, [2], [4, 5, 6])
    assert (balance.verified, balance.committed) == (2, 1)


@pytest.mark.parametrize("index", [-1, -2, 3, 2**31])
def test_spec_5_a_count_outside_of_the_step_changes_nothing(index: int) -> None:
    """Accept 0 is index -1; the others are no node of the step. The other row is kept as asked."""
    backend = cpu()
    fill_pool(backend.pool, {5: [1, 2, 3], 3: [1, 2, 3]}, {2: 5, 7: 3})
    before = backend.pool.layers[0].clone()
    verify(backend, [2, 7], [4, 5, 6, 4, 5, 6])
    commit(backend, [index, 2], [2, 7])
    others = [row for row in range(backend.pool.num_rows) if row != 3]
    assert_same_bits(backend.pool.layers[0][others], before[others], "all slots but the kept row's")
    assert read_window(backend.pool, 3) == [4, 5, 6]
    assert run_digits(backend, ForwardBatch.decode(ints(2, 7)), [7, 7]) == [7321, 7654]


TREE = torch.tensor([[-1, 0, 0]], dtype=torch.int32)
LINKS = {"next_token": torch.tensor([[1, -1, -1]]), "next_sibling": torch.tensor([[-1, 2, -1]])}


@pytest.mark.parametrize("tree", [{"parents": TREE}, LINKS], ids=["parents", "links"])
def test_spec_6_a_tree_is_committed_by_node(tree: dict[str, Tensor]) -> None:
    backend = cpu(draft_topk=2)
    fill_pool(backend.pool, {5: [1, 2, 3]}, {2: 5})
    assert verify(backend, [2], [4, 5, 6], **tree) == [4321, 5432, 6432]
    commit(backend, [2], [2])
    assert read_window(backend.pool, 5) == [3, 4, 6]


def test_spec_6_a_chain_is_not_read_as_a_tree_for_its_breadth() -> None:
    backend = cpu(draft_topk=2)
    fill_pool(backend.pool, {5: [1, 2, 3]}, {2: 5})
    assert verify(backend, [2], [4, 5, 6]) == [4321, 5432, 6543]


def test_spec_6_a_backend_without_trees_refuses_them() -> None:
    with pytest.raises(SpecError, match=r"'npu'.*trees, which draft_topk=2 needs"):
        check_spec(declares(rollback=True), digit_spec(max_draft_tokens=3, draft_topk=2))


def test_spec_7_a_whole_step_is_rolled_back() -> None:
    backend = cpu()
    fill_pool(backend.pool, {5: [1, 2, 3]}, {2: 5})
    before = backend.pool.layers[0].clone()
    verify(backend, [2], [4, 5, 6])
    commit(backend, [-1], [2])
    assert_same_bits(backend.pool.layers[0], before, "the pool")


def test_spec_7_more_than_is_kept_cannot_be_asked_for() -> None:
    backend = cpu()
    fill_pool(backend.pool, {5: [1, 2, 3]}, {2: 5})
    batch = ForwardBatch.target_verify(ints(2), ints(3), 4)
    with pytest.raises(BatchError, match=r"draft_token_num=4.*max_draft_tokens=3"):
        backend.init_forward_metadata(batch)
    with pytest.raises(BatchError, match="max_draft_tokens=1 means no speculation"):
        cpu(max_draft_tokens=1).init_forward_metadata(
            ForwardBatch.target_verify(ints(2), ints(3), 1)
        )


def test_spec_7_a_refused_step_leaves_the_one_in_flight() -> None:
    """Nor may it change how the rows of that one are named, or how many tokens each has."""
    backend = cpu()
    backend.init_graph_state(2, 6)
    fill_pool(backend.pool, {5: [1, 2, 3]}, {2: 5})
    verify(backend, [2], [4, 5, 6])
    wrong = ForwardBatch.target_verify(slots=ints(99), seq_lens=ints(3), draft_token_num=1)
    with pytest.raises(BatchError, match="slots holds 99"):
        backend.init_forward_metadata(wrong)
    rows = ints(*[2] * 3)
    large = ForwardBatch.target_verify(slots=rows, seq_lens=rows, draft_token_num=1)
    with pytest.raises(sconv.GraphBufferError, match=r"max_bs=2, .*need max_bs=3"):
        backend.init_forward_metadata_out_graph(large)
    commit(backend, [2], [2])
    assert read_window(backend.pool, 5) == [4, 5, 6]


def test_spec_10_a_stale_count_reaches_no_other_slot() -> None:
    """A request has one slot here, not a table of blocks: counts index nothing but the step."""
    backend = cpu()
    fill_pool(backend.pool, {5: [1, 2, 3], 6: [4, 5, 6], 0: [8, 8, 8]}, {2: 5, 3: 6})
    before = backend.pool.layers[0].clone()
    verify(backend, [2, 3, 0], [4, 5, 7, 8, 1, 1])
    commit(backend, [2, 3, 1], [2, 3, 0])
    assert_same_bits(backend.pool.layers[0], before, "the pool")
    with pytest.raises(BatchError, match="the commit has 4 rows, the last verify step had 3"):
        commit(backend, [0, 0, 0, 0], [2, 3, 0, 4])
    assert_same_bits(backend.pool.layers[0], before, "the pool")


def test_spec_11_all_parts_of_a_state_are_rolled_back() -> None:
    """Two streams of two layers; each equals a run of the accepted prefix from scratch."""
    options = {"num_layers": 2, "streams": ("a", "b"), "dim": 3}
    parts = [(layer_id, stream) for layer_id in range(2) for stream in ("a", "b")]

    def feed(backend: Backend, batch: ForwardBatch, tokens: list[int]) -> None:
        backend.init_forward_metadata(batch)
        for number, (layer_id, stream) in enumerate(parts):
            run_digits(
                backend,
                batch,
                [token + number for token in tokens],
                layer_id=layer_id,
                stream=stream,
                prepare=False,
            )

    def state(backend: Backend) -> list[list[int]]:
        pool = backend.pool
        return [read_window(pool, 5, layer_id=layer, stream=name) for layer, name in parts]

    def prompt(tokens: list[int]) -> Backend:
        backend = cpu(**options)
        fill_pool(backend.pool, {}, {2: 5})
        feed(backend, ForwardBatch.extend(ints(2), ints(len(tokens)), ints(0)), tokens)
        return backend

    backend = prompt([1, 2, 3])
    before = state(backend)
    feed(backend, ForwardBatch.target_verify(ints(2), ints(3), 3), [4, 5, 6])
    commit(backend, [0], [2])
    kept = state(backend)
    assert kept == state(prompt([1, 2, 3, 4]))
    everything = state(prompt([1, 2, 3, 4, 5, 6]))
    for part, old, full in zip(kept, before, everything, strict=True):
        assert part not in (old, full)


@pytest.mark.parametrize("others", [[6, 7, 8], [6, 7, 8, 9, 10]], ids=["fewer", "as many"])
def test_spec_12_a_commit_after_another_forward_finds_its_own_slots(others: list[int]) -> None:
    backend = cpu(num_slots=10, max_requests=10)
    pool = backend.pool
    mine = [1, 2, 3, 4, 5]
    fill_pool(
        pool,
        {slot: [1, 2, 3] for slot in mine + others},
        {**{slot: 11 - slot for slot in range(1, 11)}},
    )
    rows = [11 - slot for slot in mine]
    verify(backend, rows, [4, 5, 6] * 5)
    backend.init_forward_metadata(ForwardBatch.decode(ints(*[11 - slot for slot in others])))
    commit(backend, [0, 1, 2, 0, 1], rows)
    windows = {0: [2, 3, 4], 1: [3, 4, 5], 2: [4, 5, 6]}
    for slot, last in zip(mine, [0, 1, 2, 0, 1], strict=True):
        assert read_window(pool, slot) == windows[last]
    for slot in others:
        assert read_window(pool, slot) == [1, 2, 3]


def test_spec_12_request_rows_cannot_be_left_out() -> None:
    backend = cpu()
    with pytest.raises(TypeError, match="req_pool_indices"):
        backend.update_mamba_state_after_mtp_verify(ints(0))  # type: ignore[call-arg]


def test_spec_12_slots_are_looked_up_at_the_commit() -> None:
    """A request may have moved, or left and given its slot to another, since its verify step."""
    backend = cpu()
    pool = backend.pool
    pool.alloc(8)
    fill_pool(pool, {5: [1, 2, 3], 6: [1, 2, 3]}, {2: 5, 3: 6})
    verify(backend, [2, 3], [4, 5, 6, 4, 5, 6])
    pool.free(5)
    _, given_on = pool.alloc(2).tolist()
    assert given_on == 5
    pool.assign(4, given_on)
    pool.assign(3, 8)
    fill = pool.layers[0].clone()
    commit(backend, [2, 1], [2, 3])
    assert read_window(pool, 8) == [3, 4, 5]
    untouched = [slot for slot in range(pool.num_rows) if slot != 8]
    assert_same_bits(pool.layers[0][untouched], fill[untouched], "all slots but the one that moved")


def test_spec_12_a_commit_needs_a_verify_step() -> None:
    backend = cpu()
    fill_pool(backend.pool, {5: [1, 2, 3]}, {2: 5})
    before = backend.pool.layers[0].clone()
    run_digits(backend, ForwardBatch.extend(ints(2), ints(0), ints(3)), [])
    with pytest.raises(MetadataError, match="no verify step was prepared"):
        commit(backend, [0], [2])
    assert_same_bits(backend.pool.layers[0], before, "the pool")


def test_fewer_draft_tokens_than_the_most() -> None:
    """The windows keep their stride of max_draft_tokens; a shorter step uses their start."""
    backend = cpu(max_draft_tokens=5)
    fill_pool(backend.pool, {5: [1, 2, 3], 3: [4, 5, 6]}, {2: 5, 7: 3})
    assert verify(backend, [2, 7], [4, 5, 7, 8]) == [4321, 5432, 7654, 8765]
    commit(backend, [2, 1], [2, 7])
    assert (read_window(backend.pool, 5), read_window(backend.pool, 3)) == ([1, 2, 3], [6, 7, 8])


def test_a_snapshot_of_a_tree_node_is_taken_with_the_commit() -> None:
    backend = cpu(draft_topk=2)
    fill_pool(backend.pool, {5: [1, 2, 3], 8: [0, 0, 0]}, {2: 5})
    verify(backend, [2], [4, 5, 6], parents=TREE)
    commit(backend, [2], [2], mamba_track_indices=ints(8), mamba_steps_to_track=ints(0))
    assert (read_window(backend.pool, 5), read_window(backend.pool, 8)) == ([3, 4, 6], [2, 3, 4])


def test_a_row_that_keeps_nothing_is_not_snapshot() -> None:
    backend = cpu()
    fill_pool(backend.pool, {5: [1, 2, 3], 8: [0, 0, 0]}, {2: 5})
    verify(backend, [2], [4, 5, 6])
    commit(backend, [-1], [2], mamba_track_indices=ints(8), mamba_steps_to_track=ints(0))
    assert read_window(backend.pool, 8) == [0, 0, 0]


def test_snapshots_of_a_commit_name_both_slots_and_nodes() -> None:
    backend = cpu()
    fill_pool(backend.pool, {5: [1, 2, 3]}, {2: 5})
    verify(backend, [2], [4, 5, 6])
    before = backend.pool.layers[0].clone()
    with pytest.raises(BatchError, match="come together"):
        commit(backend, [0], [2], mamba_track_indices=ints(8))
    with pytest.raises(BatchError, match="come together"):
        commit(backend, [0], [2], mamba_steps_to_track=ints(0))
    assert_same_bits(backend.pool.layers[0], before, "the pool")


@pytest.mark.parametrize("keep", [-1, 0, 2])
def test_wide_and_narrow_streams_commit_together(keep: int) -> None:
    backend = cpu(streams=("a", "b"), dim=7)
    fill_pool(backend.pool, {5: [1, 2, 3]}, {2: 5})
    batch = ForwardBatch.target_verify(ints(2), ints(3), 3)
    backend.init_forward_metadata(batch)
    for stream, shift in (("a", 0), ("b", 3)):
        backend.short_conv(
            digit_inputs([4 + shift, 5 + shift, 6 + shift], 7),
            digit_weight(7),
            layer_id=0,
            stream=stream,
            forward_batch=batch,
        )
    commit(backend, [keep], [2])
    for stream, shift in (("a", 0), ("b", 3)):
        drafts = [4 + shift, 5 + shift, 6 + shift]
        window = ([1, 2, 3] + [token % 10 for token in drafts])[keep + 1 : keep + 4]
        for channel in (0, 6):
            assert read_window(backend.pool, 5, stream=stream, channel=channel) == window
