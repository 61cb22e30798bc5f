"""Parents and taps of draft trees against plain walks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from sconv.errors import BatchError
from sconv.step.draft_tree import ancestor_taps, parents_from_links


def taps_by_walking(parents: list[int], kernel_size: int) -> list[list[int]]:
    """Walk from every node to the root and on through the window; fails below column 0."""
    window = kernel_size - 1
    taps = []
    for node in range(len(parents)):
        path = [window + node]
        while len(path) < kernel_size:
            here = path[0]
            if here >= window:
                parent = parents[here - window]
                inside = 0 <= parent < len(parents)
                path.insert(0, window + parent if inside else window - 1)
            else:
                assert here > 0, "a tap fell off the window"
                path.insert(0, here - 1)
        taps.append(path)
    return taps


def links_of(parents: list[int], order: list[int]) -> tuple[list[int], list[int]]:
    """First-child and next-sibling links; children come in the given order."""
    first = [-1] * len(parents)
    sibling = [-1] * len(parents)
    last_child: dict[int, int] = {}
    for node in order:
        parent = parents[node]
        if parent >= 0 and parent not in last_child:
            first[parent] = node
        elif parent in last_child:
            sibling[last_child[parent]] = node
        last_child[parent] = node
    return first, sibling


def test_parents_of_the_worked_example() -> None:
    next_token = torch.tensor([[1, 3, -1, -1]])
    next_sibling = torch.tensor([[-1, 2, -1, -1]])
    parents = parents_from_links(next_token, next_sibling)
    assert parents.dtype == torch.int32
    assert parents.tolist() == [[-1, 0, 0, 1]]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_parents_of_random_trees_in_any_order(data: st.DataObject) -> None:
    dtn = data.draw(st.integers(1, 17))
    rows = data.draw(st.integers(1, 3))
    expected, first, sibling = [], [], []
    for _ in range(rows):
        parents = [-1] + [data.draw(st.integers(-1, node - 1)) for node in range(1, dtn)]
        rename = data.draw(st.permutations(range(dtn)))
        shuffled = [-1] * dtn
        for node, parent in enumerate(parents):
            shuffled[rename[node]] = rename[parent] if parent >= 0 else -1
        links = links_of(shuffled, data.draw(st.permutations(range(dtn))))
        expected.append(shuffled)
        first.append(links[0])
        sibling.append(links[1])
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    parents = parents_from_links(
        torch.tensor(first, dtype=dtype), torch.tensor(sibling, dtype=dtype)
    )
    assert parents.tolist() == expected


def test_one_parent_of_a_whole_row_of_siblings() -> None:
    """The longest sibling chain: 32 hops take the full number of doublings."""
    dtn = 34
    next_token = torch.full((1, dtn), -1)
    next_token[0, 0] = 1
    next_sibling = torch.full((1, dtn), -1)
    next_sibling[0, 1:-1] = torch.arange(2, dtn)
    assert parents_from_links(next_token, next_sibling).tolist() == [[-1] + [0] * (dtn - 1)]


def test_stale_links_of_a_padded_row_stay_in_range() -> None:
    garbage = torch.tensor([[1, 3, -1, -1], [99, -7, 2, 4], [0, 0, 0, 0]])
    sibling = torch.tensor([[-1, 2, -1, -1], [3, 3, 3, 3], [2, 1, 0, 3]])
    parents = parents_from_links(garbage, sibling)
    assert parents[0].tolist() == [-1, 0, 0, 1]
    assert parents.min() >= -1
    assert parents.max() < 4


@pytest.mark.parametrize("rows", [0, 2])
def test_parents_of_no_rows_or_no_nodes(rows: int) -> None:
    empty = torch.empty((rows, 0 if rows else 3), dtype=torch.int64)
    assert parents_from_links(empty, empty).shape == empty.shape


def test_links_of_different_shapes_are_refused() -> None:
    with pytest.raises(BatchError, match=r"\(1, 3\) and \(1, 4\)"):
        parents_from_links(
            torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64)
        )


def test_taps_of_the_spec_6_tree() -> None:
    taps = ancestor_taps(torch.tensor([[-1, 0, 0]], dtype=torch.int32), 4)
    assert taps.dtype == torch.int64
    assert taps.tolist() == [[[0, 1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 5]]]


@pytest.mark.parametrize("kernel_size", range(2, 9))
@pytest.mark.parametrize("dtn", [1, 2, 7])
def test_taps_of_a_chain_are_consecutive(kernel_size: int, dtn: int) -> None:
    chain = torch.arange(-1, dtn - 1).expand(2, dtn)
    expected = torch.arange(dtn)[:, None] + torch.arange(kernel_size)
    assert torch.equal(ancestor_taps(chain, kernel_size), expected.expand(2, dtn, kernel_size))


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_taps_of_random_trees_never_fall_off_the_window(data: st.DataObject) -> None:
    dtn = data.draw(st.integers(1, 9))
    kernel_size = data.draw(st.integers(2, 8))
    node = st.integers(-3, dtn + 3)  # any parent, cycles and out-of-range ids included
    rows = data.draw(st.lists(st.lists(node, min_size=dtn, max_size=dtn), min_size=1, max_size=3))
    taps = ancestor_taps(torch.tensor(rows, dtype=torch.int32), kernel_size)
    assert taps.tolist() == [taps_by_walking(row, kernel_size) for row in rows]


def test_out_of_range_parents_follow_the_old_window() -> None:
    taps = ancestor_taps(torch.tensor([[-1, 7, -5]]), 3)
    assert taps.tolist() == [[[0, 1, 2], [0, 1, 3], [0, 1, 4]]]


def test_taps_are_written_to_a_strided_out_in_place() -> None:
    buffer = torch.full((4, 8, 3), -9)
    out = buffer[:2, :4]
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2]])
    assert ancestor_taps(parents, 3, out=out) is out
    assert torch.equal(out, ancestor_taps(parents, 3))
    assert (buffer[2:] == -9).all()
    assert (buffer[:, 4:] == -9).all()


@pytest.mark.parametrize(
    "out", [torch.empty(1, 2, 4, dtype=torch.int64), torch.empty(1, 3, 4, dtype=torch.int32)]
)
def test_a_wrong_out_is_refused(out: torch.Tensor) -> None:
    with pytest.raises(BatchError, match="out must be int64"):
        ancestor_taps(torch.tensor([[-1, 0, 1]]), 4, out=out)


def test_wrong_parents_and_kernels_are_refused() -> None:
    with pytest.raises(BatchError, match="kernel_size >= 2"):
        ancestor_taps(torch.tensor([[-1]]), 1)
    with pytest.raises(BatchError, match=r"\(3,\)"):
        ancestor_taps(torch.tensor([-1, 0, 1]), 4)


def test_no_host_sync_and_no_data_dependent_shape() -> None:
    with FakeTensorMode():
        links = torch.empty(3, 5, dtype=torch.int32)
        parents = parents_from_links(links, links)
        assert ancestor_taps(parents, 4).shape == (3, 5, 4)
