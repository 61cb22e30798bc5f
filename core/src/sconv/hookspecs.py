"""The contract: every hook, what a plugin says of itself, and what it owes its caller.

This is the only place where a hook is defined. A plugin marks its methods with
:data:`sconv.hookimpl`; the names and the parameters must be the ones below, without defaults:
defaults live on :class:`sconv.Backend`, and an implementation receives every argument. A plugin
module imports what describes its backend from here, so nothing here needs torch.

Shapes use B for the rows of a batch, T for its packed tokens, D for the channels of one stream, K
for the kernel width and dtn for the draft tokens of a row in a verify step. "In graph" means
recorded once and replayed: no host sync, no allocation that outlives the call, no shape that
depends on data. "Out of graph" means run by the host before every replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import pluggy

if TYPE_CHECKING:
    from torch import Tensor

    from .step.batch import ForwardBatch
    from .step.metadata import ShortConvMetadata

__all__ = [
    "CONTRACT_VERSION",
    "MUST_USE",
    "OPTIONAL_HOOKS",
    "PROJECT_NAME",
    "Available",
    "BackendInfo",
    "Broken",
    "Capabilities",
    "DiscoverySpec",
    "Origin",
    "StepSpec",
    "Unavailable",
    "hookimpl",
    "hookspec",
]

PROJECT_NAME: Final = "sconv"

#: (major, minor) of this file. A changed or removed parameter raises major; a new optional hook
#: raises minor.
CONTRACT_VERSION: Final = (1, 1)

hookspec: Final = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl: Final = pluggy.HookimplMarker(PROJECT_NAME)

#: Parameters that an implementation must read. Accepting and dropping one silently commits
#: the wrong slots, so it is refused at load like a missing parameter.
MUST_USE: Final[dict[str, tuple[str, ...]]] = {
    "update_mamba_state_after_mtp_verify": ("last_correct_step_indices", "req_pool_indices"),
}

#: Hooks that a backend may leave out; :class:`sconv.Backend` has the default.
OPTIONAL_HOOKS: Final = frozenset({"gated_delta", "short_conv_group", "warmup"})


@dataclass(frozen=True, slots=True)
class Available:
    """The backend can run here. The highest priority wins; two equal ones are an error."""

    priority: int


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The backend cannot run here, and why, in words for its user."""

    reason: str


@dataclass(frozen=True, slots=True)
class Broken(Unavailable):
    """Core's answer for a plugin that failed before its probe could answer. Plugins do not use it.

    Attributes:
        error: What it raised, to be chained to the error of an explicit choice; None if it broke a
            rule instead.
    """

    error: BaseException | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend supports. Core refuses a spec outside of it at load.

    Attributes:
        window_axes: State layouts, of ``"time"`` and ``"channel"``.
        window_layouts: Verify-window layouts, first choice first.
        dtypes: State dtypes by torch's name (``"bfloat16"``), so that torch need not be imported.
        kernel_sizes: Smallest and largest kernel width, both included.
        graph_capture: Step hooks can be recorded and replayed.
        trees: Verify takes token trees; a chain always works.
        rollback: Verify leaves the window unchanged until the commit. Without it
            ``max_draft_tokens > 1`` is refused.
        gated_delta: The hook ``gated_delta`` is there, and the commit moves recurrent states.
            Without it a spec with ``recurrent`` is refused.
    """

    window_axes: tuple[str, ...] = ("time", "channel")
    window_layouts: tuple[str, ...] = ("dense",)
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    kernel_sizes: tuple[int, int] = (2, 8)
    graph_capture: bool = False
    trees: bool = False
    rollback: bool = False
    gated_delta: bool = False


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a backend was found: distribution, its version, and the entry point's value."""

    distribution: str
    version: str
    value: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """A backend, described.

    Attributes:
        name: The entry point's name.
        device_type: torch's name of the device it serves (``"cpu"``, ``"cuda"``, ``"npu"``).
        contract: (major, minor) of the contract it was written for, as a literal.
        factory: ``"module:attr"``, called as ``factory(spec=, device=, pool=)`` once selected; it
            returns the object that implements :class:`StepSpec`.
        probe: Says whether it can run here. Called with nothing, at discovery; must not raise.
        capabilities: What it supports.
        origin: Filled in by core.
        availability: Filled in by core from ``probe`` or from what went wrong before it.
    """

    name: str
    device_type: str
    contract: tuple[int, int]
    factory: str
    probe: Callable[[], Available | Unavailable]
    capabilities: Capabilities = field(default_factory=Capabilities)
    origin: Origin | None = None
    availability: Available | Unavailable | None = None

    def __str__(self) -> str:
        return f"backend {self.name!r} of {self.origin or 'no distribution'}"


class DiscoverySpec:
    """What the object behind a ``sconv.backends`` entry point implements."""

    @hookspec(firstresult=True)
    def sconv_backend(self) -> BackendInfo:  # type: ignore[empty-body]
        """Describe the backend.

        Called at discovery, in a process that may have neither torch nor the hardware. It must not
        import an accelerator library, and neither must its module at the top.
        """


