"""What the oracle says of the metadata of a step, against the worked examples."""

from __future__ import annotations

import torch

from sconv import ForwardMode, reference


def test_metadata_of_an_extend() -> None:
    assert reference.metadata(
        mode=ForwardMode.EXTEND,
        slots=torch.tensor([4, 9, -1, 6]),
        lengths=torch.tensor([3, 0, 1, 2]),
        has_initial=torch.tensor([True, False, True, False]),
        kernel_size=4,
        num_tokens=8,
        track_slots=[1, 2, 3, 5],
        track_tokens=[2, 0, 1, 2],
    ) == {
        "cache_indices": [4, 9, -1, 6],
        "query_start_loc": [0, 3, 3, 4, 6],
        "has_initial_state": [True, False, True, False],
        "cache_mask": [[[True]], [[False]], [[False]], [[False]]],
        "safe_idx": [4, 9, 0, 6],
        "cu": [0, 3, 3, 4, 6],
        "si": [0, 0, 0, 2, 3, 3, 3, 3],
        "track_conv_indices": [[-1, 0, 1], [0, 0, 0], [0, 0, 0], [-1, 4, 5]],
        "track_cache_indices": [1, -1, -1, 5],
    }


def test_metadata_of_the_worked_examples() -> None:
    decode = reference.metadata(
        mode=ForwardMode.DECODE,
        slots=[7, 2, 0],
        lengths=[1, 1, 1],
        has_initial=[True] * 3,
        kernel_size=4,
        num_tokens=3,
        track_slots=[-1, 5, -1],
    )
    assert decode["query_start_loc"] == decode["cu"] == [0, 1, 2, 3]
    assert decode["si"] == [0, 1, 2]
    assert decode["cache_mask"] == [[[True]]] * 3
    assert decode["safe_idx"] == [7, 2, 0]
    assert decode["track_conv_indices"] == [[0, 0, 0]] * 3
    assert decode["track_cache_indices"] == [-1, 5, -1]

    padded = reference.metadata(
        mode=ForwardMode.EXTEND,
        slots=[4, 9, 0, 0],
        lengths=[3, 2, 0, 0],
        has_initial=[False] * 4,
        kernel_size=4,
        num_tokens=7,
    )
    assert padded["cu"] == [0, 3, 5, 5, 5]
    assert padded["si"] == [0, 0, 0, 1, 1, 3, 3]

    verify = reference.metadata(
        mode=ForwardMode.TARGET_VERIFY,
        slots=[4, 9],
        lengths=[4, 4],
        has_initial=[True, True],
        kernel_size=4,
        num_tokens=8,
        track_slots=[1, 2],
    )
    assert verify["cu"] == [0, 4, 8]
    assert verify["si"] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert verify["track_cache_indices"] == [-1, -1]


def test_metadata_of_no_rows() -> None:
    empty = reference.metadata(
        mode=ForwardMode.IDLE, slots=[], lengths=[], has_initial=[], kernel_size=4, num_tokens=0
    )
    assert empty["cu"] == [0]
    assert all(
        value == [] for name, value in empty.items() if name not in ("cu", "query_start_loc")
    )
