"""How the convolution module of an attached model reaches the pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .cache_binding import Binding
from .conv_modules import ConvModule
from .model_state import ModelState

__all__ = ["ConvHook", "hook_of"]


def hook_of(module: object) -> ConvHook | None:
    """Return what :func:`sconv_transformers.attach` put on a module, None if nothing."""
    hook: ConvHook | None = getattr(module, "_sconv_hook", None)
    return hook


@dataclass(frozen=True, slots=True)
class ConvHook:
    """What :func:`sconv_transformers.attach` puts on a convolution module.

    Attributes:
        state: The state of the model that the module belongs to.
        conv: Which convolution it is.
        opens: It is the first convolution of a forward, so it prepares the step.
    """

    state: ModelState
    conv: ConvModule
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
        """Convolve ``x`` and advance the state of its rows.

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

    def serve(self, cache: Cache, forward: Callable[[], Any]) -> Any:
        """Run a module's own forward, whose calls of ``cache.update_conv_state`` reach the pool.

        Raises:
            RuntimeError: The forward made no such call, so it keeps its state elsewhere.
        """
        with self.state.runner.lock:
            binding = self.state.binding(cache)
        served = False

        def advance(inputs: Tensor, state_idx: int) -> Tensor:
            nonlocal served
            served = True
            if state_idx != self.conv.state_idx:
                raise RuntimeError(
                    f"a convolution of cache layer {self.conv.cache_layer} updates state "
                    f"{state_idx}, but its module's conv_idx is {self.conv.state_idx}"
                )
            x = inputs.detach().transpose(1, 2)
            with torch.no_grad(), self.state.runner.lock:
                self._open(binding, cache, x, x)
                return binding.advance(self.conv, x).transpose(1, 2)

        binding.advancing = advance
        try:
            result = forward()
        finally:
            binding.advancing = None
        if not served:
            raise RuntimeError(
                f"{type(self.conv.module).__qualname__} of cache layer {self.conv.cache_layer} did "
                "not call cache.update_conv_state, so its state is not in the pool: its class "
                "cannot be named in conv_modules"
            )
        return result

    def _open(self, binding: Binding, cache: Cache, hidden_states: Tensor, x: Tensor) -> None:
        if self.opens:
            self.state.check_input(hidden_states)
            recording = cache.is_recording_past(self.conv.cache_layer)
            binding.begin(x.shape[0], x.shape[1], recording=recording)

    def __deepcopy__(self, memo: dict[int, object]) -> ConvHook:
        """A copied model shares the pool of the original."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an attached model cannot be pickled: call sconv_transformers.detach(model) first"
        )


def _convolve(
    hook: ConvHook,
    cache: Cache,
    hidden_states: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: bool,
) -> Tensor:
    with hook.state.runner.lock:
        binding = hook.state.binding(cache)
        hook._open(binding, cache, hidden_states, x)
        return binding.convolve(hook.conv, x, weight, bias, residual)


# Host bookkeeping in the middle of a graph: dynamo breaks there, and the rest stays compiled.
_convolve_uncompiled = torch.compiler.disable(_convolve)


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
