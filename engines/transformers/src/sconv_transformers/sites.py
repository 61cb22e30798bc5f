"""What an adapter knows of a model family, and what that makes of the backend's spec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from torch import nn

from sconv import StateSpec, Stream, WindowLayout

__all__ = ["ConvSite", "Family", "state_spec"]


@dataclass(frozen=True, slots=True)
class ConvSite:
    """One convolution of a model.

    Attributes:
        module: The module that owns it.
        weight: Its weight, ``[D, 1, K]``.
        layer_id: Its layer among the layers that have convolutions, from 0.
        stream: Its stream in that layer.
        cache_layer: Index of its layer in a transformers cache.
        state_idx: Index of its state in that cache layer.
    """

    module: nn.Module
    weight: nn.Parameter
    layer_id: int
    stream: str
    cache_layer: int
    state_idx: int

    @property
    def dim(self) -> int:
        """Channels D."""
        return self.weight.shape[0]


@dataclass(frozen=True, slots=True)
class Family:
    """A model family that can be attached.

    Attributes:
        model_class: The class of the model, exactly.
        fused_class: What the class of its conv modules becomes while attached.
        window_axis: How its windows are stored.
        sites: Lists the convolutions in the order in which a forward runs them.
        state_dtype: Dtype of the states in a stock cache, from the dtype of the model.
        static_fault: Says what is wrong with a static cache layer of this family in transformers,
            or None.
    """

    model_class: type[nn.Module]
    fused_class: type[nn.Module]
    window_axis: Literal["time", "channel"]
    sites: Callable[[Any], list[ConvSite]]
    state_dtype: Callable[[torch.dtype], torch.dtype]
    static_fault: Callable[[object], str | None]


def state_spec(
    family: Family,
    sites: list[ConvSite],
    *,
    dtype: torch.dtype,
    max_requests: int,
    max_rollback: int,
    window_layout: WindowLayout,
) -> StateSpec:
    """Return the spec of a pool for these convolutions, with a slot per row."""
    layers = [
        [Stream(site.stream, site.dim) for site in group]
        for _, group in groupby(sites, key=lambda site: site.layer_id)
    ]
    return StateSpec(
        num_layers=len(layers),
        streams=layers,
        kernel_size=sites[0].weight.shape[-1],
        num_slots=max_requests,
        max_requests=max_requests,
        dtype=dtype,
        window_axis=family.window_axis,
        # A verify step holds what may be taken back and the token that is always kept.
        max_draft_tokens=max_rollback + 1,
        window_layout=window_layout,
    )
