"""Cutting channels part by part. Values are channel numbers, so that a misplaced one shows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sconv.engine.sharding import Part, check_rank, shard_streams
from sconv.errors import SpecError

QKV = [Part(2), Part(2), Part(4)]


def shards_of(full: torch.Tensor, parts: list[Part], tp_size: int, dim: int = 0):
    return [
        shard_streams(full, parts, tp_rank=rank, tp_size=tp_size, dim=dim)
        for rank in range(tp_size)
    ]


def test_layout_5_parts_are_cut_one_by_one() -> None:
    full = torch.arange(8)
    shards = shards_of(full, QKV, 2)
    assert [shard.tolist() for shard in shards] == [[0, 2, 4, 5], [1, 3, 6, 7]]


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_layout_5_the_ranks_together_have_every_channel_of_each_part_in_order(
    data: st.DataObject,
) -> None:
    tp_size = data.draw(st.sampled_from([1, 2, 3, 4]))
    parts = [
        Part(groups * data.draw(st.integers(1, 3)), groups)
        for groups in data.draw(
            st.lists(st.sampled_from([1, tp_size, 2 * tp_size]), min_size=1, max_size=4)
        )
    ]
    dim = data.draw(st.sampled_from([0, 1, -1]))
    width = sum(part.channels for part in parts)
    full = torch.arange(width).expand(2, width) if dim else torch.arange(width)[:, None, None]
    shards = shards_of(full, parts, tp_size, dim)
    first = 0  # of the part, in the unsharded channels
    at = 0  # of the part, in every shard
    for part in parts:
        local = part.local_channels(tp_size)
        pieces = [shard.narrow(dim, at, local) for shard in shards]
        expected = full.narrow(dim, first, part.channels)
        if local == part.channels:
            assert all(torch.equal(piece, expected) for piece in pieces)
        else:
            assert torch.equal(torch.cat(pieces, dim), expected)
        first, at = first + part.channels, at + local
    assert all(shard.shape[dim] == at for shard in shards)


def test_channels_of_weights_and_of_both_window_axes() -> None:
    weight = torch.arange(8)[:, None, None].expand(8, 1, 4)
    window = torch.arange(8).expand(3, 8)
    expected = [1, 3, 6, 7]
    cut = {"tp_rank": 1, "tp_size": 2}
    assert shard_streams(weight, QKV, **cut)[:, 0, 3].tolist() == expected
    assert shard_streams(window, QKV, **cut, dim=1)[2].tolist() == expected
    assert shard_streams(window.T, QKV, **cut, dim=-2)[:, 2].tolist() == expected


@pytest.mark.parametrize(("groups", "tp_size", "local"), [(8, 4, 4), (1, 2, 16), (1, 3, 16)])
def test_layout_6_groups_that_divide_and_one_group_are_accepted(
    groups: int, tp_size: int, local: int
) -> None:
    assert Part(16, groups).local_channels(tp_size) == local


@pytest.mark.parametrize(("groups", "tp_size"), [(3, 5), (2, 4), (3, 2)])
def test_layout_6_other_groups_are_refused_with_both_numbers(groups: int, tp_size: int) -> None:
    part = Part(12, groups)
    with pytest.raises(SpecError, match=rf"{groups} groups .* tp_size={tp_size}"):
        part.local_channels(tp_size)
    with pytest.raises(SpecError, match=rf"{groups} groups .* tp_size={tp_size}"):
        shard_streams(torch.arange(12), [part], tp_rank=0, tp_size=tp_size)


def test_layout_6_one_group_is_held_by_every_rank() -> None:
    parts = [Part(4), Part(3, 1), Part(2)]
    shards = shards_of(torch.arange(9), parts, 2)
    assert [shard.tolist() for shard in shards] == [[0, 1, 4, 5, 6, 7], [2, 3, 4, 5, 6, 8]]


def test_bad_parts_are_refused() -> None:
    with pytest.raises(SpecError, match="channels=0"):
        Part(0)
    with pytest.raises(SpecError, match="10 channels do not divide into 4 groups"):
        Part(10, 4)
    with pytest.raises(SpecError, match="into 0 groups"):
        Part(10, 0)
    with pytest.raises(SpecError, match="tp_size=0"):
        Part(4).local_channels(0)


def test_tensors_that_the_parts_do_not_cover_are_refused() -> None:
    with pytest.raises(SpecError, match=r"has 9 channels on dimension 0, .* 2 \+ 2 \+ 4 = 8"):
        shard_streams(torch.arange(9), QKV, tp_rank=0, tp_size=2)
    with pytest.raises(SpecError, match="the parts have none = 0"):
        shard_streams(torch.arange(9), [], tp_rank=0, tp_size=2)


@pytest.mark.parametrize("tp_rank", [-1, 2])
def test_ranks_that_do_not_exist_are_refused(tp_rank: int) -> None:
    with pytest.raises(SpecError, match=rf"tp_rank={tp_rank} is outside 0..1"):
        check_rank(tp_rank, 2)
    with pytest.raises(SpecError, match=rf"tp_rank={tp_rank} is outside 0..1"):
        shard_streams(torch.arange(8), QKV, tp_rank=tp_rank, tp_size=2)
