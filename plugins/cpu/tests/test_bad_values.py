"""Values that no shape gives away: trees that are none, negative lengths, ids past a table."""

from __future__ import annotations

import pytest
import torch

import sconv

K, D = 4, 8


def _spec(**changes) -> sconv.StateSpec:
    values = {
        "num_layers": 1,
        "streams": [sconv.Stream("conv", D)],
        "kernel_size": K,
        "num_slots": 6,
        "max_requests": 6,
        "dtype": torch.float32,
        "max_draft_tokens": 3,
    }
    return sconv.StateSpec(**(values | changes))


@pytest.fixture
def backend() -> sconv.Backend:
    backend = sconv.load_backend("cpu", spec=_spec())
    backend.pool.assign([1, 2], backend.pool.alloc(5)[[4, 2]])
    return backend


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([-1, 2, 1], "holds 2 for node 1"),  # a cycle
        ([-1, 1, 0], "holds 1 for node 1"),  # its own parent
        ([0, 0, 1], "holds 0 for node 0"),  # no root
        ([-1, 0, 7], "holds 7 for node 2"),
        ([-1, -5, 0], "holds -5 for node 1"),
    ],
)
def test_a_graph_that_is_no_tree_in_topological_order_is_refused(backend, parents, message):
    batch = sconv.ForwardBatch.target_verify(
        torch.tensor([1]), torch.tensor([3]), 3, parents=torch.tensor([parents], dtype=torch.int32)
    )
    with pytest.raises(sconv.BatchError, match=message):
        backend.init_forward_metadata(batch)


@pytest.mark.parametrize(
    "batch",
    [
        lambda one: sconv.ForwardBatch.decode(one, -one),
        lambda one: sconv.ForwardBatch.target_verify(one, -one, 2),
        lambda one: sconv.ForwardBatch.draft_extend(one, -one, 2, one),
        lambda one: sconv.ForwardBatch.extend(one, one, -one),
    ],
    ids=["decode", "verify", "draft-extend", "extend"],
)
def test_a_negative_length_is_refused(backend, batch):
    with pytest.raises(sconv.BatchError, match="holds -1: expected 0 or more"):
        backend.init_forward_metadata(batch(torch.tensor([1])))


def test_a_token_count_that_is_no_int_is_refused_and_the_prepared_step_stays(backend):
    backend.init_forward_metadata(sconv.ForwardBatch.decode(torch.tensor([1])))
    prepared = backend.forward_metadata
    batch = sconv.ForwardBatch.extend(
        torch.tensor([1]), torch.tensor([2]), torch.tensor([0]), num_tokens=2.0
    )
    with pytest.raises(sconv.BatchError, match=r"num_tokens=2\.0: expected an int"):
        backend.init_forward_metadata(batch)
    assert backend.forward_metadata is prepared


def test_a_commit_skips_ids_that_the_table_of_an_adopted_pool_does_not_have():
    spec = _spec()
    state = torch.arange(7.0 * 3 * D).view(1, 7, 3, D)
    pool = sconv.ConvStatePool.adopt(
        spec, state.clone(), virtual_to_physical=torch.tensor([0, 5, -1, 2])
    )
    backend = sconv.load_backend("cpu", spec=spec, pool=pool)
    batch = sconv.ForwardBatch.target_verify(None, None, 2, slots=torch.tensor([1, 3]))
    backend.init_forward_metadata(batch)
    x = torch.ones(4, D)
    backend.short_conv(x, torch.ones(D, K), layer_id=0, stream="conv", forward_batch=batch)
    backend.update_mamba_state_after_mtp_verify(
        torch.tensor([0, 0]),
        torch.tensor([77, -1]),
        torch.tensor([0, 0]),
        torch.tensor([1, 99]),
    )
    expected = state.clone()
    expected[0, 5] = torch.cat([state[0, 5, 1:], torch.ones(1, D)])
    assert torch.equal(pool.layers[0], expected[0])
