"""Convolutions of a registered model, which compute themselves and have only their state in a pool.

Such a module is written for a transformers cache: it hands its inputs to
``cache.update_conv_state`` and convolves what it gets back, the inputs before and the new ones, of
which it keeps the outputs of the new ones. Mask, bias and activation stay its own business.
"""

from __future__ import annotations

from functools import cache as memoize
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from .conv_hook import hook_of
from .conv_modules import ConvKind

__all__ = ["self_computed"]


@memoize
def self_computed(stock: type[nn.Module]) -> ConvKind:
    """Return how modules of a class are served without knowing what they compute."""
    stock_forward: Any = stock.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        cache = next((value for value in values if isinstance(value, Cache)), None)
        hook = hook_of(self)
        if hook is None or cache is None or self.training:
            return stock_forward(self, *args, **kwargs)
        return hook.serve(cache, partial(stock_forward, self, *args, **kwargs))

    members = {
        "__doc__": f"{stock.__name__} of an attached model.",
        # Host bookkeeping around and in it.
        "forward": torch.compiler.disable(forward),
    }
    return ConvKind(
        pooled_class=type(f"Pooled{stock.__name__}", (stock,), members), stock_class=stock
    )
