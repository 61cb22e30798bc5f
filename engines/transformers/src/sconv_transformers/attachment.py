"""Attach an unmodified Hugging Face model to an sconv backend."""

from __future__ import annotations

from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

import sconv
from sconv import LinearAttnModelSpec, WindowLayout

from . import inkling, lfm2
from .conv_hook import ConvHook, hook_of
from .conv_modules import ConvKind, ConvModule, find_conv_modules, state_spec
from .model_state import ModelState
from .self_computed import self_computed
from .step_runner import Counters, StepRunner
from .transformers_range import check_transformers
from .wrapped_models import (
    check_forward,
    guard_generate,
    reroute_forward,
    unguard_generate,
    unwrapped,
)

__all__ = ["Attachment", "attach", "detach"]

#: Classes whose arithmetic runs in the backend too; of others only the state is there.
_KINDS = {kind.stock_class: kind for kind in (inkling.KIND, lfm2.KIND)}


def attach(
    model: PreTrainedModel,
    backend: str = "auto",
    *,
    max_requests: int = 16,
    max_rollback: int = 32,
    window_layout: WindowLayout = "auto",
) -> Attachment:
    """Make a model keep its convolution state in an sconv pool. ``model.generate`` works as before.

    The parameters, the config and the class of the model stay as they are; the classes of its conv
    modules change until :meth:`Attachment.detach` or :func:`detach`. Caches are adopted at their
    first forward. Threads may use the model at the same time, each with its own cache.

    Args:
        model: A model of a family in sconv's registry (:func:`sconv.register_linear_attn_model`),
            where Inkling and LFM2 are, on one device, in its final dtype. What ``torch.compile``
            or PEFT wrapped is unwrapped.
        backend: Name of an sconv backend; ``"auto"`` takes the best one for the model's device.
        max_requests: Most rows whose state is alive at the same time: sequences or beams of running
            generations, and the rows of every cache that is kept.
        max_rollback: Most tokens that assisted decoding takes back at once, so at least its number
            of draft tokens; 0 refuses assisted decoding. What a verify step keeps takes memory in
            proportion to ``max_requests * max_rollback``.
        window_layout: How it is kept, see ``sconv.StateSpec``; ``"auto"`` leaves it to the backend.

    Raises:
        TypeError: The model is of no registered family, a module is of a subclass of its
            convolutions' class, or has a ``forward`` that was replaced.
        ValueError: It is attached already, lies on several devices, or has no convolutions; or a
            size is not one.
        RuntimeError: The installed transformers is outside of the supported range.
        sconv.BackendNotFoundError: No installed backend has that name.
        sconv.BackendUnavailableError: That backend cannot run here.
    """
    check_transformers()
    _check_size("max_requests", max_requests, least=1)
    _check_size("max_rollback", max_rollback, least=0)
    inner: Any = unwrapped(model)
    family = _family(inner)
    if any(hook_of(module) for module in inner.modules()):
        raise ValueError(
            "the model is attached already: call sconv_transformers.detach(model) first"
        )
    convolutions = find_conv_modules(inner, family, _kind_of)
    if not convolutions:
        raise ValueError(
            f"the model has no convolution layers (modules of {_names(family.conv_modules)}): "
            "nothing to attach"
        )
    names = {module: name for name, module in inner.named_modules()}
    for conv in convolutions:
        check_forward(conv, names[conv.module])
    device = _single_device(convolutions)
    spec = state_spec(
        convolutions,
        # Not that of the convolutions: Inkling keeps those in float32 in a bfloat16 model.
        dtype=inner.dtype,
        max_requests=max_requests,
        max_rollback=max_rollback,
        window_layout=window_layout,
    )
    # Under inference mode the pool could not be written outside of it later.
    with torch.inference_mode(False):
        loaded = sconv.load_backend(backend, spec=spec, device=device)
        loaded.warmup()
    return Attachment(inner, family, ModelState(convolutions, StepRunner(loaded, max_rollback)))


