"""A model's convolutions: which modules they are, and what that makes of the backend's spec."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from torch import nn

from sconv import LinearAttnModelSpec, StateSpec, Stream, WindowLayout

__all__ = ["ConvKind", "ConvModule", "find_conv_modules", "state_spec"]


@dataclass(frozen=True, slots=True)
class ConvKind:
    """How modules of one class are served.

    Attributes:
        pooled_class: What their class becomes while the model is attached.
        stock_class: What it was.
        window_axis: How their windows are stored.
        state_dtype: Dtype of the states in a stock cache, from the dtype of the model.
        static_fault: Says what transformers gets wrong with a static cache layer, or None.
    """

    pooled_class: type[nn.Module]
    stock_class: type[nn.Module]
    window_axis: Literal["time", "channel"] = "channel"
    state_dtype: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype
    static_fault: Callable[[object], str | None] = lambda layer: None


@dataclass(frozen=True, slots=True)
class ConvModule:
    """One convolution of a model.

    Attributes:
        module: The module that owns it.
        kind: How it is served.
        weight: Its weight, ``[D, 1, K]``.
        layer_id: Its layer among the layers that have convolutions, from 0.
        stream: Its stream in that layer.
        cache_layer: Index of its layer in a transformers cache.
        state_idx: Index of its state in that cache layer.
    """

    module: nn.Module
    kind: ConvKind
    weight: nn.Parameter
    layer_id: int
    stream: str
    cache_layer: int
    state_idx: int

    @property
    def dim(self) -> int:
        """Channels D."""
        return self.weight.shape[0]


def find_conv_modules(
    model: nn.Module, family: LinearAttnModelSpec, kind_of: Callable[[type], ConvKind]
) -> list[ConvModule]:
    """Return a model's convolutions by cache layer and state index, as a forward runs them.

    A module says where its state is, as those of transformers do: ``layer_idx``, and ``conv_idx``
    where a layer has several. It holds one depthwise ``nn.Conv1d``.

    Args:
        model: The model.
        family: Says which classes are convolutions.
        kind_of: Says how a class is served.

    Raises:
        TypeError: A module is of a subclass of a convolution's class, whose forward is not known,
            or does not say where its state is.
        ValueError: A module holds no such convolution, or several; or they differ in width.
    """
    found: list[tuple[int, int, str, nn.Module]] = []
    for name, module in model.named_modules():
        if family.has_conv_module(type(module)):
            layer, state = _place(name, module)
            found.append((layer, state, name, module))
        elif base := next(filter(family.has_conv_module, type(module).__mro__), None):
            raise TypeError(
                f"{name} is a {type(module).__qualname__}, a subclass of {base.__qualname__} whose "
                "forward may be another: name its class in conv_modules of a "
                "sconv.LinearAttnModelSpec and register that"
            )
    found.sort(key=lambda entry: entry[:2])
    layers = {layer: index for index, layer in enumerate(dict.fromkeys(row[0] for row in found))}
    short = Counter((layer, name.rpartition(".")[2]) for layer, _, name, _ in found)
    convolutions = []
    for layer, state, name, module in found:
        last = name.rpartition(".")[2]
        convolutions.append(
            ConvModule(
                module=module,
                kind=kind_of(type(module)),
                weight=_depthwise(name, module).weight,
                layer_id=layers[layer],
                stream=last if short[layer, last] == 1 else name,
                cache_layer=layer,
                state_idx=state,
            )
        )
    widths = sorted({conv.weight.shape[-1] for conv in convolutions})
    if len(widths) > 1:
        raise ValueError(f"the model's convolutions have widths {widths}: one pool holds one width")
    return convolutions


def state_spec(
    convolutions: list[ConvModule],
    *,
    dtype: torch.dtype,
    max_requests: int,
    max_rollback: int,
    window_layout: WindowLayout,
) -> StateSpec:
    """Return the spec of a pool for these convolutions, with a slot per row."""
    layers = [
        [Stream(conv.stream, conv.dim) for conv in group]
        for _, group in groupby(convolutions, key=lambda conv: conv.layer_id)
    ]
    axes = {conv.kind.window_axis for conv in convolutions}
    return StateSpec(
        num_layers=len(layers),
        streams=layers,
        kernel_size=convolutions[0].weight.shape[-1],
        num_slots=max_requests,
        max_requests=max_requests,
        dtype=dtype,
        window_axis="time" if axes == {"time"} else "channel",
        # A verify step holds what may be taken back and the token that is always kept.
        max_draft_tokens=max_rollback + 1,
        window_layout=window_layout,
    )


def _place(name: str, module: nn.Module) -> tuple[int, int]:
    layer, state = getattr(module, "layer_idx", None), getattr(module, "conv_idx", 0)
    if not isinstance(layer, int) or not isinstance(state, int):
        raise TypeError(
            f"{name} ({type(module).__qualname__}) does not say where its state is in a cache: "
            "expected an int layer_idx, and an int conv_idx where a layer has several convolutions"
        )
    return layer, state


def _depthwise(name: str, module: nn.Module) -> nn.Conv1d:
    inside = [part for part in module.modules() if isinstance(part, nn.Conv1d)]
    if len(inside) == 1:
        [conv] = inside
        if conv.groups == conv.in_channels == conv.out_channels and conv.dilation == (1,):
            return conv
    raise ValueError(
        f"{name} ({type(module).__qualname__}) holds {len(inside)} nn.Conv1d: expected exactly "
        "one, depthwise and without dilation"
    )
