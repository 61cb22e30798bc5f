"""The convolution state of one attached model: its pool, and the caches whose state is there."""

from __future__ import annotations

from typing import NoReturn

import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .cache_binding import Binding
from .cache_layers import binding_of, convert, is_static
from .cache_transfer import export_states, import_states
from .conv_modules import ConvModule
from .slot_leases import SlotLedger
from .step_runner import StepRunner

__all__ = ["ModelState"]


class ModelState:
    """What an attached model and its copies share.

    Threads may use the model at the same time, each with its own caches: what touches the backend,
    the pool or a binding holds :attr:`StepRunner.lock`, for one convolution at a time.

    Attributes:
        convolutions: In the order of a forward.
        kinds: How they are served.
        runner: Calls the backend.
        ledger: Where slots come from.
    """

    def __init__(self, convolutions: list[ConvModule], runner: StepRunner) -> None:
        self.convolutions = convolutions
        self.kinds = tuple(dict.fromkeys(conv.kind for conv in convolutions))
        self.runner = runner
        self.ledger = SlotLedger(runner.backend.pool, runner.backend.spec.max_requests)

    def export(self, cache: Cache) -> None:
        """Turn a pooled cache into a stock one, in place, and return its slots. Works after detach.

        Raises:
            ValueError: The cache is not one of this model.
        """
        with self.runner.lock:
            binding = self._binding_of(cache)
            if binding is None or binding.runner is not self.runner:
                raise ValueError(
                    "export: the convolution state of this cache is not in this model's pool"
                )
            export_states(cache, binding, self.convolutions)

    def binding(self, cache: Cache) -> Binding:
        """Return what ties a cache to the pool; a stock cache is adopted. Under the runner's lock.

        Raises:
            ValueError: Its state is in the pool of another attached model; or see :meth:`adopt`.
        """
        binding = self._binding_of(cache)
        if binding is None:
            return self.adopt(cache)
        if binding.runner is not self.runner:
            raise ValueError(
                "the convolution state of this cache is in the pool of another attached model; "
                "call export(cache) on that model's Attachment first"
            )
        return binding

    def adopt(self, cache: Cache) -> Binding:
        """Move the convolution state of a stock cache, if it has any, to the pool.

        Called by the first convolution that sees the cache.

        Raises:
            TypeError: A layer of the cache can hold no convolution state.
            ValueError: The cache is of a mode that transformers itself gets wrong; it says which.
            sconv.PoolExhaustedError: Live caches hold too many rows.
        """
        layers = cache.layers
        indices = sorted({conv.cache_layer for conv in self.convolutions})
        if indices[-1] >= len(layers):
            raise TypeError(
                f"the cache has {len(layers)} layers, the model's convolutions need "
                f"{indices[-1] + 1}: make it with the model's config, "
                "DynamicCache(config=model.config)"
            )
        for layer in layers:
            faults = (kind.static_fault(layer) for kind in self.kinds)
            if fault := next(filter(None, faults), None):
                raise ValueError(
                    "a static cache is refused for this model: in transformers "
                    f"{transformers.__version__} {fault}. Use a dynamic cache"
                )
        static = any(map(is_static, layers))
        binding = Binding(self.runner, self.ledger, len(self.convolutions), static=static)
        import_states(cache, binding, self.convolutions)
        for index in indices:
            convert(layers[index], binding, leads=index == indices[0])
        return binding

    def check_input(self, hidden_states: Tensor) -> None:
        """Refuse activations that the state cannot hold without loss.

        Raises:
            ValueError: The model was moved or cast since it was attached.
        """
        spec, device = self.runner.backend.spec, self.runner.backend.pool.device
        if torch.promote_types(hidden_states.dtype, spec.dtype) != spec.dtype:
            raise ValueError(
                f"the model computes in {hidden_states.dtype}, but its state was made for "
                f"{spec.dtype}: detach and attach again after a cast"
            )
        if hidden_states.device != device:
            raise ValueError(
                f"the model computes on {hidden_states.device}, but its state is on {device}: "
                "detach and attach again after a move"
            )

    def announce(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Learn how many of the forward's tokens are candidates, which only ``generate`` knows.

        A forward pre-hook of the model.

        Raises:
            ValueError: More than can be taken back; nothing has run.
        """
        # A graph would be bound to the thread that it was traced in.
        if torch.compiler.is_compiling():
            return
        logits = kwargs.get("logits_to_keep")
        self.runner.announced.logits = logits if type(logits) is int and logits > 0 else None
        if type(logits) is int and logits - 1 > self.runner.max_rollback > 0:
            index = self.convolutions[0].cache_layer
            caches = [value for value in kwargs.values() if isinstance(value, Cache)]
            if any(cache.is_recording_past(index) for cache in caches):
                raise ValueError(
                    f"this forward verifies {logits - 1} draft tokens, and the model was attached "
                    f"with max_rollback={self.runner.max_rollback}: attach with max_rollback of at "
                    "least the number of draft tokens"
                )

    def _binding_of(self, cache: Cache) -> Binding | None:
        index = self.convolutions[0].cache_layer
        return binding_of(cache.layers[index]) if index < len(cache.layers) else None

    def __deepcopy__(self, memo: dict[int, object]) -> ModelState:
        """A copied model shares the pool of the original."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an attached model cannot be pickled: call sconv_transformers.detach(model) first"
        )
