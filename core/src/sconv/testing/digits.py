"""The digit oracle: inputs and weights for which an output reads as the tokens that made it.

With kernel width 4 and weights 1, 10, 100, 1000 (oldest first), the output for token 4 after
window [1, 2, 3] is 4321: current, previous, one before, two before. A wrong digit says which tap
read which token. bfloat16 and float16 are exact with weights 1, 4, 16, 64 and tokens 0 to 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..engine.backend import Backend
from ..state.pool import ConvStatePool
from ..state.spec import StateSpec, Stream
from ..step.batch import ForwardBatch
from .poison import poison_

__all__ = [
    "digit_inputs",
    "digit_spec",
    "digit_weight",
    "fill_pool",
    "read_digits",
    "read_window",
    "run_digits",
    "set_window",
]


def digit_spec(
    *,
    num_layers: int = 1,
    streams: Sequence[str] = ("a",),
    dim: int = 1,
    num_slots: int = 9,
    max_requests: int = 8,
    dtype: torch.dtype = torch.float32,
    max_draft_tokens: int = 1,
    draft_topk: int = 1,
    track_interval: int | None = None,
    chunk_size: int = 4,
    channel_axis: bool = False,
) -> StateSpec:
    """Return a spec of width-4 kernels."""
    return StateSpec(
        num_layers=num_layers,
        streams=[Stream(name, dim) for name in streams],
        kernel_size=4,
        num_slots=num_slots,
        max_requests=max_requests,
        dtype=dtype,
        window_axis="channel" if channel_axis else "time",
        max_draft_tokens=max_draft_tokens,
        draft_topk=draft_topk,
        track_interval=track_interval,
        chunk_size=chunk_size,
    )


def digit_weight(
    dim: int = 1, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """Return ``[dim, 4]`` weights: powers of ten in float32, of four otherwise."""
    base = 10 if dtype is torch.float32 else 4
    row = torch.tensor([base**power for power in range(4)], dtype=dtype, device=device)
    return row.repeat(dim, 1)


def digit_inputs(
    tokens: Sequence[int],
    dim: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return ``[T, dim]``; channel c of token t is ``(t + c) mod 10``: swapped channels show."""
    column = torch.tensor(list(tokens), dtype=torch.int64, device="cpu")[:, None]
    return ((column + torch.arange(dim, dtype=torch.int64, device="cpu")) % 10).to(
        device=device, dtype=dtype
    )


def set_window(
    pool: ConvStatePool,
    slot: int,
    window: Sequence[int],
    *,
    layer_id: int = 0,
    stream: str = "a",
) -> None:
    """Write a window, oldest first, into one slot of one stream."""
    state = pool.conv(layer_id, stream)
    time_axis = pool.spec.window_axis == "time"
    dim = state.shape[2 if time_axis else 1]
    value = digit_inputs(window, dim, state.dtype, state.device)
    state[slot] = value if time_axis else value.T


def fill_pool(
    pool: ConvStatePool,
    windows: Mapping[int, Sequence[int]],
    rows: Mapping[int, int] | None = None,
) -> None:
    """Poison the pool, then write these windows into all streams and name these request rows.

    Args:
        pool: The pool. Whether slots are handed out does not matter to a step.
        windows: Slot to window, oldest first.
        rows: Request row to slot; all others have none.
    """
    for layer in pool.layers:
        poison_(layer)
    for layer_id in range(pool.spec.num_layers):
        for stream in pool.spec.layer_streams(layer_id):
            for slot, window in windows.items():
                set_window(pool, slot, window, layer_id=layer_id, stream=stream.name)
    pool.req_to_slot[1:] = -1
    for row, slot in (rows or {}).items():
        pool.req_to_slot[row] = slot


def read_window(
    pool: ConvStatePool, slot: int, *, layer_id: int = 0, stream: str = "a", channel: int = 0
) -> list[int]:
    """Return the window of one slot of one stream, oldest first, as the digits of channel 0."""
    state = pool.conv(layer_id, stream)[slot]
    columns = state[:, channel] if pool.spec.window_axis == "time" else state[channel]
    return [(int(value) - channel) % 10 for value in columns.tolist()]


def read_digits(y: Tensor, channel: int = 0) -> list[int]:
    """Return one channel of ``[T, D]`` outputs as ints; NaN raises."""
    return [int(value) for value in y[:, channel].tolist()]


def run_digits(
    backend: Backend,
    batch: ForwardBatch,
    tokens: Sequence[int],
    *,
    layer_id: int = 0,
    stream: str = "a",
    prepare: bool = True,
) -> list[int]:
    """Prepare a step eagerly, run one convolution of it, and return channel 0 of its outputs.

    Args:
        backend: The backend.
        batch: The step.
        tokens: Its packed tokens.
        layer_id: The layer.
        stream: The stream.
        prepare: False if the step is prepared already.
    """
    if prepare:
        backend.init_forward_metadata(batch)
    dtype, device = backend.spec.dtype, backend.device
    part = backend.spec.stream_slice(layer_id, stream)
    y = backend.short_conv(
        digit_inputs(tokens, part.dim, dtype, device),
        digit_weight(part.dim, dtype, device),
        layer_id=layer_id,
        stream=stream,
        forward_batch=batch,
        residual=False,
    )
    return read_digits(y)
