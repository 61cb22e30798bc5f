"""Convolution states between a stock transformers cache and the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

from .cache_binding import Binding
from .cache_layers import restore
from .conv_modules import ConvModule
from .history import History

__all__ = ["export_states", "import_states"]


def import_states(cache: Cache, binding: Binding, convolutions: Sequence[ConvModule]) -> None:
    """Copy the states that a stock cache holds, if any, to slots of the pool.

    A stock state is ``[B, D, K]``, or longer while the cache records: all inputs since the last
    crop, behind K of those before it. What was before the start is missing there and zero here.
    """
    states = [_state(cache, conv) for conv in convolutions]
    filled = [state for state in states if state is not None]
    if not filled:
        return
    if len(filled) != len(convolutions):
        raise ValueError(
            "the cache has the state of some convolutions only: it is from an aborted forward"
        )
    window, columns = binding.runner.backend.spec.window_size, filled[0].shape[2]
    recorded = 0
    if cache.is_recording_past(convolutions[0].cache_layer):
        # Less than K columns occur only while nothing precedes them.
        recorded = columns - window if columns > window else columns
        recorded = min(recorded, binding.runner.max_rollback)
    slots = binding.lease(filled[0].shape[0])
    history = History()
    history.length = recorded
    for conv, state in zip(convolutions, filled, strict=True):
        inputs = state.to(binding.runner.backend.spec.dtype)
        if recorded:
            history.keep(conv, inputs[:, :, columns - recorded :].transpose(1, 2).contiguous(), 0)
        _write_window(binding, conv, slots, inputs[:, :, : columns - recorded])
    # How many tokens came before is not known here and makes no difference, unless it is none.
    binding.adopt_state(columns - recorded, history)


def export_states(cache: Cache, binding: Binding, convolutions: Sequence[ConvModule]) -> None:
    """Turn a pooled cache into a stock one that holds the same states, and return its slots."""
    states = [_read_state(binding, conv) for conv in convolutions] if binding.has_state else []
    for index in sorted({conv.cache_layer for conv in convolutions}):
        restore(cache.layers[index])
    for conv, state in zip(convolutions, states, strict=False):
        layer: Any = cache.layers[conv.cache_layer]
        LinearAttentionLayer.lazy_initialization(
            layer,
            conv_states=state,
            state_idx=conv.state_idx,
            conv_kernel_size=binding.runner.backend.spec.kernel_size,
        )
        dtype = conv.kind.state_dtype(binding.runner.backend.spec.dtype)
        layer.conv_states[conv.state_idx] = state.to(dtype)
        layer.dtype = dtype
        layer.has_previous_state[conv.state_idx] = True
    binding.reset()


def _state(cache: Cache, conv: ConvModule) -> Tensor | None:
    state: Tensor | None = cache.get_conv_state(conv.cache_layer, conv.state_idx)
    return state


def _window_view(binding: Binding, conv: ConvModule) -> Tensor:
    """Return its state as ``[rows, D, K-1]``, whatever the axis."""
    pool = binding.runner.backend.pool
    view = pool.conv(conv.layer_id, conv.stream)
    return view.transpose(1, 2) if pool.spec.window_axis == "time" else view


def _write_window(binding: Binding, conv: ConvModule, slots: Tensor, inputs: Tensor) -> None:
    """Write the newest K-1 of ``inputs`` (``[B, D, n]``), zeros in front where n is smaller."""
    view = _window_view(binding, conv)
    window = view.shape[2]
    inputs = torch.nn.functional.pad(inputs, (max(window - inputs.shape[2], 0), 0))
    view.index_copy_(0, slots, inputs[:, :, inputs.shape[2] - window :])


def _read_state(binding: Binding, conv: ConvModule) -> Tensor:
    """Return ``[B, D, K + h]``: an unread oldest column, the window, the recorded inputs."""
    assert binding.slots is not None
    window = _window_view(binding, conv).index_select(0, binding.slots)
    recorded = binding.history.get(conv)
    if recorded is not None:
        window = torch.cat([window, recorded.transpose(1, 2).to(window.dtype)], dim=2)
    return torch.nn.functional.pad(window, (1, 0))
