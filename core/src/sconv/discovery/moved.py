"""Where plugins find what they once imported from modules that are private now."""

from __future__ import annotations

from typing import Final

__all__ = ["MOVED", "moved_hint"]

#: Modules that plugins imported from before core had doors, and what to import instead.
MOVED: Final[dict[str, str]] = {
    "sconv.backend": "from sconv import Backend",
    "sconv.base": "from sconv.plugin import PluginBackend (it was BackendBase)",
    "sconv.batch": "from sconv import ForwardBatch, ForwardMode",
    "sconv.checks": "from sconv.plugin import check_batch, check_commit",
    "sconv.dense": "from sconv.plugin import TorchBackend (it was DenseBackend)",
    "sconv.dense_metadata": "from sconv.plugin import fill_metadata (look up slots in the pool)",
    "sconv.dense_ops": "from sconv.plugin import convolve, sum_taps",
    "sconv.graphs": "from sconv.plugin import capture, has_graphs",
    "sconv.hybrid": "from sconv import HybridBackend",
    "sconv.loading": "from sconv import load_backend",
    "sconv.metadata": "from sconv.plugin import MetadataBuffers, ShortConvMetadata",
    "sconv.nn": "from sconv import nn",
    "sconv.pool": "from sconv import ConvStatePool",
    "sconv.spec": "from sconv import StateSpec, Stream",
    "sconv.state_rows": "from sconv.plugin import StateRows",
    "sconv.tracking": "from sconv import crossing_steps, verify_step_indices",
    "sconv.tree": "from sconv.plugin import ancestor_taps, parents_from_links",
    "sconv.windows": "from sconv.plugin import DedupWindows, InputWindows, VerifyWindows",
    "sconv.wording": "from sconv.plugin import kind_of, one_line_error",
}


def moved_hint(error: BaseException) -> str:
    """Return what to import instead of a missing module that core had once, or ``""``."""
    instead = MOVED.get(getattr(error, "name", None) or "")
    return f"; it is private now, write: {instead}" if instead else ""