class StepSpec:
    """What the object that ``BackendInfo.factory`` returns implements.

    That object also has the attributes ``pool`` (a :class:`sconv.ConvStatePool`) and
    ``forward_metadata`` (readable and writable).
    """

    @hookspec(firstresult=True)
    def init_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Size every static buffer. Out of graph, once, before any capture.

        Args:
            max_bs: Most rows of any captured batch, padding included.
            max_num_tokens: Most packed tokens of any captured batch.

        Raises:
            sconv.GraphBufferError: It was called before with smaller sizes. A captured buffer never
                moves, so it cannot grow.
        """

    @hookspec(firstresult=True)
    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Prepare an eager step: out-of-graph part, then in-graph part, in fresh tensors."""

    @hookspec(firstresult=True)
    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool
    ) -> None:
        """Host part of a step that is captured or replayed. May sync, allocate and branch.

        Args:
            forward_batch: The padded batch.
            in_capture: True when the call precedes a capture instead of a replay.
        """

    @hookspec(firstresult=True)
    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Recordable part: fill the buffers of ``init_graph_state`` for this batch. In graph.

        Two calls with one batch size leave every metadata tensor at the same address.

        Raises:
            sconv.GraphBufferError: The batch is larger than the buffers.
        """

    @hookspec(firstresult=True)
    def conv_state_metadata(  # type: ignore[empty-body]
        self, layer_id: int, forward_batch: ForwardBatch
    ) -> ShortConvMetadata:
        """Return the step's metadata: a pure read, the same object for every layer of the step.

        Raises:
            sconv.MetadataError: The step was not prepared.
        """

    @hookspec(firstresult=True)
    def short_conv(  # type: ignore[empty-body]
        self,
        x: Tensor,
        weight: Tensor,
        layer_id: int,
        stream: str,
        forward_batch: ForwardBatch,
        bias: Tensor | None,
        activation: str | None,
        residual: bool,
    ) -> Tensor:
        """Convolve one stream of one layer and advance its state, as the mode asks. In graph.

        Args:
            x: ``[T, D]`` packed inputs, unit channel stride, rows may be strided.
            weight: ``[D, K]`` or ``[D, 1, K]``, any strides; ``weight[..., K-1]`` multiplies the
                current token.
            layer_id: Which layer's state.
            stream: Which stream of that layer.
            forward_batch: The batch that the step was prepared with.
            bias: ``[D]`` or None.
            activation: None, ``"silu"`` or ``"swish"``; applied before the residual.
            residual: Add ``x`` after the activation.

        Returns:
            ``[T, D]`` in x's dtype, summed in float32 and rounded once. Never aliases ``x``.
        """

    @hookspec(firstresult=True)
    def short_conv_group(  # type: ignore[empty-body]
        self,
        xs: Sequence[Tensor],
        weights: Sequence[Tensor],
        layer_id: int,
        streams: Sequence[str],
        forward_batch: ForwardBatch,
        biases: Sequence[Tensor | None],
        activation: str | None,
        residual: bool,
    ) -> list[Tensor]:
        """Convolve several streams that are ready at one point of a layer. In graph. Optional.

        Element i of ``xs``, ``weights``, ``streams`` and ``biases`` is one call of ``short_conv``.
        """

    @hookspec(firstresult=True)
    def gated_delta(  # type: ignore[empty-body]
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor,
        beta: Tensor,
        A_log: Tensor,
        dt_bias: Tensor | None,
        layer_id: int,
        forward_batch: ForwardBatch,
        scale: float,
        lower_bound: float | None,
        normalize_qk: bool,
    ) -> Tensor:
        """Apply the gated delta rule of one layer and advance its state, as the mode asks.

        In graph. Optional: a spec with ``recurrent`` needs it. For each token and value head, in
        float32, with the state ``S`` ``[dv, dk]``::

            g = -exp(A_log) * softplus(gate + dt_bias)
            g = lower_bound * sigmoid(exp(A_log) * (gate + dt_bias))     if lower_bound is given
            S = S * exp(g)
            S = S + sigmoid(beta) * (v - S k) k^T
            out = S (scale * q)

        where q and k are divided by ``sqrt(sum of squares + 1e-6)`` first if ``normalize_qk``. A
        verify step leaves the state alone and writes records (``sconv.state.recurrent``).

        Args:
            q: ``[T, H, dk]`` packed, unit channel stride; tokens and heads may be strided.
            k: Like q.
            v: ``[T, HV, dv]``, in the dtype of q and k.
            gate: ``[T, HV]`` or, with channel gates, ``[T, HV, dk]``: raw, of any strides.
            beta: ``[T, HV]`` raw, of any strides.
            A_log: ``[HV]``.
            dt_bias: ``[HV]`` or, with channel gates, ``[HV, dk]``; or None.
            layer_id: Which layer's state.
            forward_batch: The batch that the step was prepared with.
            scale: What queries are multiplied by.
            lower_bound: Of the log-decay of a safe gate, negative; channel gates only. Or None.
            normalize_qk: Whether queries and keys are normalised.

        Returns:
            ``[T, HV, dv]`` in v's dtype, rounded once; zero for rows without a slot. Never aliases
            an argument.
        """

    @hookspec(firstresult=True)
    def warmup(self) -> None:
        """Compile whatever the spec needs, before serving. Out of graph. Optional."""

    @hookspec(firstresult=True)
    def update_mamba_state_after_mtp_verify(
        self,
        last_correct_step_indices: Tensor,
        mamba_track_indices: Tensor | None,
        mamba_steps_to_track: Tensor | None,
        req_pool_indices: Tensor,
    ) -> None:
        """Keep what a verify step accepted, for all layers and streams. In or out of graph.

        Windows and recurrent states move together. Row i is row i of the last verify step. Its slot
        is looked up from ``req_pool_indices`` now: what the last forward left behind may belong to
        other requests. Rows without a slot, and rows whose index is outside the step, change
        nothing.

        Args:
            last_correct_step_indices: ``[B]`` int32 or int64, last kept node of the row, -1 = none.
            mamba_track_indices: ``[B]`` int64 slots that receive a snapshot, -1 = none; or None.
            mamba_steps_to_track: ``[B]`` int32 or int64, node whose window is the snapshot, -1 =
                none; or None.
            req_pool_indices: ``[B]`` int64 request rows, or slots if the engine has no request rows
                (the batch was made with ``slots=``).
        """
