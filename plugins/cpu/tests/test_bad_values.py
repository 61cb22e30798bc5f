"""Values that no shape gives away: trees that are none, negative lengths, ids past a table."""

from __future__ import annotations

import pytest
import torch

import sconv
from sconv.testing.steps import links_of

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


CHAIN, FORK, FAN = [-1, 0, 1], [-1, 0, 0], [-1, 0, 0, 0]


def links(parents: list[int]) -> dict[str, torch.Tensor]:
    child, sibling = links_of([parents], len(parents))
    return {"next_token": torch.tensor(child), "next_sibling": torch.tensor(sibling)}


def as_parents(parents: list[int]) -> dict[str, torch.Tensor]:
    return {"parents": torch.tensor([parents], dtype=torch.int32)}


@pytest.mark.parametrize("tree", [as_parents, links])
@pytest.mark.parametrize(
    ("topk", "parents", "refused"),
    [
        (1, CHAIN, None),
        (1, FORK, r"row 0 is a tree .*\[-1, 0, 0\], and the spec says chains"),
        (1, [-1, -1, 1], "the spec says chains"),
        (2, CHAIN, None),
        (2, FORK, None),
        (2, [-1, 0, 0, 1], None),
        (2, FAN, "the spec says 2 children of a node at most"),
        (3, FAN, None),
    ],
)
def test_a_tree_is_no_wider_than_the_spec_says(tree, topk, parents, refused):
    spec = _spec(max_draft_tokens=4, draft_topk=topk, window_layout="inputs")
    backend = sconv.load_backend("cpu", spec=spec)
    backend.pool.assign([1], backend.pool.alloc(1))
    count = len(parents)
    batch = sconv.ForwardBatch.target_verify(
        torch.tensor([1]), torch.tensor([3]), count, **tree(parents)
    )
    if refused is None:
        backend.init_forward_metadata(batch)
        return
    with pytest.raises(sconv.BatchError, match=refused):
        backend.init_forward_metadata(batch)


def test_a_padded_row_may_hold_any_tree(backend):
    """What is left in the rows that fill a graph's bucket says nothing of this step."""
    parents = torch.tensor([CHAIN, FORK, FORK], dtype=torch.int32)
    batch = sconv.ForwardBatch.target_verify(
        torch.tensor([1, 0, 3]), torch.tensor([3, 0, 0]), 3, parents=parents
    )
    backend.init_forward_metadata(batch)


def test_rows_of_another_object_may_be_the_same_step(backend):
    """An engine may describe a step anew, around its tensors or around copies of them."""
    rows = torch.tensor([1, 2])
    x, weight = torch.ones(2, D), torch.ones(D, K)

    def convolve(batch):
        return backend.short_conv(x, weight, layer_id=0, stream="conv", forward_batch=batch)

    backend.init_forward_metadata(sconv.ForwardBatch.decode(rows))
    convolve(sconv.ForwardBatch.decode(rows))
    convolve(sconv.ForwardBatch.decode(rows[:2]))
    convolve(sconv.ForwardBatch.decode(rows.to(torch.int32)))
    for lengths in ((1, 1), (2, 0)):
        step = sconv.ForwardBatch.extend(rows, torch.tensor(lengths), rows, num_tokens=2)
        other = sconv.ForwardBatch.extend(rows, torch.tensor([2, 0]), rows, num_tokens=2)
        backend.init_forward_metadata(step)
        if lengths == (2, 0):
            convolve(other)
            continue
        with pytest.raises(sconv.MetadataError, match="differ in their rows or lengths"):
            convolve(other)


@pytest.mark.parametrize(
    ("table", "row"), [(torch.tensor([0, 3, 1, 99]), 99), (lambda ids: ids + 5, 7)]
)
@pytest.mark.parametrize("by_rows", [False, True])
def test_a_table_that_leads_past_the_pool(table, row, by_rows):
    spec = _spec(max_draft_tokens=1, num_slots=3)
    layers = torch.zeros(1, 4, K - 1, D)
    pool = sconv.ConvStatePool.adopt(spec, layers, virtual_to_physical=table)
    backend = sconv.load_backend("cpu", spec=spec, pool=pool)
    last = 3 if row == 99 else 2
    pool.req_to_slot[1:3] = torch.tensor([1, last], dtype=torch.int32)
    ids = torch.tensor([1, 2]) if by_rows else torch.tensor([1, last])
    batch = sconv.ForwardBatch.decode(**{"req_pool_indices" if by_rows else "slots": ids})
    message = rf"virtual_to_physical gives row {row} of the pool .* rows 0 to 3"
    with pytest.raises(sconv.BatchError, match=message):
        backend.init_forward_metadata(batch)
    assert not layers.any()


