"""How the conv module of an attached model reaches the pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from .binding import Binding
from .layers import binding_of
from .sites import ConvSite

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

    from .attachment import Attachment

__all__ = ["SiteHook"]


@dataclass(frozen=True, slots=True)
class SiteHook:
    """What :func:`sconv_transformers.attach` puts on a conv module.

    Attributes:
        attachment: Whose module it is.
        site: Which convolution it is.
        opens: It is the first convolution of a forward, so it prepares the step.
    """

    attachment: Attachment
    site: ConvSite
    opens: bool

    def convolve(
        self,
        cache: Cache,
        hidden_states: Tensor,
        x: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        residual: bool = False,
    ) -> Tensor:
        """Convolve ``x`` and move the state of its rows on.

        Args:
            cache: Whose state.
            hidden_states: What the module received; its dtype is that of the state.
            x: ``[B, T, D]`` inputs of the convolution, padding zeroed.
            weight: ``[D, 1, K]``.
            bias: ``[D]`` or None.
            residual: Add ``x``.

        Returns:
            ``[B, T, D]`` in x's dtype.
        """
        run = _convolve_uncompiled if torch.compiler.is_compiling() else _convolve
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            with torch.no_grad():
                y = run(self, cache, hidden_states, x, weight, bias, residual)
            constant: Tensor = _Constant.apply(y, x, weight)
            return constant
        return run(self, cache, hidden_states, x, weight, bias, residual)

    def __deepcopy__(self, memo: dict[int, object]) -> SiteHook:
        """A copied model shares the pool of the original."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("an attached model cannot be pickled: call Attachment.detach() first")


def _convolve(
    hook: SiteHook,
    cache: Cache,
    hidden_states: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: bool,
) -> Tensor:
    binding = _binding(hook, cache)
    if hook.opens:
        hook.attachment.check_input(hidden_states)
        recording = cache.is_recording_past(hook.site.cache_layer)
        binding.begin(x.shape[0], x.shape[1], recording=recording)
    return binding.convolve(hook.site, x, weight, bias, residual)


# Host bookkeeping in the middle of a graph: dynamo breaks there, and the rest stays compiled.
_convolve_uncompiled = torch.compiler.disable(_convolve)


def _binding(hook: SiteHook, cache: Cache) -> Binding:
    layers = cache.layers
    index = hook.site.cache_layer
    binding = binding_of(layers[index]) if index < len(layers) else None
    if binding is None:
        binding = hook.attachment.adopt(cache)
    elif binding.runner is not hook.attachment.runner:
        raise ValueError(
            "the convolution state of this cache lives in the pool of another attached model; call "
            "export(cache) on that model's Attachment first"
        )
    return binding


class _Constant(torch.autograd.Function):
    """The output of a stateful convolution: a value without a derivative, said aloud."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *inputs: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> NoReturn:
        raise RuntimeError(
            "convolution state in an sconv pool is not differentiable: call the model with "
            "use_cache=False, or model.train() without a cache, to compute gradients"
        )
