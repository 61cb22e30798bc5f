"""Cache layers whose convolution state lives in a pool.

A live layer is converted by assigning its class, so caches made by ``generate``, by the model or by
the user all work, and attention's keys and values stay where they are. The stock layer then
believes that its convolution states were never made: its own code for reset, reorder and offload
skips them. Of the pooled layers of a cache the first one acts for all, so one call on a cache is
one call on the backend.
"""

from __future__ import annotations

import copy
from functools import cache as memoize
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    StaticLayer,
)

from .cache_binding import Binding

__all__ = ["binding_of", "convert", "is_static", "restore"]

_CONVERTIBLE = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
)


def binding_of(layer: object) -> Binding | None:
    """Return what a pooled layer is tied to, None for a stock layer."""
    return getattr(layer, "_sconv_binding", None)


def is_static(layer: object) -> bool:
    """Whether a cache layer has a fixed size."""
    return isinstance(layer, StaticLayer)


def convert(layer: Any, binding: Binding, *, leads: bool) -> None:
    """Turn a stock cache layer into a pooled one.

    Args:
        layer: A layer whose convolution states were moved to the pool, if it had any.
        binding: What it is tied to.
        leads: It is the first pooled layer of its cache and acts for all.

    Raises:
        TypeError: Layers of this class hold no convolution state that is known here.
    """
    if type(layer) not in _CONVERTIBLE:
        raise TypeError(
            f"cache layer {type(layer).__name__} has no convolution state that can be pooled; "
            f"expected one of {', '.join(kind.__name__ for kind in _CONVERTIBLE)}. Make the cache "
            "with the model's config: DynamicCache(config=model.config)"
        )
    for index in range(layer.number_of_states):
        layer.conv_states[index] = None
        layer.is_conv_states_initialized[index] = False
        layer.has_previous_state[index] = False
    layer.__class__ = _pooled(type(layer))
    layer._sconv_binding = binding
    layer._sconv_leads = leads


def restore(layer: Any) -> None:
    """Turn a pooled layer into the stock layer it was, without convolution state."""
    layer.__class__ = layer._sconv_stock
    del layer._sconv_binding, layer._sconv_leads


@memoize
def _pooled(stock: type) -> type:
    """Make the pooled class of a stock class.

    ``__class__`` can only be assigned between classes of one layout, which a mixin in front of the
    stock class would change; hence one plain subclass per stock class, with the functions below.
    """
    members: dict[str, Any] = {
        "__doc__": f"{stock.__name__} whose convolution state is in an sconv pool.",
        "_sconv_stock": stock,
        "is_croppable": property(_is_croppable),
        "reset": _reset,
        "reorder_cache": _reorder_cache,
        "crop": _crop,
        "batch_repeat_interleave": _batch_repeat_interleave,
        "batch_select_indices": _batch_select_indices,
        "update_conv_state": _update_conv_state,
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": _reduce_ex,
    }
    return type(f"Pooled{stock.__name__}", (stock,), members)


def _is_croppable(self: Any) -> bool:
    return self._sconv_binding.has_state and not self._sconv_binding.static


def _reset(self: Any) -> None:
    self._sconv_stock.reset(self)
    if self._sconv_leads:
        self._sconv_binding.reset()


def _reorder_cache(self: Any, beam_idx: Tensor) -> None:
    self._sconv_stock.reorder_cache(self, beam_idx)
    if self._sconv_leads:
        runner = self._sconv_binding.runner
        with runner.lock:
            runner.counters.reorders += 1
            self._sconv_binding.select_rows(beam_idx.tolist())


def _crop(self: Any, tokens_to_remove: int) -> None:
    if tokens_to_remove > 0:
        raise RuntimeError(
            f"crop({tokens_to_remove}): pass the number of tokens to remove as a negative int"
        )
    if not self.record_past:
        raise RuntimeError(
            "crop of a cache that does not record: call cache.activate_past_recording() before "
            "the forward that may have to be taken back"
        )
    if self._sconv_leads:
        self._sconv_binding.crop(-tokens_to_remove)
    # Stock runs its convolution crop first, which would trip over the missing states.
    for attention in (DynamicSlidingWindowLayer, DynamicLayer):
        if isinstance(self, attention):
            attention.crop(self, tokens_to_remove)
            return


def _batch_repeat_interleave(self: Any, repeats: int) -> None:
    if self._sconv_leads:
        binding = self._sconv_binding
        binding.select_rows([row for row in range(binding.rows) for _ in range(repeats)])
    _resize_attention(self, "batch_repeat_interleave", repeats)


def _batch_select_indices(self: Any, indices: Tensor) -> None:
    if self._sconv_leads:
        binding = self._sconv_binding
        # Through a range, so that masks and negative indices mean what they mean for keys and
        # values.
        binding.select_rows(torch.arange(binding.rows)[indices.cpu()].tolist())
    _resize_attention(self, "batch_select_indices", indices)


def _resize_attention(layer: Any, method: str, argument: object) -> None:
    if isinstance(layer, StaticLayer):
        raise TypeError(f"{method}: a static cache has a fixed batch; use a dynamic cache")
    if isinstance(layer, DynamicLayer):
        getattr(DynamicLayer, method)(layer, argument)


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    other = memo[id(self)] = object.__new__(type(self))
    other.__dict__.update(copy.deepcopy(self.__dict__, memo))
    return other


def _reduce_ex(self: Any, protocol: SupportsIndex) -> NoReturn:
    raise TypeError(
        "the convolution state of this cache is in an sconv pool and cannot be pickled; call "
        "Attachment.export(cache) first"
    )


def _update_conv_state(
    self: Any, conv_states: Tensor, state_idx: int = 0, **kwargs: object
) -> Tensor:
    advancing = self._sconv_binding.advancing
    if advancing is not None:
        full: Tensor = advancing(conv_states, state_idx)
        return full
    raise RuntimeError(
        "the convolution state of this cache is in the sconv pool of an attached model, which "
        "is not the model that runs now, is in training mode, or was detached: call "
        "Attachment.export(cache) to turn the cache into a stock one"
    )
