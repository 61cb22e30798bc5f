"""A batch of one row takes a shorter way, and not a bit of the result tells."""

from __future__ import annotations

import pytest
import torch

import sconv

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def _backend(axis: str, state_dtype: torch.dtype, kernel_size: int, dim: int) -> sconv.Backend:
    spec = sconv.StateSpec(
        num_layers=1,
        streams=[sconv.Stream("before", 5), sconv.Stream("conv", dim)],
        kernel_size=kernel_size,
        num_slots=6,
        max_requests=6,
        dtype=state_dtype,
        window_axis=axis,
    )
    return sconv.load_backend("cpu", spec=spec)


def _step(backend, slots, x, weight, state, **arguments):
    """Run one decode step from ``state``; return the outputs and the whole pool after it."""
    backend.pool.layers[0].copy_(state)
    batch = sconv.ForwardBatch.decode(slots=torch.tensor(slots))
    backend.init_forward_metadata(batch)
    y = backend.short_conv(x, weight, layer_id=0, stream="conv", forward_batch=batch, **arguments)
    return y, backend.pool.layers[0].clone()


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize(
    ("state_dtype", "x_dtype", "weight_dtype"),
    [(BF16, BF16, BF16), (F32, F32, F32), (F32, BF16, BF16), (BF16, F32, F16), (F16, BF16, F32)],
)
@pytest.mark.parametrize(("kernel_size", "dim"), [(2, 1), (4, 67), (8, 16)])
@pytest.mark.parametrize("axis", ["time", "channel"])
def test_one_row_alone_is_the_row_among_others(
    axis, kernel_size, dim, state_dtype, x_dtype, weight_dtype, residual, activation
):
    backend = _backend(axis, state_dtype, kernel_size, dim)
    generator = torch.Generator().manual_seed(dim)
    state = torch.randn(backend.pool.layers[0].shape, generator=generator).to(state_dtype)
    wide = torch.randn(3, 2 * dim, generator=generator).to(x_dtype)
    x = wide[:, dim:]  # strided rows
    weight = torch.randn(dim, 1, kernel_size, generator=generator).to(weight_dtype)
    bias = torch.randn(dim, generator=generator)
    arguments = {"residual": residual, "activation": activation, "bias": bias}

    together, pool = _step(backend, [5, 2, 4], x, weight, state, **arguments)
    for row, slot in enumerate([5, 2, 4]):
        alone, after = _step(backend, [slot], x[row : row + 1], weight, state, **arguments)
        assert alone.dtype is x_dtype
        assert torch.equal(alone, together[row : row + 1])
        assert torch.equal(after[slot], pool[slot])
        others = [other for other in range(7) if other != slot]
        assert torch.equal(after[others], state[others])


def test_a_step_made_for_another_slot_is_not_confused_with_the_last_one():
    backend = _backend("time", F32, 4, 8)
    state = torch.arange(7.0)[:, None, None].expand(backend.pool.layers[0].shape).clone()
    x, weight = torch.full((1, 8), 100.0), torch.ones(8, 4)
    for slot in (3, 5):
        y, after = _step(backend, [slot], x, weight, state, residual=False)
        assert torch.equal(y, torch.full((1, 8), 3.0 * slot + 100))
        assert torch.equal(after[slot, -1, 5:], x[0])
    y, after = _step(backend, [-1], x, weight, state, residual=False)
    assert not y.any()
    assert torch.equal(after, state)


def test_a_snapshot_is_taken_of_a_row_alone():
    backend = _backend("time", F32, 4, 8)
    backend.pool.layers[0].copy_(torch.arange(7.0)[:, None, None])
    batch = sconv.ForwardBatch.decode(
        slots=torch.tensor([3]),
        mamba_track_mask=torch.tensor([True]),
        mamba_track_indices=torch.tensor([6]),
    )
    backend.init_forward_metadata(batch)
    backend.short_conv(
        torch.full((1, 8), 9.0), torch.ones(8, 4), layer_id=0, stream="conv", forward_batch=batch
    )
    window = torch.tensor([3.0, 3.0, 9.0])[:, None].expand(3, 8)
    assert torch.equal(backend.pool.conv(0, "conv")[3], window)
    assert torch.equal(backend.pool.conv(0, "conv")[6], window)