def detach(model: nn.Module) -> None:
    """Give a model its stock modules back, whoever has its :class:`Attachment`; copies too.

    Nothing happens to a model that is not attached. Caches filled while it was attached keep their
    state in the pool: :meth:`Attachment.export` those that the stock model shall continue.
    """
    model = unwrapped(model)
    for module in model.modules():
        hook = hook_of(module)
        if hook is not None:
            kind = hook.conv.kind
            module.__class__ = kind.stock_class
            reroute_forward(module, kind.pooled_class, kind.stock_class)
            del module._sconv_hook
    for key, called in list(model._forward_pre_hooks.items()):
        if isinstance(getattr(called, "__self__", None), ModelState):
            del model._forward_pre_hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)
    unguard_generate(model)


class Attachment:
    """An attached model. Also a context manager that detaches at its end.

    Attributes:
        model: The model, unwrapped.
        family: What it is.
        state: Its state, which copies of the model share.
    """

    def __init__(self, model: nn.Module, family: LinearAttnModelSpec, state: ModelState) -> None:
        """Attach; use :func:`attach`, which also builds the backend."""
        self.model = model
        self.family = family
        self.state = state
        for conv in state.convolutions:
            module: Any = conv.module
            reroute_forward(module, conv.kind.stock_class, conv.kind.pooled_class)
            module.__class__ = conv.kind.pooled_class
            module._sconv_hook = ConvHook(state, conv, opens=conv is state.convolutions[0])
        model.register_forward_pre_hook(state.announce, with_kwargs=True)
        guard_generate(model)

    def __repr__(self) -> str:
        what = type(self.model).__name__
        if not self.attached:
            return f"<sconv_transformers.Attachment of {what}, detached>"
        rows = f"{self.rows_held} of {self.state.ledger.max_requests} rows held"
        where = f"{self.backend.info.name!r} on {self.backend.device}"
        return f"<sconv_transformers.Attachment of {what} to {where}, {rows}>"

    @property
    def convolutions(self) -> list[ConvModule]:
        """The model's convolutions, in the order of a forward."""
        return self.state.convolutions

    @property
    def backend(self) -> sconv.Backend:
        """The backend that holds the state and runs the convolutions."""
        return self.state.runner.backend

    @property
    def counters(self) -> Counters:
        """What was called since the model was attached."""
        return self.state.runner.counters

    @property
    def state_bytes(self) -> int:
        """Physical bytes of the pool: the windows of all slots and the verify windows."""
        return self.backend.pool.nbytes

    @property
    def rows_held(self) -> int:
        """Rows whose state is alive now, of ``max_requests``."""
        with self.state.runner.lock:
            return self.state.ledger.rows_held

    @property
    def attached(self) -> bool:
        """Whether the model has not been detached."""
        return hook_of(self.convolutions[0].module) is not None

    def detach(self) -> None:
        """Give the model its stock modules back, see :func:`detach`. A second call does nothing."""
        if self.attached:
            detach(self.model)

    def export(self, cache: Cache) -> None:
        """Turn a pooled cache into a stock one, in place, and return its slots. Works after detach.

        Raises:
            ValueError: The cache is not one of this model.
        """
        self.state.export(cache)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.detach()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Attachment cannot be pickled or copied: attach the other model too")


def _family(model: Any) -> LinearAttnModelSpec:
    found = sconv.linear_attn_spec(getattr(model, "config", None))
    if found is not None and found.conv_modules:
        return found
    known = [arch for spec in sconv.linear_attn_specs() for arch in spec.arch_names]
    raise TypeError(
        f"cannot attach a {type(model).__name__}: supported are {', '.join(known)}, and what is "
        "registered with its conv_modules (sconv.register_linear_attn_model)"
    )


def _kind_of(stock: type) -> ConvKind:
    return _KINDS.get(stock) or self_computed(stock)


def _names(classes: tuple[type | str, ...]) -> str:
    return ", ".join(
        named.__qualname__ if isinstance(named, type) else named.rpartition(".")[2]
        for named in classes
    )


def _check_size(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r}: expected an int of {least} or more")


def _single_device(convolutions: list[ConvModule]) -> torch.device:
    devices = {conv.weight.device for conv in convolutions}
    if len(devices) > 1 or torch.device("meta") in devices:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"the model's convolutions are on {names}: one attachment has its state on one device. "
            "Load the model without a device map"
        )
    return devices.pop()
