"""LFM2: one gated convolution in some of the layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.models.lfm2.modeling_lfm2 import Lfm2ForCausalLM, Lfm2ShortConv
from transformers.utils.deprecation import deprecate_kwarg

from .fused import SiteHook
from .sites import ConvSite, Family

__all__ = ["FAMILY", "PooledLfm2ShortConv"]

_PACKED = ("seq_idx", "cu_seqlens")


class PooledLfm2ShortConv(Lfm2ShortConv):
    """The convolution of an attached model; the stock one without a cache, and in training."""

    _sconv_hook: SiteHook

    @force_accelerate_hooks("conv")
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        hidden_states: Tensor,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Project, gate, convolve, gate, project: ``[B, T, D]`` in and out; mask ``[B, T]``."""
        if cache is None or self.training:
            output: Tensor = super().forward(
                hidden_states, cache=cache, attention_mask=attention_mask, **kwargs
            )
            return output
        if packed := [name for name in _PACKED if kwargs.get(name) is not None]:
            raise ValueError(
                f"{packed[0]} packs several sequences into a row, which a cache cannot follow: "
                "call the model with use_cache=False"
            )
        projected = hidden_states
        if attention_mask is not None:
            # Before the projection, so that its bias reaches the taps of padded positions as in
            # stock.
            projected = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)
        gate_in, gate_out, x = self.in_proj(projected).chunk(3, dim=-1)
        y = self._sconv_hook.convolve(
            cache, hidden_states, gate_in * x, self.conv.weight, bias=self.conv.bias
        )
        gated: Tensor = self.out_proj(gate_out * y)
        return gated


def _sites(model: Lfm2ForCausalLM) -> list[ConvSite]:
    modules = [layer.conv for layer in model.model.layers if not layer.is_attention_layer]
    return [
        ConvSite(
            module=module,
            weight=module.conv.weight,
            layer_id=index,
            stream="conv",
            cache_layer=module.layer_idx,
            state_idx=0,
        )
        for index, module in enumerate(modules)
    ]


FAMILY = Family(
    model_class=Lfm2ForCausalLM,
    fused_class=PooledLfm2ShortConv,
    window_axis="channel",
    sites=_sites,
    state_dtype=lambda dtype: dtype,
    static_fault=lambda layer: None,
)
