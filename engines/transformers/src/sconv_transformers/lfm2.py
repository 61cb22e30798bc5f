"""LFM2: one gated convolution in some of the layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from .conv_hook import hook_of
from .conv_modules import ConvKind

__all__ = ["KIND", "PooledLfm2ShortConv"]

_PACKED = ("seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")


class PooledLfm2ShortConv(Lfm2ShortConv):
    """The convolution of an attached model; the stock one without a cache, and in training."""

    @force_accelerate_hooks("conv")
    def forward(
        self,
        hidden_states: Tensor,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Project, gate, convolve, gate, project: ``[B, T, D]`` in and out; mask ``[B, T]``."""
        # The name of the argument depends on the release; its place does not.
        cache = past_key_values if cache is None else cache
        hook = hook_of(self)
        # accelerate may hold on to this method of a model that was detached.
        if hook is None or cache is None or self.training:
            output: Tensor = Lfm2ShortConv.forward(
                self, hidden_states, cache, attention_mask, **kwargs
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
        y = hook.convolve(cache, hidden_states, gate_in * x, self.conv.weight, bias=self.conv.bias)
        gated: Tensor = self.out_proj(gate_out * y)
        return gated


KIND = ConvKind(pooled_class=PooledLfm2ShortConv, stock_class=Lfm2ShortConv)
