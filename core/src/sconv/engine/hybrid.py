"""Full attention and short-convolution state behind one object.

An engine drives one attention backend per model runner. A hybrid model needs two kinds of state
prepared at the same points of a step, so :class:`HybridBackend` stands where the engine expects its
attention backend and brings the convolutions along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from ..errors import ContractError
from ..step.batch import ForwardBatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..hookspecs import BackendInfo
    from ..state.pool import ConvStatePool
    from ..state.spec import StateSpec
    from ..step.metadata import ShortConvMetadata
    from .backend import Backend

__all__ = ["FullAttentionBackend", "HybridBackend", "wrap_for_draft_extend"]


class FullAttentionBackend(Protocol):
    """What the full-attention side must have; an adapter gives an engine's class these names.

    ``forward_batch`` is whatever the engine describes a step with, as long as the short-convolution
    side can read it too.
    """

    forward_metadata: Any

    def init_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Size the static buffers, before any capture."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare an eager step."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Host part of a step that is captured or replayed."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Recordable part of a step."""


_STEP_HOOKS: Final = (
    "init_graph_state",
    "init_forward_metadata",
    "init_forward_metadata_out_graph",
    "init_forward_metadata_in_graph",
)
#: What only the short-convolution side has. The full-attention side has nothing to commit: it keeps
#: its tokens in a cache that is addressed by length.
_BOUND_HOOKS: Final = (
    "add_observer",
    "conv_state_metadata",
    "gated_delta",
    "remove_observer",
    "short_conv",
    "short_conv_group",
    "update_mamba_state_after_mtp_verify",
    "warmup",
)
_BOUND_VALUES: Final = ("device", "info", "pool", "spec")
#: Where the engines' multi-step draft containers keep the backends of their steps.
_CONTAINER_FIELDS: Final = ("attn_backends", "attn_backend_list")


class HybridBackend:
    """One object for the engine: every hook reaches full attention first, then the convolutions.

    The convolutions take part in every mode, draft-extend included: a draft model's convolutions
    are as real as the target's. Attributes that this class does not define are those of the
    full-attention side, except for hooks that prepare a step (``init_...``): passing one on would
    leave the convolutions with the metadata of another step, so a subclass must call both sides.

    Attributes:
        full_attention: The engine's attention backend. It may join several (one for prefill, one
            for decode) as long as it has every hook itself.
        backend: The short-convolution side. What is its alone (convolutions, commit, warm-up,
            observers, pool, spec, info, device) is bound here when the hybrid is made, so that a
            call costs what it costs there; a subclass may define any of it instead.
    """

    add_observer: Callable[..., None]
    conv_state_metadata: Callable[..., ShortConvMetadata]
    device: torch.device
    gated_delta: Callable[..., Tensor]
    info: BackendInfo
    pool: ConvStatePool
    remove_observer: Callable[..., None]
    short_conv: Callable[..., Tensor]
    short_conv_group: Callable[..., list[Tensor]]
    spec: StateSpec
    update_mamba_state_after_mtp_verify: Callable[..., None]
    warmup: Callable[[], None]

    def __init__(self, full_attention: FullAttentionBackend, backend: Backend) -> None:
        """Join the two.

        Raises:
            ContractError: ``full_attention`` is a container of several steps' backends, is a hybrid
                already, or lacks a hook; or ``backend`` lacks one.
        """
        _refuse_container(full_attention)
        if isinstance(full_attention, HybridBackend):
            raise ContractError(
                f"{_name(full_attention)} is a hybrid already: its convolutions would be prepared "
                "twice a step. Pass its .full_attention"
            )
        _require_hooks("the full-attention side", full_attention, _STEP_HOOKS)
        _require_hooks("the short-convolution side", backend, [*_STEP_HOOKS, *_BOUND_HOOKS])
        self.full_attention = full_attention
        self.backend = backend
        for name in (*_BOUND_HOOKS, *_BOUND_VALUES):
            if not hasattr(type(self), name):
                setattr(self, name, getattr(backend, name))

    def init_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Size the static buffers of both sides. Out of graph, once, before any capture."""
        self.full_attention.init_graph_state(max_bs, max_num_tokens)
        self.backend.init_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Prepare an eager step on both sides."""
        self.full_attention.init_forward_metadata(forward_batch)
        self.backend.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Host part of a captured or replayed step, on both sides."""
        self.full_attention.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        self.backend.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Recordable part of a step, on both sides. In graph."""
        self.full_attention.init_forward_metadata_in_graph(forward_batch)
        self.backend.init_forward_metadata_in_graph(forward_batch)

    @property
    def forward_metadata(self) -> Any:
        """The full-attention side's metadata, readable and writable.

        Engines read it to plan attention and assign None around an idle step; neither concerns the
        convolutions, whose metadata is :meth:`conv_state_metadata`.
        """
        return self.full_attention.forward_metadata

    @forward_metadata.setter
    def forward_metadata(self, value: Any) -> None:
        self.full_attention.forward_metadata = value

    def __getattr__(self, name: str) -> Any:
        # Looked up in __dict__: before __init__ is through, and in a copy that is being rebuilt,
        # the attribute would send us here again.
        full_attention = self.__dict__.get("full_attention")
        if full_attention is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name.startswith("init_"):
            raise AttributeError(
                f"{type(self).__name__} does not pass {name!r} on to {_name(full_attention)}: the "
                "convolutions would miss the step. Define it in a subclass and call both sides"
            )
        try:
            return getattr(full_attention, name)
        except AttributeError as exc:
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}, and neither has its "
                f"full-attention side, {_name(full_attention)}. Its short-convolution side is "
                f"{_name(self.backend)}, reached as .backend"
            ) from exc


def wrap_for_draft_extend(
    full_attention: FullAttentionBackend,
    backend: Backend,
    *,
    hybrid_class: type[HybridBackend] = HybridBackend,
) -> HybridBackend:
    """Join a draft step's attention backend with the convolutions of its draft model.

    Every draft step owns its state, so ``backend`` is that step's, not the target model's.

    Raises:
        ContractError: As for :class:`HybridBackend`; among others for a container of several steps.
    """
    return hybrid_class(full_attention, backend)


def _refuse_container(full_attention: object) -> None:
    held = [name for name in _CONTAINER_FIELDS if hasattr(full_attention, name)]
    if isinstance(full_attention, (list, tuple)):
        held = ["its items"]
    if held:
        raise ContractError(
            f"{_name(full_attention)} is a container of the attention backends of several draft "
            f"steps ({held[0]}), and one convolution state cannot serve them all: every step has "
            "its own. Wrap each of its backends with wrap_for_draft_extend, together with a "
            "short-convolution backend and a pool of that step"
        )


def _require_hooks(side: str, candidate: object, names: Sequence[str]) -> None:
    missing = [name for name in names if not callable(getattr(candidate, name, None))]
    if missing:
        raise ContractError(
            f"{side}, {_name(candidate)}, lacks {', '.join(missing)}. A class that joins several "
            "backends must define every hook and pass it to the one that serves the step"
        )


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
