"""Inkling: four convolutions a layer, with a residual, summed in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    LinearAttentionAndStaticFullAttentionLayer,
    StaticSlidingWindowLayer,
)
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.models.inkling.modeling_inkling import (
    InklingShortConvolution,
)

from .conv_hook import hook_of
from .conv_modules import ConvKind

__all__ = ["KIND", "PooledInklingShortConvolution"]


class PooledInklingShortConvolution(InklingShortConvolution):
    """The convolution of an attached model; the stock one without a cache, and in training."""

    @force_accelerate_hooks("conv1d")
    def forward(
        self,
        hidden_states: Tensor,
        cache: Cache | None = None,
        conv_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Convolve ``[B, T, D]`` and add it; ``conv_mask`` (``[B, T]``) zeroes the taps only."""
        # The name of the argument depends on the release; its place does not.
        cache = past_key_values if cache is None else cache
        hook = hook_of(self)
        # accelerate may hold on to this method of a model that was detached.
        if hook is None or cache is None or self.training:
            output: Tensor = InklingShortConvolution.forward(
                self, hidden_states, cache, conv_mask, **kwargs
            )
            return output
        weight = self.conv1d.weight
        if conv_mask is None and weight.dtype == torch.float32:
            return hook.convolve(cache, hidden_states, hidden_states, weight, residual=True)
        # The residual keeps padding, so it is no longer the convolution's input; and weights that
        # are not float32 round the sum of the taps before the residual joins.
        exact = hidden_states.float()
        taps = exact if conv_mask is None else exact * conv_mask[:, :, None]
        summed = hook.convolve(cache, hidden_states, taps.to(weight.dtype), weight)
        return (summed.float() + exact).to(hidden_states.dtype)


def _static_fault(layer: object) -> str | None:
    if isinstance(layer, LinearAttentionAndStaticFullAttentionLayer):
        return (
            "Inkling's full-attention layers read their position from a static cache after it has "
            "moved on, so every forward but the first computes wrong logits"
        )
    # A release before 5.24 does not say which of its static caches that is.
    if isinstance(layer, StaticSlidingWindowLayer) and not getattr(layer, "_is_croppable", False):
        return (
            "the masks that generate prepares for a static cache do not fit Inkling's sliding "
            "layers once the cache is longer than their window"
        )
    return None


KIND = ConvKind(
    pooled_class=PooledInklingShortConvolution,
    stock_class=InklingShortConvolution,
    window_axis="time",
    # Stock upcasts before it stores; the model's dtype holds the same values.
    state_dtype=lambda dtype: torch.float32,
    static_fault=_static_fault,
)
