"""What a plugin imports, beside the names of :mod:`sconv` itself.

A backend describes itself with :class:`BackendInfo`, which needs no torch, and implements the hooks
of :mod:`sconv.hookspecs`: from nothing, on :class:`PluginBackend` (the order of a step) or on
:class:`TorchBackend` (every hook in plain torch). The names below change only with the contract's
version; ``docs/reference/plugin-door.md`` says what is promised of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ._exports import lazy_names

if TYPE_CHECKING:
    from .discovery.load_check import (
        check_discovery as check_discovery,
    )
    from .discovery.load_check import (
        check_implementation as check_implementation,
    )
    from .engine.graphs import (
        CapturedStep as CapturedStep,
    )
    from .engine.graphs import (
        capture as capture,
    )
    from .engine.graphs import (
        has_graphs as has_graphs,
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
        Unavailable as Unavailable,
    )
    from .hookspecs import (
        hookimpl as hookimpl,
    )
    from .messages import (
        kind_of as kind_of,
    )
    from .messages import (
        one_line_error as one_line_error,
    )
    from .state.recurrent import (
        DeltaRecords as DeltaRecords,
    )
    from .state.recurrent import (
        RecurrentState as RecurrentState,
    )
    from .state.recurrent import (
        fold as fold,
    )
    from .state.windows import (
        DedupWindows as DedupWindows,
    )
    from .state.windows import (
        InputWindows as InputWindows,
    )
    from .state.windows import (
        VerifyWindows as VerifyWindows,
    )
    from .state.windows import (
        choose_layout as choose_layout,
    )
    from .state.windows import (
        make_windows as make_windows,
    )
    from .step.batch_checks import (
        check_batch as check_batch,
    )
    from .step.batch_checks import (
        check_commit as check_commit,
    )
    from .step.draft_tree import (
        ancestor_taps as ancestor_taps,
    )
    from .step.draft_tree import (
        parents_from_links as parents_from_links,
    )
    from .step.metadata import (
        MetadataBuffers as MetadataBuffers,
    )
    from .step.metadata import (
        ShortConvMetadata as ShortConvMetadata,
    )
    from .step.tracking import crossing_steps as crossing_steps
    from .torch_backend.backend import TorchBackend as TorchBackend
    from .torch_backend.base import PluginBackend as PluginBackend
    from .torch_backend.convolution import (
        ConvParams as ConvParams,
    )
    from .torch_backend.convolution import (
        convolve as convolve,
    )
    from .torch_backend.convolution import (
        sum_taps as sum_taps,
    )
    from .torch_backend.fill_metadata import fill_metadata as fill_metadata
    from .torch_backend.state_rows import StateRows as StateRows

#: Where each name is defined. Type checkers read the imports above.
_HOMES: Final[dict[str, tuple[str, ...]]] = {
    "discovery.load_check": ("check_discovery", "check_implementation"),
    "engine.graphs": ("CapturedStep", "capture", "has_graphs"),
    "hookspecs": (
        "CONTRACT_VERSION",
        "Available",
        "BackendInfo",
        "Capabilities",
        "Unavailable",
        "hookimpl",
    ),
    "messages": ("kind_of", "one_line_error"),
    "state.recurrent": ("DeltaRecords", "RecurrentState", "fold"),
    "state.windows": (
        "DedupWindows",
        "InputWindows",
        "VerifyWindows",
        "choose_layout",
        "make_windows",
    ),
    "step.batch_checks": ("check_batch", "check_commit"),
    "step.draft_tree": ("ancestor_taps", "parents_from_links"),
    "step.metadata": ("MetadataBuffers", "ShortConvMetadata"),
    "step.tracking": ("crossing_steps",),
    "torch_backend.backend": ("TorchBackend",),
    "torch_backend.base": ("PluginBackend",),
    "torch_backend.convolution": ("ConvParams", "convolve", "sum_taps"),
    "torch_backend.fill_metadata": ("fill_metadata",),
    "torch_backend.state_rows": ("StateRows",),
}
__all__ = [name for names in _HOMES.values() for name in names]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
