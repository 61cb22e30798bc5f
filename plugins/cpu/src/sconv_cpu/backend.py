"""The CPU backend: :class:`sconv.dense.DenseBackend` on host memory."""

from __future__ import annotations

import torch
from sconv.dense import DenseBackend
from sconv.metadata import ShortConvMetadata
from sconv.pool import ConvStatePool
from sconv.spec import StateSpec

__all__ = ["CpuBackend", "create"]


class CpuBackend(DenseBackend):
    """All modes, dense verify windows, trees."""

    def _is_padded(self, meta: ShortConvMetadata) -> bool:
        # Host memory: looking costs no sync, and most steps have no row without a slot.
        if meta.batch_size == 0:
            return meta.num_tokens > 0
        return bool(meta.cache_indices.amin() < 0) or int(meta.cu[-1]) < meta.num_tokens


def create(*, spec: StateSpec, device: torch.device, pool: ConvStatePool | None) -> CpuBackend:
    """Build the backend; the entry point's factory."""
    return CpuBackend(spec=spec, device=device, pool=pool)
