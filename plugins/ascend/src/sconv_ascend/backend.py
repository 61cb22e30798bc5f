"""The Ascend backend: :class:`sconv.plugin.TorchBackend` in operators that torch_npu has.

What it changes is that forms which are fast on a host are slow on an NPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sconv import ShortConvMetadata
from sconv.plugin import ConvParams, StateRows, TorchBackend

from .convolution import convolve, convolve_step

__all__ = ["AscendBackend"]


class AscendBackend(TorchBackend):
    """All modes, token trees, verify windows in every layout (dense unless the spec names one).

    Step hooks use :data:`sconv_ascend.operators.OPERATORS` and nothing else, read nothing on the
    host in graph, and keep static buffers where they are, so that ``torch.npu.NPUGraph`` can record
    them.
    """

    def _decode(
        self, x: Tensor, conv: ConvParams, state: StateRows, meta: ShortConvMetadata
    ) -> Tensor:
        old = state.read(meta.safe_idx)
        fresh = torch.where(meta.cache_mask, old, 0) if meta.may_start_afresh else old
        y = convolve_step(fresh, x, conv)
        state.append(x, old, fresh, meta)
        return y

    def _convolve(self, inputs: Tensor, conv: ConvParams, out: Tensor) -> None:
        convolve(inputs, conv, out)