def test_a_snapshot_table_that_leads_past_the_pool():
    spec = _spec(max_draft_tokens=1, num_slots=3)
    pool = sconv.ConvStatePool.adopt(
        spec, torch.zeros(1, 4, K - 1, D), virtual_to_physical=torch.tensor([0, 3, 1, 4])
    )
    backend = sconv.load_backend("cpu", spec=spec, pool=pool)
    batch = sconv.ForwardBatch.decode(
        slots=torch.tensor([1]), mamba_track_indices=torch.tensor([3])
    )
    with pytest.raises(sconv.BatchError, match="virtual_to_physical gives row 4"):
        backend.init_forward_metadata(batch)


@pytest.mark.parametrize("adopted", [False, True])
@pytest.mark.parametrize("halves", [False, True], ids=["eager", "halves"])
def test_type_1_request_rows_that_lead_past_the_pool(adopted, halves):
    """An engine writes them itself, so they may name what the tensors do not have."""
    spec = _spec(max_draft_tokens=1, num_slots=3)
    pool = sconv.ConvStatePool.adopt(spec, torch.zeros(1, 4, K - 1, D)) if adopted else None
    backend = sconv.load_backend("cpu", spec=spec, pool=pool)
    backend.init_graph_state(2, 2)
    backend.pool.req_to_slot[1] = 4
    prepare = backend.init_forward_metadata
    if halves:
        prepare = backend.init_forward_metadata_out_graph
    with pytest.raises(sconv.BatchError, match=r"req_to_slot gives row 4 .* rows 0 to 3"):
        prepare(sconv.ForwardBatch.decode(torch.tensor([1])))


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
    with pytest.raises(sconv.BatchError, match="holds -1: expected 0 to"):
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


TOO_LARGE = {
    "tokens of an extend": lambda one: sconv.ForwardBatch.extend(one, one, one, num_tokens=2**40),
    "tokens of a mixed": lambda one: sconv.ForwardBatch.mixed(one, one, one, num_tokens=2**31),
    "tokens without a number": lambda one: sconv.ForwardBatch.extend(one, one, one, num_tokens=-1),
    "tokens of a draft-extend": lambda one: sconv.ForwardBatch.draft_extend(one, one, 2**40, one),
    "tokens of a verify": lambda one: sconv.ForwardBatch.target_verify(one, one, 2**40),
    "idle rows": lambda one: sconv.ForwardBatch.idle(2**40),
    "a length": lambda one: sconv.ForwardBatch.extend(one, one * 2**40, one),
    "lengths whose sum overflows": lambda one: sconv.ForwardBatch.extend(
        one.repeat(2), (one * 2**62).repeat(2), one.repeat(2)
    ),
    "lengths that add up to more": lambda one: sconv.ForwardBatch.extend(
        one.repeat(3), (one * (2**31 - 1)).repeat(3), one.repeat(3)
    ),
    "a prefix": lambda one: sconv.ForwardBatch.extend(one, one, one * 2**40),
    "a state's length": lambda one: sconv.ForwardBatch.decode(one, one * 2**62),
}


@pytest.mark.parametrize("halves", [False, True], ids=["eager", "halves"])
@pytest.mark.parametrize("case", TOO_LARGE)
def test_err_5_a_step_too_large_leaves_the_prepared_one(backend, case, halves):
    backend.init_graph_state(4, 16)
    backend.init_forward_metadata(sconv.ForwardBatch.decode(torch.tensor([1])))
    prepared = backend.forward_metadata
    batch = TOO_LARGE[case](torch.tensor([1]))
    prepare = backend.init_forward_metadata
    if halves:
        prepare = backend.init_forward_metadata_out_graph
    with pytest.raises(sconv.SconvError, match=r"expected|too few|takes|keeps windows"):
        prepare(batch)
    assert backend.forward_metadata is prepared


def test_err_5_a_step_for_which_there_is_no_memory(backend, monkeypatch):
    backend.init_forward_metadata(sconv.ForwardBatch.decode(torch.tensor([1])))
    prepared = backend.forward_metadata
    batch = sconv.ForwardBatch.extend(
        torch.tensor([1]), torch.tensor([1]), torch.tensor([0]), num_tokens=1 << 30
    )

    def refuse(*shape, **_):
        raise RuntimeError(f"cannot allocate {shape}")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        with pytest.raises(sconv.BatchError, match=r"no memory .* 1073741824 tokens"):
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
