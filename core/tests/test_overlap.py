"""Memory that two slots, two layers or two windows share is found from strides and addresses."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sconv import BatchError, ConvStatePool, ForwardBatch, SpecError, StateSpec, Stream
from sconv.state.overlap import first_overlap, overlaps_itself
from sconv.testing.digits import digit_inputs, digit_weight
from sconv.torch_backend.backend import TorchBackend

D = 2
MEMORY = torch.zeros(4000)


def places(tensor: Tensor) -> list[int]:
    """Return the place of every element, one by one."""
    return [
        tensor.storage_offset()
        + sum(index * stride for index, stride in zip(where, tensor.stride(), strict=True))
        for where in product(*map(range, tensor.shape))
    ]


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    dims = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(1, 4), min_size=dims, max_size=dims))
    strides = draw(
        st.lists(st.sampled_from((0, 1, 2, 3, 4, 5, 6, 9, 12, 24)), min_size=dims, max_size=dims)
    )
    return MEMORY.as_strided(shape, strides, draw(st.integers(0, 40)))


@given(views(), views())
def test_it_is_what_a_list_of_all_places_says(one: Tensor, other: Tensor) -> None:
    mine, theirs = places(one), places(other)
    assert overlaps_itself(one.shape, one.stride()) == (len(set(mine)) < len(mine))
    assert (first_overlap([one, other]) is not None) == bool(set(mine) & set(theirs))


def spec(**changes: Any) -> StateSpec:
    options: dict[str, Any] = {
        "num_layers": 2,
        "streams": [Stream("a", D)],
        "kernel_size": 4,
        "num_slots": 8,
        "max_requests": 4,
        "dtype": torch.float32,
    }
    return StateSpec(**{**options, **changes})


def pages(axis: str) -> list[Tensor]:
    """Return layers that take turns in pages: their addresses interleave, their places do not."""
    memory = torch.zeros(9, 2 * 3 * D + 1)
    inner = (D, 1) if axis == "time" else (3, 1)
    shape = (9, 3, D) if axis == "time" else (9, D, 3)
    return [memory.as_strided(shape, (2 * 3 * D + 1, *inner), layer * 3 * D) for layer in (0, 1)]


@pytest.mark.parametrize("axis", ["time", "channel"])
def test_layers_may_take_turns_in_pages(axis: str) -> None:
    pool = ConvStatePool.adopt(spec(window_axis=axis), pages(axis))
    pool.layers[0].fill_(1)
    assert not pool.layers[1].any()


def test_a_wide_slot_may_share_what_is_no_window() -> None:
    """Of a slot wider than K-1 only the end is the state's."""
    memory = torch.zeros(2, 9 * 3 + 2, D)
    rows = memory.as_strided((2, 9, 5, D), (memory.stride(0), 3 * D, D, 1))
    assert ConvStatePool.adopt(spec(), rows).num_rows == 9


adopt = ConvStatePool.adopt

SHARED: dict[str, Any] = {
    "rows that overlap": (
        lambda: torch.zeros(2, 40, D).as_strided((2, 9, 3, D), (80, 2 * D, D, 1)),
        r"layer 0 has shape \[9, 3, 2\] and strides \[4, 2, 1\], so that slots share memory",
    ),
    "one row for all slots": (
        lambda: torch.zeros(2, 1, 3, D).expand(2, 9, 3, D),
        r"layer 0 has .* strides \[0, 2, 1\], so that slots share memory",
    ),
    "one tensor twice": (
        lambda: [torch.zeros(9, 3, D)] * 2,
        r"layers 0 and 1 share memory",
    ),
    "one layer for all": (
        lambda: torch.zeros(1, 9, 3, D).expand(2, 9, 3, D),
        r"layers 0 and 1 share memory",
    ),
}


@pytest.mark.parametrize("late", [False, True], ids=["adopt", "bind"])
@pytest.mark.parametrize("case", SHARED)
def test_adopt_1_state_that_shares_memory_is_refused(case: str, late: bool) -> None:
    build, message = SHARED[case]
    layers = build()
    take = ConvStatePool.adopt(spec(), device="cpu").bind if late else partial(adopt, spec())
    with pytest.raises(SpecError, match=message):
        take(layers)


