"""When values are checked, and the checks that no backend reaches by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sconv import BatchError, ConvStatePool, ForwardBatch, GraphBufferError, StateSpec, Stream
from sconv.checks import check_batch, check_commit, check_request_rows, checks_values, strict
from sconv.errors import MetadataError

CPU, META = torch.device("cpu"), torch.device("meta")
SPEC = StateSpec(
    num_layers=1,
    streams=[Stream("a", 2)],
    kernel_size=4,
    num_slots=6,
    max_requests=4,
    max_draft_tokens=2,
)


def ids(*values: int, device: torch.device = CPU) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@pytest.mark.parametrize(("value", "on"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_switch(value: str | None, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCONV_CHECK", raising=False)
    if value is not None:
        monkeypatch.setenv("SCONV_CHECK", value)
    assert strict() is on
    assert checks_values(META) is on
    assert checks_values(CPU)


def test_values_on_a_device_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading one there would be a sync; a meta tensor has none to read."""
    monkeypatch.delenv("SCONV_CHECK", raising=False)
    pool = ConvStatePool(SPEC, META)
    rows = torch.empty(2, dtype=torch.int64, device=META)
    check_batch(ForwardBatch.decode(rows), SPEC, pool, 4)
    check_batch(ForwardBatch.decode(slots=rows), SPEC, pool, 4)
    with pytest.raises(BatchError, match="req_pool_indices is on cpu, the state is on meta"):
        check_batch(ForwardBatch.decode(ids(1)), SPEC, pool, 4)


def test_rows_may_share_the_dummy_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ConvStatePool(SPEC)
    pool.req_to_slot[1:] = torch.tensor([3, 3, -1, -1], dtype=torch.int32)
    shared = ForwardBatch.decode(ids(1, 2))
    monkeypatch.setenv("SCONV_CHECK", "0")
    check_batch(shared, SPEC, pool, 4)
    monkeypatch.setenv("SCONV_CHECK", "1")
    with pytest.raises(BatchError, match=r"two rows of the batch have one slot: \[3, 3\]"):
        check_batch(shared, SPEC, pool, 4)
    check_batch(ForwardBatch.decode(ids(0, 0, 3, 4)), SPEC, pool, 4)


def test_a_shared_slot_is_found_behind_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCONV_CHECK", "1")
    pool = ConvStatePool.adopt(
        SPEC,
        torch.zeros(1, 7, 3, 2, dtype=SPEC.dtype),
        virtual_to_physical=ids(0, 5, 5, 2),
    )
    with pytest.raises(BatchError, match=r"one slot: \[5, 5\]"):
        check_batch(ForwardBatch.decode(slots=ids(1, 2)), SPEC, pool, 4)
    check_batch(ForwardBatch.decode(slots=ids(1, 3)), SPEC, pool, 4)


def test_virtual_ids_are_bounded_by_their_table() -> None:
    state = torch.zeros(1, 7, 3, 2, dtype=SPEC.dtype)
    long = ConvStatePool.adopt(SPEC, state, virtual_to_physical=ids(*[0] * 30))
    check_batch(ForwardBatch.decode(slots=ids(29)), SPEC, long, 4)
    with pytest.raises(BatchError, match="slots holds 30: expected -1 to 29"):
        check_batch(ForwardBatch.decode(slots=ids(30)), SPEC, long, 4)
    any_id = ConvStatePool.adopt(SPEC, state, virtual_to_physical=lambda known: known % 7)
    check_batch(ForwardBatch.decode(slots=ids(1000)), SPEC, any_id, 4)


def test_an_engines_windows_bound_a_verify_step() -> None:
    pool = ConvStatePool.adopt(
        SPEC,
        torch.zeros(1, 7, 3, 2, dtype=SPEC.dtype),
        windows=[torch.zeros(2, 2, 3, 2, dtype=SPEC.dtype)],
    )
    check_batch(ForwardBatch.target_verify(ids(1, 2), ids(3, 3), 2), SPEC, pool, 4)
    with pytest.raises(GraphBufferError, match="have rows=2, need rows=3"):
        check_batch(ForwardBatch.target_verify(ids(1, 2, 3), ids(3, 3, 3), 2), SPEC, pool, 4)


@pytest.mark.parametrize("bad", [-1, 5])
def test_request_rows_have_a_range(bad: int) -> None:
    check_request_rows(ids(0, 4), SPEC)
    with pytest.raises(BatchError, match=f"req_pool_indices holds {bad}: expected 0 to 4"):
        check_request_rows(ids(2, bad), SPEC)


def test_a_commit_is_bounded_by_the_verify_step() -> None:
    pool = ConvStatePool(SPEC)

    def commit(rows: int, tokens: int, verified: int) -> None:
        check_commit(
            rows,
            pool,
            tokens,
            verified,
            last_correct_step_indices=ids(*[0] * rows),
            mamba_track_indices=None,
            mamba_steps_to_track=None,
            req_pool_indices=ids(*[1] * rows),
        )

    commit(2, 2, 3)
    commit(0, 2, 3)
    with pytest.raises(BatchError, match="the commit has 4 rows, the last verify step had 3"):
        commit(4, 2, 3)
    with pytest.raises(MetadataError, match="nothing to commit"):
        commit(2, 0, 0)
