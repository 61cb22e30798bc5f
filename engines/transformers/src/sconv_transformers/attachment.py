"""Attach an unmodified Hugging Face model to an sconv backend."""

from __future__ import annotations

from types import TracebackType
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

import sconv
from sconv import WindowLayout

from . import inkling, lfm2
from .binding import Binding
from .fused import SiteHook
from .layers import binding_of, convert, is_static
from .leases import SlotLedger
from .runner import Counters, StepRunner
from .sites import ConvSite, Family, state_spec
from .transfer import export_states, import_states

__all__ = ["FAMILIES", "Attachment", "attach"]

FAMILIES: tuple[Family, ...] = (inkling.FAMILY, lfm2.FAMILY)

#: Cache layers and conv modules are private to transformers, so a minor version is checked by hand.
_TESTED = "5.24."


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
    modules change until :meth:`Attachment.detach`. Caches are adopted at their first forward.

    Args:
        model: An ``InklingForCausalLM`` or ``Lfm2ForCausalLM`` on one device, in its final dtype.
        backend: Name of an sconv backend; ``"auto"`` takes the best one for the model's device.
        max_requests: Most rows whose state is alive at the same time: sequences or beams of running
            generations, and the rows of every cache that is kept.
        max_rollback: Most tokens that assisted decoding takes back at once, so at least its number
            of draft tokens; 0 refuses assisted decoding. What a verify step keeps takes memory in
            proportion to ``max_requests * max_rollback``.
        window_layout: How it is kept, see ``sconv.StateSpec``; ``"auto"`` leaves it to the backend.

    Raises:
        TypeError: The model is of no supported family.
        ValueError: It is attached already, lies on several devices, or has no convolutions.
        RuntimeError: The installed transformers is of another minor version.
        sconv.BackendNotFoundError: No installed backend has that name.
        sconv.BackendUnavailableError: That backend cannot run here.
    """
    if not transformers.__version__.startswith(_TESTED):
        raise RuntimeError(
            f"sconv_transformers works with transformers {_TESTED}*, found "
            f"{transformers.__version__}"
        )
    family = _family(model)
    sites = family.sites(model)
    if not sites:
        raise ValueError(
            "the model has no convolution layers (layer_types names none): nothing to attach"
        )
    if any(type(site.module) is family.fused_class for site in sites):
        raise ValueError("the model is attached already: call detach() on its Attachment first")
    device = _single_device(sites)
    spec = state_spec(
        family,
        sites,
        # Not that of the convolutions: Inkling keeps those in float32 in a bfloat16 model.
        dtype=model.dtype,
        max_requests=max_requests,
        max_rollback=max_rollback,
        window_layout=window_layout,
    )
    # Under inference mode the pool could not be written outside of it later.
    with torch.inference_mode(False):
        loaded = sconv.load_backend(backend, spec=spec, device=device)
        loaded.warmup()
    return Attachment(model, family, sites, StepRunner(loaded, max_rollback))


class Attachment:
    """An attached model. Also a context manager that detaches at its end.

    Attributes:
        model: The model.
        family: What it is.
        sites: Its convolutions, in the order of a forward.
        runner: Calls the backend.
    """

    def __init__(
        self, model: nn.Module, family: Family, sites: list[ConvSite], runner: StepRunner
    ) -> None:
        """Attach; use :func:`attach`, which also builds the backend."""
        self.model = model
        self.family = family
        self.sites = sites
        self.runner = runner
        self._ledger = SlotLedger(runner.backend.pool, runner.backend.spec.max_requests)
        self._stock_class = type(sites[0].module)
        self._attached = True
        for site in sites:
            module: Any = site.module
            module.__class__ = family.fused_class
            module._sconv_hook = SiteHook(self, site, opens=site is sites[0])
        self._announce = model.register_forward_pre_hook(
            self._read_logits_to_keep, with_kwargs=True
        )

    @property
    def backend(self) -> sconv.Backend:
        """The backend that holds the state and runs the convolutions."""
        return self.runner.backend

    @property
    def counters(self) -> Counters:
        """What was called since the model was attached."""
        return self.runner.counters

    @property
    def state_bytes(self) -> int:
        """Physical bytes of the pool: the windows of all slots and the verify windows."""
        return self.backend.pool.nbytes

    @property
    def rows_held(self) -> int:
        """Rows whose state is alive now, of ``max_requests``."""
        return self._ledger.rows_held

    @property
    def attached(self) -> bool:
        """Whether :meth:`detach` has not been called."""
        return self._attached

    def detach(self) -> None:
        """Give the model its stock modules back. A second call does nothing.

        Caches filled while it was attached keep their state in the pool: :meth:`export` those that
        the stock model shall continue.
        """
        if not self._attached:
            return
        self._attached = False
        self._announce.remove()
        for site in self.sites:
            module: Any = site.module
            module.__class__ = self._stock_class
            del module._sconv_hook

    def export(self, cache: Cache) -> None:
        """Turn a pooled cache into a stock one, in place, and return its slots. Works after detach.

        Raises:
            ValueError: The cache is not one of this model.
        """
        index = self.sites[0].cache_layer
        binding = binding_of(cache.layers[index]) if index < len(cache.layers) else None
        if binding is None or binding.runner is not self.runner:
            raise ValueError(
                "export: the convolution state of this cache is not in this model's pool"
            )
        export_states(cache, binding, self.sites, self.family.state_dtype(self.backend.spec.dtype))

    def adopt(self, cache: Cache) -> Binding:
        """Move the convolution state of a stock cache, if it has any, to the pool.

        Called by the first convolution that sees the cache.

        Raises:
            TypeError: A layer of the cache can hold no convolution state.
            ValueError: The cache is of a mode that transformers itself gets wrong; it says which.
            sconv.PoolExhaustedError: Live caches hold too many rows.
        """
        layers = cache.layers
        indices = sorted({site.cache_layer for site in self.sites})
        if indices[-1] >= len(layers):
            raise TypeError(
                f"the cache has {len(layers)} layers, the model's convolutions need "
                f"{indices[-1] + 1}: make it with the model's config, "
                "DynamicCache(config=model.config)"
            )
        for layer in layers:
            if fault := self.family.static_fault(layer):
                raise ValueError(
                    "a static cache is refused for this model: in transformers "
                    f"{transformers.__version__} {fault}. Use a dynamic cache"
                )
        static = any(map(is_static, layers))
        binding = Binding(self.runner, self._ledger, len(self.sites), static=static)
        import_states(cache, binding, self.sites)
        for index in indices:
            convert(layers[index], binding, leads=index == indices[0])
        return binding

    def check_input(self, hidden_states: Tensor) -> None:
        """Refuse activations that the state cannot hold without loss.

        Raises:
            ValueError: The model was moved or cast since it was attached.
        """
        spec, device = self.backend.spec, self.backend.pool.device
        if torch.promote_types(hidden_states.dtype, spec.dtype) != spec.dtype:
            raise ValueError(
                f"the model computes in {hidden_states.dtype}, but its state was made for "
                f"{spec.dtype}: detach and attach again after a cast"
            )
        if hidden_states.device != device:
            raise ValueError(
                f"the model computes on {hidden_states.device}, but its state lies on {device}: "
                "detach and attach again after a move"
            )

    def _read_logits_to_keep(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Learn how many of the forward's tokens are candidates, which only ``generate`` knows."""
        logits = kwargs.get("logits_to_keep")
        self.runner.announced_logits = logits if isinstance(logits, int) and logits > 0 else None

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.detach()

    def __deepcopy__(self, memo: dict[int, object]) -> Attachment:
        """A copied model shares the pool of the original."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("an attached model cannot be pickled: call Attachment.detach() first")


def _family(model: nn.Module) -> Family:
    for family in FAMILIES:
        if isinstance(model, family.model_class):
            return family
    names = ", ".join(family.model_class.__name__ for family in FAMILIES)
    raise TypeError(f"cannot attach a {type(model).__name__}: supported are {names}")


def _single_device(sites: list[ConvSite]) -> torch.device:
    devices = {site.weight.device for site in sites}
    if len(devices) > 1 or torch.device("meta") in devices:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"the model's convolutions lie on {names}: one attachment has its state on one device. "
            "Load the model without a device map"
        )
    return devices.pop()
