"""What the memory of verify windows holds in each layout, and how many bytes that takes.

Scratch is NaN before every step, so that a column which nobody wrote shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch

from sconv import StateSpec, Stream, reference
from sconv.state.windows import LAYOUTS, VerifyWindows, make_windows
from sconv.step.draft_tree import ancestor_taps
from sconv.testing.harness import assert_same_bits
from sconv.testing.poison import poison_

CPU = torch.device("cpu")
every_axis = pytest.mark.parametrize("axis", ["time", "channel"])


def poisoned(layout: str, spec: StateSpec) -> VerifyWindows:
    windows = make_windows(layout, spec, CPU)
    for layer in windows.layers:
        poison_(layer)
    if getattr(windows, "paths", None) is not None:
        poison_(windows.paths)
    return windows


@pytest.mark.parametrize("kernel_size", range(2, 9))
@every_axis
def test_the_window_after_every_node_is_the_path_to_it(
    spec_of: Callable[..., StateSpec], axis: str, kernel_size: int
) -> None:
    rng, rows, dim, size = random.Random(kernel_size), 3, 3, kernel_size - 1
    for drafts in range(1, 9):
        # Fewer tokens in the step than the memory has room for, now and then; and spare rows.
        spec = spec_of(
            streams=[Stream("a", 1), Stream("b", dim)],
            kernel_size=kernel_size,
            window_axis=axis,
            max_draft_tokens=max(2, drafts + rng.choice((0, 0, 2))),
        )
        for tree in (False, True):
            parents = [
                [-1, *(rng.randrange(n) if tree else n - 1 for n in range(1, drafts))]
                for _ in range(rows)
            ]
            taps = ancestor_taps(torch.tensor(parents), kernel_size) if tree else None
            state = torch.randn(rows, size, 1 + dim)
            x = torch.randn(rows, drafts, 1 + dim)
            axed = state if axis == "time" else state.transpose(1, 2).contiguous()
            expected = torch.stack(
                [
                    reference.row_conv(
                        x[row],
                        state[row],
                        torch.zeros(1 + dim, kernel_size),
                        parents=parents[row],
                    )[1].float()
                    for row in range(rows)
                ]
            )
            for layout in LAYOUTS:
                if tree and layout == "dedup":
                    continue
                windows = poisoned(layout, spec)
                if taps is not None:
                    windows.store_paths(taps)
                inputs = torch.cat([state, x], dim=1)
                windows.store(0, "a", inputs[:, :, :1], taps)
                windows.store(0, "b", inputs[:, :, 1:], taps)
                for node in range(drafts):
                    found = windows.window_after(0, torch.tensor([node] * rows), axed, tree=tree)
                    assert found.shape == axed.shape
                    found = reference.time_axis(found, axis)
                    what = f"{layout}, {drafts} drafts, tree={tree}, node {node}"
                    assert_same_bits(found, expected[:, node], what)


@every_axis
def test_rows_may_ask_for_different_nodes(spec_of: Callable[..., StateSpec], axis: str) -> None:
    spec = spec_of(window_axis=axis)
    state = torch.arange(9.0).view(3, 3, 1)
    x = 10 + torch.arange(12.0).view(3, 4, 1)
    axed = state if axis == "time" else state.transpose(1, 2)
    for layout in LAYOUTS:
        windows = poisoned(layout, spec)
        windows.store(0, "a", torch.cat([state, x], dim=1), None)
        found = windows.window_after(0, torch.tensor([3, 0, 1]), axed, tree=False)
        assert found.flatten(1).tolist() == [[11, 12, 13], [4, 5, 14], [8, 18, 19]]


def test_the_state_is_kept_in_its_own_dtype(spec_of: Callable[..., StateSpec]) -> None:
    spec = spec_of(dtype=torch.bfloat16)
    state, x = torch.full((1, 3, 1), 1.0).bfloat16(), torch.full((1, 4, 1), 1.001)
    for layout in LAYOUTS:
        windows = poisoned(layout, spec)
        windows.store(0, "a", torch.cat([state, x], dim=1), None)
        found = windows.window_after(0, torch.tensor([3]), state, tree=False)
        assert_same_bits(found, torch.full((1, 3, 1), 1.001).bfloat16(), layout)


@pytest.mark.parametrize(
    ("axis", "dim", "memory", "shape", "strides"),
    [
        ("channel", 3, (2, 3, 6), (2, 4, 3, 3), (18, 1, 6, 1)),
        ("time", 5, (2, 6, 5), (2, 4, 3, 5), (30, 5, 5, 1)),
    ],
)
def test_the_dedup_geometry_steps_as_it_slides(
    spec_of: Callable[..., StateSpec], axis: str, dim: int, memory: Any, shape: Any, strides: Any
) -> None:
    spec = spec_of(window_axis=axis, streams=[Stream("a", dim)], max_requests=2)
    windows = make_windows("dedup", spec, CPU)
    assert tuple(windows.layers[0].shape) == memory
    assert windows.geometry(0) == (shape, strides)
    view = windows.layers[0].as_strided(shape, strides)
    column = 2 if axis == "time" else 3
    assert view.stride(1) == view.stride(column)
    # On the time axis a window is one run of memory, so that a flat copy moves it.
    assert view[1, 2].is_contiguous() == (axis == "time")


@every_axis
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_what_is_read_is_a_copy(spec_of: Callable[..., StateSpec], layout: str, axis: str) -> None:
    """Zeroed, it would wipe columns of other windows if it were not."""
    spec = spec_of(window_axis=axis, streams=[Stream("a", 2)], max_requests=2)
    windows = make_windows(layout, spec, CPU)
    windows.layers[0].copy_(torch.arange(windows.layers[0].numel()).view(windows.layers[0].shape))
    before = windows.layers[0].clone()
    found = windows.read(0)
    assert found.is_contiguous()
    assert tuple(found.shape) == windows.geometry(0)[0]
    assert found.untyped_storage().nbytes() == found.numel() * found.element_size()
    found[0, 0].zero_()
    assert_same_bits(windows.layers[0], before, "windows")
    assert found[0, 1].count_nonzero() == found[0, 1].numel()


@every_axis
def test_a_kernel_may_store_every_window(spec_of: Callable[..., StateSpec], axis: str) -> None:
    spec = spec_of(window_axis=axis, streams=[Stream("a", 2)], max_requests=2)
    state, x = torch.randn(2, 3, 2), torch.randn(2, 4, 2)
    kept, stored = poisoned("dedup", spec), poisoned("dedup", spec)
    inputs = torch.cat([state, x], dim=1)
    kept.store(0, "a", inputs, None)
    overlapping = stored.layers[0].as_strided(*stored.geometry(0))
    for node in range(4):
        window = inputs[:, node + 1 : node + 4]
        overlapping[:, node] = window if axis == "time" else window.transpose(1, 2)
    assert_same_bits(stored.layers[0], kept.layers[0], "columns")


@every_axis
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bytes_are_those_of_the_columns(
    spec_of: Callable[..., StateSpec], axis: str, dtype: torch.dtype
) -> None:
    for kernel_size in range(2, 9):
        for drafts in range(2, 9):
            spec = spec_of(
                num_layers=2,
                streams=[[Stream("a", 3), Stream("b", 5)], [Stream("a", 7)]],
                kernel_size=kernel_size,
                window_axis=axis,
                dtype=dtype,
                max_draft_tokens=drafts,
            )
            dense, dedup, inputs = (make_windows(layout, spec, CPU) for layout in LAYOUTS)
            assert inputs.paths is not None
            assert inputs.resumes is not None
            notes = inputs.paths.numel() * 4 + inputs.resumes.numel()
            assert notes == 6 * drafts * (kernel_size - 1) * 4 + 6
            whole = drafts * (kernel_size - 1)
            assert dense.nbytes == 6 * whole * 15 * dtype.itemsize
            assert Fraction(dedup.nbytes, dense.nbytes) == Fraction(drafts + kernel_size - 2, whole)
            assert Fraction(inputs.nbytes - notes, dense.nbytes) == Fraction(1, kernel_size - 1)
            for windows in (dense, dedup, inputs):
                assert windows.nbytes == 6 * windows.row_nbytes(spec)


def test_four_drafts_of_width_four_are_a_half_and_a_third(
    spec_of: Callable[..., StateSpec],
) -> None:
    spec = spec_of(streams=[Stream("a", 64)])
    dense, dedup, inputs = (make_windows(layout, spec, CPU) for layout in LAYOUTS)
    assert Fraction(dedup.nbytes, dense.nbytes) == Fraction(1, 2)
    assert Fraction(inputs.layers[0].numel(), dense.layers[0].numel()) == Fraction(1, 3)
