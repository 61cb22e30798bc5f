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
    InklingForCausalLM,
    InklingShortConvolution,
)
from transformers.utils.deprecation import deprecate_kwarg

from .fused import SiteHook
from .sites import ConvSite, Family

__all__ = ["FAMILY", "PooledInklingShortConvolution"]


class PooledInklingShortConvolution(InklingShortConvolution):
    """The convolution of an attached model; the stock one without a cache, and in training."""

    _sconv_hook: SiteHook

    @force_accelerate_hooks("conv1d")
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        hidden_states: Tensor,
        cache: Cache | None = None,
        conv_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Convolve ``[B, T, D]`` and add it; ``conv_mask`` (``[B, T]``) zeroes the taps only."""
        if cache is None or self.training:
            output: Tensor = super().forward(
                hidden_states, cache=cache, conv_mask=conv_mask, **kwargs
            )
            return output
        hook, weight = self._sconv_hook, self.conv1d.weight
        if conv_mask is None and weight.dtype == torch.float32:
            return hook.convolve(cache, hidden_states, hidden_states, weight, residual=True)
        # The residual keeps padding, so it is no longer the convolution's input; and weights that
        # are not float32 round the sum of the taps before the residual joins.
        exact = hidden_states.float()
        taps = exact if conv_mask is None else exact * conv_mask[:, :, None]
        summed = hook.convolve(cache, hidden_states, taps.to(weight.dtype), weight)
        return (summed.float() + exact).to(hidden_states.dtype)


def _sites(model: InklingForCausalLM) -> list[ConvSite]:
    sites = []
    for index, layer in enumerate(model.model.layers):
        convolutions = {
            "k": layer.self_attn.k_sconv,
            "v": layer.self_attn.v_sconv,
            "attn": layer.attn_sconv,
            "mlp": layer.mlp_sconv,
        }
        for stream, module in convolutions.items():
            sites.append(
                ConvSite(
                    module=module,
                    weight=module.conv1d.weight,
                    layer_id=index,
                    stream=stream,
                    cache_layer=module.layer_idx,
                    state_idx=module.conv_idx,
                )
            )
    return sites


def _static_fault(layer: object) -> str | None:
    if isinstance(layer, LinearAttentionAndStaticFullAttentionLayer):
        return (
            "Inkling's full-attention layers read their position from a static cache after it has "
            "moved on, so every forward but the first computes wrong logits"
        )
    if isinstance(layer, StaticSlidingWindowLayer) and not layer._is_croppable:
        return (
            "the masks that generate prepares for a static cache do not fit Inkling's sliding "
            "layers once the cache is longer than their window"
        )
    return None


FAMILY = Family(
    model_class=InklingForCausalLM,
    fused_class=PooledInklingShortConvolution,
    window_axis="time",
    sites=_sites,
    # Stock upcasts before it stores; the model's dtype holds the same values.
    state_dtype=lambda dtype: torch.float32,
    static_fault=_static_fault,
)
