"""Short-convolution state for hybrid LLM inference: what engines import.

An engine calls :func:`load_backend` and then the methods of the :class:`Backend` it gets. A plugin
imports from here, from :mod:`sconv.plugin` and, in tests, from :mod:`sconv.testing`; every other
module is private.

Importing this package is cheap: every public name is imported when it is first used, and only the
names that work on tensors need torch, which arrives with a plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ._exports import lazy_names

if TYPE_CHECKING:
    from . import reference as reference
    from .discovery.selection import backends as backends
    from .discovery.torch_failure import torch_failure as torch_failure
    from .engine import nn as nn
    from .engine.backend import Backend as Backend
    from .engine.graphs import (
        CapturedStep as CapturedStep,
    )
    from .engine.graphs import (
        capture as capture,
    )
    from .engine.graphs import (
        has_graphs as has_graphs,
    )
    from .engine.hybrid import (
        FullAttentionBackend as FullAttentionBackend,
    )
    from .engine.hybrid import (
        HybridBackend as HybridBackend,
    )
    from .engine.hybrid import (
        wrap_for_draft_extend as wrap_for_draft_extend,
    )
    from .engine.loading import (
        choose_device as choose_device,
    )
    from .engine.loading import (
        load_backend as load_backend,
    )
    from .engine.planning import (
        LayoutPlan as LayoutPlan,
    )
    from .engine.planning import (
        Plan as Plan,
    )
    from .engine.planning import (
        plan as plan,
    )
    from .engine.registry import (
        LinearAttnModelSpec as LinearAttnModelSpec,
    )
    from .engine.registry import (
        linear_attn_config as linear_attn_config,
    )
    from .engine.registry import (
        linear_attn_spec as linear_attn_spec,
    )
    from .engine.registry import (
        linear_attn_spec_by_arch as linear_attn_spec_by_arch,
    )
    from .engine.registry import (
        linear_attn_specs as linear_attn_specs,
    )
    from .engine.registry import (
        register_linear_attn_model as register_linear_attn_model,
    )
    from .errors import (
        BackendNotFoundError as BackendNotFoundError,
    )
    from .errors import (
        BackendUnavailableError as BackendUnavailableError,
    )
    from .errors import (
        BatchError as BatchError,
    )
    from .errors import (
        ContractError as ContractError,
    )
    from .errors import (
        GraphBufferError as GraphBufferError,
    )
    from .errors import (
        MetadataError as MetadataError,
    )
    from .errors import (
        PluginError as PluginError,
    )
    from .errors import (
        PoolError as PoolError,
    )
    from .errors import (
        PoolExhaustedError as PoolExhaustedError,
    )
    from .errors import (
        SconvError as SconvError,
    )
    from .errors import (
        SlotError as SlotError,
    )
    from .errors import (
        SpecError as SpecError,
    )
    from .errors import (
        TorchUnavailableError as TorchUnavailableError,
    )
    from .hookspecs import (
        CONTRACT_VERSION as CONTRACT_VERSION,
    )
    from .hookspecs import (
        Available as Available,
    )
    from .hookspecs import (
        BackendInfo as BackendInfo,
    )
    from .hookspecs import (
        Capabilities as Capabilities,
    )
    from .hookspecs import (
        Origin as Origin,
    )
    from .hookspecs import (
        Unavailable as Unavailable,
    )
    from .hookspecs import (
        hookimpl as hookimpl,
    )
    from .state.exported import ExportedState as ExportedState
    from .state.gated_delta import GatedDelta as GatedDelta
    from .state.pool import ConvStatePool as ConvStatePool
    from .state.spec import (
        StateSpec as StateSpec,
    )
    from .state.spec import (
        Stream as Stream,
    )
    from .state.spec import (
        WindowLayout as WindowLayout,
    )
    from .step.batch import (
        ForwardBatch as ForwardBatch,
    )
    from .step.batch import (
        ForwardMode as ForwardMode,
    )
    from .step.metadata import ShortConvMetadata as ShortConvMetadata
    from .step.tracking import (
        align_track_seqlens as align_track_seqlens,
    )
    from .step.tracking import (
        crossing_steps as crossing_steps,
    )
    from .step.tracking import (
        decode_track_mask as decode_track_mask,
    )
    from .step.tracking import (
        verify_step_indices as verify_step_indices,
    )

    __version__: str

#: Where each public name is defined. Type checkers read the imports above.
_HOMES: Final[dict[str, tuple[str, ...]]] = {
    "discovery.selection": ("backends",),
    "discovery.torch_failure": ("torch_failure",),
    "engine.backend": ("Backend",),
    "engine.graphs": ("CapturedStep", "capture", "has_graphs"),
    "engine.hybrid": ("FullAttentionBackend", "HybridBackend", "wrap_for_draft_extend"),
    "engine.loading": ("choose_device", "load_backend"),
    "engine.planning": ("LayoutPlan", "Plan", "plan"),
    "engine.registry": (
        "LinearAttnModelSpec",
        "linear_attn_config",
        "linear_attn_spec",
        "linear_attn_spec_by_arch",
        "linear_attn_specs",
        "register_linear_attn_model",
    ),
    "errors": (
        "BackendNotFoundError",
        "BackendUnavailableError",
        "BatchError",
        "ContractError",
        "GraphBufferError",
        "MetadataError",
        "PluginError",
        "PoolError",
        "PoolExhaustedError",
        "SconvError",
        "SlotError",
        "SpecError",
        "TorchUnavailableError",
    ),
    "hookspecs": (
        "CONTRACT_VERSION",
        "Available",
        "BackendInfo",
        "Capabilities",
        "Origin",
        "Unavailable",
        "hookimpl",
    ),
    "state.exported": ("ExportedState",),
    "state.gated_delta": ("GatedDelta",),
    "state.pool": ("ConvStatePool",),
    "state.spec": ("StateSpec", "Stream", "WindowLayout"),
    "step.batch": ("ForwardBatch", "ForwardMode"),
    "step.metadata": ("ShortConvMetadata",),
    "step.tracking": (
        "align_track_seqlens",
        "crossing_steps",
        "decode_track_mask",
        "verify_step_indices",
    ),
}
_MODULES: Final = {"nn": "engine.nn", "reference": "reference"}

__all__ = [
    "__version__",
    *_MODULES,
    *(name for names in _HOMES.values() for name in names),
]

_lazy, __dir__ = lazy_names(__name__, _HOMES, _MODULES)


def __getattr__(name: str) -> Any:
    if name != "__version__":
        return _lazy(name)
    from importlib_metadata import version

    globals()[name] = found = version("sconv-core")
    return found
