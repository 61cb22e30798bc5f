"""Lines of which each could be changed alone without a test of its feature turning red."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sconv import (
    Available,
    Backend,
    BackendInfo,
    Capabilities,
    ConvStatePool,
    ForwardBatch,
    HybridBackend,
    MetadataError,
    SlotError,
    StateSpec,
    Stream,
)
from sconv.engine.loading import build
from sconv.step.value_checks import check_undefined
from sconv.testing.digits import digit_spec, fill_pool, read_window, run_digits

INFO = BackendInfo(
    "plain",
    "cpu",
    (1, 0),
    "sconv.torch_backend.backend:TorchBackend",
    lambda: Available(1),
    Capabilities(window_layouts=("dense", "inputs", "dedup"), trees=True, rollback=True),
)
TREE = [-1, 0, 0]


def ids(*values: int) -> Tensor:
    return torch.tensor(values)


def backend_of(layout: str = "dense", **changes: Any) -> Backend:
    spec = StateSpec(
        **{
            "num_layers": 1,
            "streams": [Stream("a", 1)],
            "kernel_size": 4,
            "num_slots": 6,
            "max_requests": 4,
            "dtype": torch.float32,
            "max_draft_tokens": 3,
            "draft_topk": 2,
            "window_layout": layout,
            **changes,
        }
    )
    return build(INFO, spec=spec)


@pytest.mark.parametrize("adopted", [False, True])
def test_mut_1_the_dummy_slot_is_nobodys(adopted: bool) -> None:
    spec = digit_spec()
    pool = ConvStatePool(spec)
    if adopted:
        pool = ConvStatePool.adopt(spec, torch.zeros(1, 10, 3, 1))
    with pytest.raises(SlotError, match=r"assign: slot 0 is outside 1\.\.9"):
        pool.assign(1, 0)
    assert int(pool.req_to_slot[1]) == -1


def test_mut_1_rows_of_other_strides_are_other_rows() -> None:
    """They begin at one address, and have one shape and dtype."""
    rows = ids(1, 2, 3)
    near, far = ForwardBatch.decode(rows[:2]), ForwardBatch.decode(rows[::2])
    assert not near.is_same_step(far, values=False)
    assert near.is_same_step(ForwardBatch.decode(rows[:2]), values=False)


def test_mut_1_another_tree_is_another_step() -> None:
    backend = backend_of()
    fill_pool(backend.pool, {2: [1, 2, 3]}, {1: 2})

    def batch(parents: list[int]) -> ForwardBatch:
        tree = torch.tensor([parents], dtype=torch.int32)
        return ForwardBatch.target_verify(ids(1), ids(3), 3, parents=tree)

    backend.init_forward_metadata(batch(TREE))
    assert run_digits(backend, batch(TREE), [4, 5, 6], prepare=False) == [4321, 5432, 6432]
    for other in (batch([-1, 0, 1]), ForwardBatch.target_verify(ids(1), ids(3), 3)):
        with pytest.raises(MetadataError, match="differ in their rows or lengths"):
            run_digits(backend, other, [4, 5, 6], prepare=False)


@pytest.mark.parametrize("layout", ["dense", "inputs"])
def test_mut_1_a_snapshot_of_a_tree_is_the_window_of_its_node(layout: str) -> None:
    backend = backend_of(layout)
    pool = backend.pool
    fill_pool(pool, {2: [1, 2, 3], 5: [9, 9, 9]}, {1: 2})
    tree = torch.tensor([TREE], dtype=torch.int32)
    batch = ForwardBatch.target_verify(ids(1), ids(3), 3, parents=tree)
    assert run_digits(backend, batch, [4, 5, 6]) == [4321, 5432, 6432]
    backend.update_mamba_state_after_mtp_verify(ids(0), ids(5), ids(2), ids(1))
    assert (read_window(pool, 2), read_window(pool, 5)) == ([2, 3, 4], [3, 4, 6])


def test_mut_1_a_commit_skips_a_slot_past_the_pool() -> None:
    backend = backend_of()
    pool = backend.pool
    fill_pool(pool, {2: [1, 2, 3], 3: [4, 5, 6]})
    batch = ForwardBatch.target_verify(None, ids(3, 3), 2, slots=ids(2, 3))
    run_digits(backend, batch, [4, 5, 7, 8])
    backend.update_mamba_state_after_mtp_verify(ids(1, 1), None, None, ids(2, 7))
    assert (read_window(pool, 2), read_window(pool, 3)) == ([3, 4, 5], [4, 5, 6])


def test_mut_1_a_row_without_tokens_is_due_no_snapshot() -> None:
    """Its target may be another's, or a slot of the batch, and its length any."""
    pool = ConvStatePool(digit_spec(track_interval=4))
    for targets in (ids(5, 5), ids(5, 1)):
        for lengths in (None, ids(4, 9)):
            batch = ForwardBatch.extend(
                None,
                ids(1, 0),
                ids(3, 3),
                slots=ids(1, 2),
                mamba_track_indices=targets,
                mamba_track_seqlens=lengths,
            )
            check_undefined(batch, pool)


class FullAttention:
    """A side whose own protocols are not the hybrid's."""

    __cuda_array_interface__ = "of the full-attention side"
    page_size = 64

    def hook(self, *_: object, **__: object) -> None:
        """Do nothing."""

    init_forward_metadata = init_forward_metadata_out_graph = hook
    init_forward_metadata_in_graph = init_graph_state = init_cuda_graph_state = hook
    update_mamba_state_after_mtp_verify = hook
    forward_metadata = None


def test_mut_1_a_protocol_of_the_full_attention_side_is_not_the_hybrids() -> None:
    hybrid: Any = HybridBackend(FullAttention(), backend_of())
    assert hybrid.page_size == 64
    assert not hasattr(hybrid, "__cuda_array_interface__")
