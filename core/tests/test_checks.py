"""The checks of host facts that no backend reaches by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sconv import BatchError, ConvStatePool, ForwardBatch, GraphBufferError, StateSpec, Stream
from sconv.errors import MetadataError
from sconv.step.batch_checks import check_batch, check_commit

SPEC = StateSpec(
    num_layers=1,
    streams=[Stream("a", 2)],
    kernel_size=4,
    num_slots=6,
    max_requests=4,
    max_draft_tokens=2,
)


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_an_engines_windows_bound_a_verify_step() -> None:
    pool = ConvStatePool.adopt(
        SPEC,
        torch.zeros(1, 7, 3, 2, dtype=SPEC.dtype),
        windows=[torch.zeros(2, 2, 3, 2, dtype=SPEC.dtype)],
    )
    check_batch(ForwardBatch.target_verify(ids(1, 2), ids(3, 3), 2), SPEC, pool, 4)
    with pytest.raises(GraphBufferError, match="have rows=2, need rows=3"):
        check_batch(ForwardBatch.target_verify(ids(1, 2, 3), ids(3, 3, 3), 2), SPEC, pool, 4)


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