def test_adopt_1_layers_that_share_a_column_are_refused() -> None:
    memory = torch.zeros(200)
    layers = [memory.as_strided((9, 3, D), (5 * D, D, 1), at) for at in (0, 2 * D)]
    with pytest.raises(SpecError, match="layers 0 and 1 share memory"):
        ConvStatePool.adopt(spec(), layers)


def sliding(axis: str, rows: int = 4, drafts: int = 3) -> list[Tensor]:
    """Return dense windows whose columns are shared, one tensor per layer."""
    made = []
    for _ in range(2):
        if axis == "time":
            memory = torch.zeros(rows, drafts + 2, D)
            made.append(memory.as_strided((rows, drafts, 3, D), (memory.stride(0), D, D, 1)))
        else:
            memory = torch.zeros(rows, D, drafts + 2)
            made.append(
                memory.as_strided((rows, drafts, D, 3), (memory.stride(0), 1, memory.stride(1), 1))
            )
    return made


def adopted(axis: str = "time", **changes: Any) -> TorchBackend:
    windows = changes.pop("windows", None)
    made = spec(max_draft_tokens=3, window_axis=axis, **changes)
    shape = (2, 9, 3, D) if axis == "time" else (2, 9, D, 3)
    pool = ConvStatePool.adopt(made, torch.zeros(shape), windows=windows or sliding(axis))
    return TorchBackend(spec=made, device=torch.device("cpu"), pool=pool)


@pytest.mark.parametrize("axis", ["time", "channel"])
def test_adopt_1_windows_that_slide_serve_chains_alone(axis: str) -> None:
    backend = adopted(axis)
    pool = backend.pool
    for layer in pool.layers:
        layer[5] = 1.0
    slots, weight = torch.tensor([5, 7]), digit_weight(D)
    batch = ForwardBatch.target_verify(slots=slots, seq_lens=slots, draft_token_num=3)
    backend.init_forward_metadata(batch)
    x = digit_inputs([2, 3, 4, 5, 6, 7], D)
    for layer_id in (0, 1):
        backend.short_conv(x, weight, layer_id, "a", batch, None, None, False)
    backend.update_mamba_state_after_mtp_verify(torch.tensor([1, 2]), None, None, slots)
    state = pool.layers[1] if axis == "time" else pool.layers[1].transpose(1, 2)
    assert state[5, :, 0].tolist() == [1, 2, 3]
    assert state[7, :, 0].tolist() == [5, 6, 7]
    parents = torch.tensor([[-1, 0, 0]] * 2, dtype=torch.int32)
    tree = ForwardBatch.target_verify(
        slots=slots, seq_lens=slots, draft_token_num=3, parents=parents
    )
    with pytest.raises(BatchError, match="hold chains alone"):
        backend.init_forward_metadata(tree)
    with pytest.raises(SpecError, match="slides over shared columns, and draft_topk=2"):
        adopted(axis, draft_topk=2)


def test_adopt_1_windows_that_share_memory_otherwise_are_refused() -> None:
    dense = torch.zeros(4, 3, 3, D)
    state = torch.zeros(2, 9, 3, D)
    made = spec(max_draft_tokens=3)
    for windows, message in (
        ([dense, dense], "the windows of layer 0 and the windows of layer 1 share memory"),
        ([dense, dense[:1].expand(4, 3, 3, D)], "layer 1 has .* windows share memory"),
        ([dense, dense[:, :1].expand(4, 3, 3, D)], "layer 1 has .* windows share memory"),
        ([dense, state.view(-1)[:72].view(4, 3, 3, D)], "windows of layer 1 and state layer 0"),
        ([dense, torch.zeros(80).as_strided((4, 3, 3, D), (8, 2, 2, 1))], "windows share memory"),
    ):
        with pytest.raises(SpecError, match=message):
            ConvStatePool.adopt(made, state, windows=windows)
