"""When values are checked, and what is refused by value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sconv import (
    CONTRACT_VERSION,
    Available,
    BackendInfo,
    BatchError,
    ConvStatePool,
    ForwardBatch,
    StateSpec,
    Stream,
)
from sconv.engine.checked import checks_state
from sconv.engine.loading import hold
from sconv.step.batch_checks import check_batch
from sconv.step.value_checks import check_undefined, values_are_checked
from sconv.testing.digits import fill_pool, read_window
from sconv.torch_backend.backend import TorchBackend

INFO = BackendInfo("plain", "cpu", CONTRACT_VERSION, "nowhere:create", Available)
CPU, META = torch.device("cpu"), torch.device("meta")
SPEC = StateSpec(
    num_layers=1,
    streams=[Stream("a", 2)],
    kernel_size=4,
    num_slots=6,
    max_requests=4,
    max_draft_tokens=2,
    track_interval=4,
    chunk_size=2,
)


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(("value", "on"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_switch(value: str | None, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCONV_CHECK", raising=False)
    if value is not None:
        monkeypatch.setenv("SCONV_CHECK", value)
    assert checks_state() is on
    assert not values_are_checked(META)
    assert values_are_checked(CPU)


def test_values_on_a_device_are_not_read() -> None:
    """Reading one there would be a sync; a meta tensor has none to read."""
    pool = ConvStatePool(SPEC, META)
    rows = torch.empty(2, dtype=torch.int64, device=META)
    check_batch(ForwardBatch.decode(rows), SPEC, pool, 4)
    check_batch(ForwardBatch.decode(slots=rows), SPEC, pool, 4)
    with pytest.raises(BatchError, match="req_pool_indices is on cpu, the state is on meta"):
        check_batch(ForwardBatch.decode(ids(1)), SPEC, pool, 4)


def test_rows_may_share_the_dummy_and_nothing_else() -> None:
    pool = ConvStatePool(SPEC)
    pool.req_to_slot[1:] = torch.tensor([3, 3, -1, -1], dtype=torch.int32)
    shared = ForwardBatch.decode(ids(1, 2))
    check_batch(shared, SPEC, pool, 4)
    with pytest.raises(BatchError, match=r"two rows of the batch have one slot: \[3, 3\]"):
        check_undefined(shared, pool)
    check_undefined(ForwardBatch.decode(ids(0, 0, 3, 4)), pool)


def test_a_shared_slot_is_found_behind_a_table() -> None:
    pool = ConvStatePool.adopt(
        SPEC,
        torch.zeros(1, 7, 3, 2, dtype=SPEC.dtype),
        virtual_to_physical=ids(0, 5, 5, 2),
    )
    with pytest.raises(BatchError, match=r"one slot: \[5, 5\]"):
        check_undefined(ForwardBatch.decode(slots=ids(1, 2)), pool)
    check_undefined(ForwardBatch.decode(slots=ids(1, 3)), pool)


def test_virtual_ids_are_bounded_by_their_table() -> None:
    state = torch.zeros(1, 7, 3, 2, dtype=SPEC.dtype)
    long = ConvStatePool.adopt(SPEC, state, virtual_to_physical=ids(*[0] * 30))
    check_batch(ForwardBatch.decode(slots=ids(29)), SPEC, long, 4)
    with pytest.raises(BatchError, match="slots holds 30: expected -1 to 29"):
        check_batch(ForwardBatch.decode(slots=ids(30)), SPEC, long, 4)
    any_id = ConvStatePool.adopt(SPEC, state, virtual_to_physical=lambda known: known % 7)
    check_batch(ForwardBatch.decode(slots=ids(1000)), SPEC, any_id, 4)


@pytest.mark.parametrize("bad", [-1, 5])
def test_request_rows_have_a_range(bad: int) -> None:
    pool = ConvStatePool(SPEC)
    pool.check_request_rows(ids(0, 4))
    with pytest.raises(BatchError, match=f"req_pool_indices holds {bad}: expected 0 to 4"):
        pool.check_request_rows(ids(2, bad))


def tracked(kind: str, slots: Tensor, targets: Tensor, **options: Any) -> ForwardBatch:
    """A step of rows that hold 3 tokens, snapshot into these slots."""
    held = torch.full_like(slots, 3)
    common = {"slots": slots, "mamba_track_indices": targets, **options}
    match kind:
        case "decode":
            return ForwardBatch.decode(None, held, **common)
        case "extend":
            return ForwardBatch.extend(None, held - 1, held, **common)
        case "mixed":
            return ForwardBatch.mixed(None, held - 1, held, **common)
        case _:
            return ForwardBatch.draft_extend(None, held, 2, held - 2, **common)


KINDS = ("decode", "extend", "mixed", "draft_extend")


@pytest.mark.parametrize("kind", KINDS)
def test_two_snapshots_in_one_slot_are_refused(kind: str) -> None:
    pool = ConvStatePool(SPEC)
    with pytest.raises(BatchError, match=r"snapshot into one slot: \[5, 5\]. Give each snapshot"):
        check_undefined(tracked(kind, ids(1, 2), ids(5, 5)), pool)
    check_undefined(tracked(kind, ids(1, 2), ids(5, 6)), pool)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own", [1, 2], ids=["its own", "a neighbour's"])
def test_a_snapshot_in_a_slot_of_the_batch_is_refused(kind: str, own: int) -> None:
    pool = ConvStatePool(SPEC)
    with pytest.raises(BatchError, match=rf"snapshots go to slots \[{own}\], which rows of this"):
        check_undefined(tracked(kind, ids(1, 2), ids(own, -1)), pool)


def test_snapshots_that_are_not_due_may_name_any_slot() -> None:
    """Masked rows, rows without a slot, lengths of -1, rows without tokens, nothing crossed."""
    pool = ConvStatePool(SPEC)
    masked = torch.tensor([True, False])
    check_undefined(tracked("decode", ids(1, 2), ids(5, 5), mamba_track_mask=masked), pool)
    check_undefined(tracked("decode", ids(1, -1), ids(5, 5)), pool)
    check_undefined(tracked("decode", ids(1, 2), ids(0, 0)), pool)
    lengths = ids(4, -1)
    check_undefined(tracked("extend", ids(1, 2), ids(5, 1), mamba_track_seqlens=lengths), pool)
    empty = ForwardBatch.extend(
        None, ids(1, 0), ids(3, 3), slots=ids(1, 2), mamba_track_indices=ids(5, 5)
    )
    check_undefined(empty, pool)
    before = ForwardBatch.draft_extend(
        None, ids(3, 1), 2, ids(1, 2), slots=ids(1, 2), mamba_track_indices=ids(5, 5)
    )
    check_undefined(before, pool)


@pytest.mark.parametrize("length", [-2, 0, 2, 6])
def test_a_snapshot_at_a_length_outside_of_the_row_is_refused(length: int) -> None:
    pool = ConvStatePool(SPEC)
    says = rf"mamba_track_seqlens holds {length} for row 1: expected 3 to 5, the lengths"
    batch = tracked("extend", ids(1, 2), ids(5, 6), mamba_track_seqlens=ids(4, length))
    with pytest.raises(BatchError, match=says):
        check_undefined(batch, pool)
    for inside in (3, 5, -1):
        lengths = ids(4, inside)
        batch = tracked("extend", ids(1, 2), ids(5, 6), mamba_track_seqlens=lengths)
        check_undefined(batch, pool)


@pytest.mark.parametrize("function", [False, True], ids=["table", "function"])
def test_slots_are_compared_as_the_pool_numbers_them(function: bool) -> None:
    """Ids 1 and 2 are one row of the pool; 4 is nothing."""
    table = ids(0, 5, 5, 2, -1, 3)
    pool = ConvStatePool.adopt(
        SPEC,
        torch.zeros(1, 7, 3, 2, dtype=SPEC.dtype),
        virtual_to_physical=(lambda known: table[known]) if function else table,
    )
    with pytest.raises(BatchError, match=r"one slot: \[5, 5\]"):
        check_undefined(ForwardBatch.decode(slots=ids(1, 2)), pool)
    with pytest.raises(BatchError, match=r"snapshot into one slot: \[5, 5\]"):
        check_undefined(tracked("decode", ids(3, 5), ids(1, 2)), pool)
    with pytest.raises(BatchError, match=r"snapshots go to slots \[5\]"):
        check_undefined(tracked("decode", ids(1, 3), ids(2, -1)), pool)
    check_undefined(tracked("decode", ids(3, 5), ids(4, 4)), pool)


@pytest.mark.parametrize(
    "refused",
    [
        ForwardBatch.decode(slots=ids(3, 3)),
        tracked("decode", ids(2, 3), ids(5, 5)),
        tracked("decode", ids(2, 3), ids(3, -1)),
        tracked("extend", ids(2, 3), ids(5, 6), mamba_track_seqlens=ids(9, 4)),
    ],
    ids=["one slot", "one target", "a live target", "a length"],
)
def test_a_refused_batch_changes_nothing(
    refused: ForwardBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCONV_CHECK", "1")
    made = TorchBackend(spec=SPEC, device=CPU, pool=None)
    backend = hold(made, INFO, SPEC)
    backend.init_graph_state(2, 8)
    windows = {2: [1, 2, 3], 3: [4, 5, 6], 5: [7, 8, 9]}
    fill_pool(backend.pool, windows)
    slots = ids(2, 3)
    backend.init_forward_metadata(ForwardBatch.target_verify(None, slots, 2, slots=slots))
    before = backend.forward_metadata
    with pytest.raises(BatchError):
        backend.init_forward_metadata(refused)
    with pytest.raises(BatchError):
        backend.init_forward_metadata_out_graph(refused)
    assert backend.forward_metadata is before
    assert (made.verify_tokens, made.verify_rows) == (2, 2)
    assert {slot: read_window(backend.pool, slot) for slot in windows} == windows
    monkeypatch.setenv("SCONV_CHECK", "0")
    hold(made, INFO, SPEC).init_forward_metadata(refused)
