"""One name for a place: the one that tensors give it, so that devices can be compared."""

from __future__ import annotations

import torch

__all__ = ["as_tensors_name_it"]


def as_tensors_name_it(device: torch.device) -> torch.device:
    """Return a device with the index that its tensors have: the current one, if it has none.

    ``torch.device("npu")`` and the device of a tensor made there, ``npu:0``, are not equal; the
    host's has no index. What torch has no tensor of is returned as it is: the vendor's own code can
    say why.
    """
    if device.index is not None and device.type != "cpu":
        return device
    try:
        return torch.empty(0, device=device).device
    except Exception:
        # No one type: a torch without CUDA raises AssertionError, a vendor's library what it likes.
        return device
