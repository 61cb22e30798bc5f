"""What an engine holds: one selected backend, its hooks checked and frozen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import BatchError, SpecError
from ..hookspecs import BackendInfo
from ..messages import kind_of
from ..state.pool import ConvStatePool
from ..state.spec import StateSpec
from ..state.tensor_memory import memory_fault
from ..step.batch import ForwardBatch
from ..step.conv_checks import check_conv
from ..step.delta_checks import check_delta
from ..step.metadata import ShortConvMetadata
from .process import plain_arithmetic, touches_arithmetic

if TYPE_CHECKING:
    from ..discovery.observers import Observers

__all__ = ["Backend", "required_rows"]


class Backend:
    """A loaded backend. It belongs to one model runner and one thread.

    Its methods are the hooks of :class:`sconv.hookspecs.StepSpec` with their defaults; a call costs
    about a bound method call, since each hook was resolved once, at load.
    """

    __slots__ = (
        "_commit",
        "_conv_state_metadata",
        "_device_type",
        "_direct",
        "_gated_delta",
        "_impl",
        "_in_graph",
        "_init_graph_state",
        "_init_metadata",
        "_observers",
        "_out_graph",
        "_short_conv",
        "_short_conv_group",
        "_warmup",
        "device",
        "info",
        "spec",
    )

    def __init__(
        self,
        *,
        info: BackendInfo,
        spec: StateSpec,
        device: torch.device,
        implementation: Any,
        hooks: dict[str, Callable[..., Any]],
        observers: Observers,
    ) -> None:
        """Freeze checked hooks; :func:`sconv.load_backend` is the way to get a backend."""
        self.info = info
        self.spec = spec
        self.device = device
        self._device_type = device.type
        self._impl = implementation
        self._direct = hooks
        self._observers = observers
        self._freeze(hooks)

    def _freeze(self, hooks: dict[str, Callable[..., Any]]) -> None:
        self._init_graph_state = hooks["init_graph_state"]
        self._init_metadata = hooks["init_forward_metadata"]
        self._out_graph = hooks["init_forward_metadata_out_graph"]
        self._in_graph = hooks["init_forward_metadata_in_graph"]
        self._conv_state_metadata = hooks["conv_state_metadata"]
        self._short_conv = hooks["short_conv"]
        self._short_conv_group = hooks.get("short_conv_group")
        self._gated_delta = hooks.get("gated_delta")
        self._warmup = hooks.get("warmup")
        self._commit = hooks["update_mamba_state_after_mtp_verify"]

    def __repr__(self) -> str:
        return f"<sconv.Backend {self.info.name!r} on {self.device}, {self.info.origin}>"

    @property
    def pool(self) -> ConvStatePool:
        """The backend's state."""
        pool: ConvStatePool = self._impl.pool
        return pool

    @property
    def forward_metadata(self) -> ShortConvMetadata | None:
        """Metadata of the prepared step. Writable: engines assign None around an idle step."""
        meta: ShortConvMetadata | None = self._impl.forward_metadata
        return meta

    @forward_metadata.setter
    def forward_metadata(self, value: ShortConvMetadata | None) -> None:
        self._impl.forward_metadata = value

    def init_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Size the static buffers. Out of graph, once, before any capture.

        Raises:
            GraphBufferError: They were sized before, for less.
        """
        self._init_graph_state(max_bs=max_bs, max_num_tokens=max_num_tokens)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Prepare an eager step.

        Raises:
            BatchError: The batch does not fit the backend; nothing changed.
        """
        self._init_metadata(forward_batch=forward_batch)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Host part of a step that is captured or replayed; may sync, allocate and branch.

        Raises:
            BatchError: The batch does not fit the backend; nothing changed.
            GraphBufferError: The batch does not fit the static buffers.
        """
        self._out_graph(forward_batch=forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Recordable part of a step: fills the static buffers. In graph.

        Raises:
            GraphBufferError: The batch does not fit the static buffers.
        """
        self._in_graph(forward_batch=forward_batch)

    def conv_state_metadata(self, layer_id: int, forward_batch: ForwardBatch) -> ShortConvMetadata:
        """Return the step's metadata: a pure read, one object for all layers of the step.

        Raises:
            MetadataError: The step was not prepared.
        """
        meta: ShortConvMetadata = self._conv_state_metadata(
            layer_id=layer_id, forward_batch=forward_batch
        )
        return meta

    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        layer_id: int,
        stream: str,
        forward_batch: ForwardBatch,
        bias: Tensor | None = None,
        activation: str | None = None,
        residual: bool = True,
    ) -> Tensor:
        """Convolve one stream of one layer and advance its state, as the mode asks. In graph.

        Args:
            x: ``[T, D]`` packed inputs, unit channel stride, rows may be strided.
            weight: ``[D, K]`` or ``[D, 1, K]``, any strides.
            layer_id: The layer.
            stream: The stream.
            forward_batch: The batch that the step was prepared with.
            bias: ``[D]`` or None.
            activation: None, ``"silu"`` or ``"swish"``.
            residual: Add ``x`` after the activation.

        Returns:
            ``[T, D]`` in x's dtype; zero for rows without a slot. Not differentiable.

        Raises:
            BatchError: An argument has the wrong shape, dtype, device or strides; nothing changed.
            SpecError: The layer or the stream does not exist.
            MetadataError: The prepared step has another mode or another number of rows or, where
                values are checked, other rows, lengths or trees.
        """
        if touches_arithmetic(self._device_type):
            with plain_arithmetic(self._device_type):
                return self.short_conv(
                    x,
                    weight,
                    layer_id=layer_id,
                    stream=stream,
                    forward_batch=forward_batch,
                    bias=bias,
                    activation=activation,
                    residual=residual,
                )
        check_conv(
            x,
            weight,
            bias,
            activation,
            residual,
            layer_id,
            stream,
            forward_batch,
            self._conv_state_metadata(layer_id=layer_id, forward_batch=forward_batch),
            self.spec,
            self.device,
        )
        y: Tensor = self._short_conv(
            x=x,
            weight=weight,
            layer_id=layer_id,
            stream=stream,
            forward_batch=forward_batch,
            bias=bias,
            activation=activation,
            residual=residual,
        )
        return y

    def short_conv_group(
        self,
        xs: Sequence[Tensor],
        weights: Sequence[Tensor],
        *,
        layer_id: int,
        streams: Sequence[str],
        forward_batch: ForwardBatch,
        biases: Sequence[Tensor | None] | None = None,
        activation: str | None = None,
        residual: bool = True,
    ) -> list[Tensor]:
        """Convolve streams that are ready at one point of a layer, such as k and v. In graph.

        Raises:
            BatchError: The sequences differ in length, name a stream twice, or hold a bad argument;
                nothing changed.
        """
        if touches_arithmetic(self._device_type):
            with plain_arithmetic(self._device_type):
                return self.short_conv_group(
                    xs,
                    weights,
                    layer_id=layer_id,
                    streams=streams,
                    forward_batch=forward_batch,
                    biases=biases,
                    activation=activation,
                    residual=residual,
                )
        try:
            if biases is None:
                biases = [None] * len(xs)
            matching = len(xs) == len(weights) == len(streams) == len(biases)
            distinct = len(set(streams)) == len(streams)
        except TypeError:
            raise BatchError(
                f"short_conv_group: xs is {kind_of(xs)}, weights {kind_of(weights)}, streams "
                f"{kind_of(streams)}, biases {kind_of(biases)}: expected sequences, one entry per "
                "stream"
            ) from None
        if not matching:
            raise BatchError(
                f"short_conv_group: {len(xs)} inputs, {len(weights)} weights, {len(streams)} "
                f"streams, {len(biases)} biases: expected as many of each"
            )
        if not distinct:
            raise BatchError(f"short_conv_group: {list(streams)} names a stream twice")
        meta = self._conv_state_metadata(layer_id=layer_id, forward_batch=forward_batch)
        # All are checked before the first one writes.
        for x, weight, stream, bias in zip(xs, weights, streams, biases, strict=True):
            check_conv(
                x,
                weight,
                bias,
                activation,
                residual,
                layer_id,
                stream,
                forward_batch,
                meta,
                self.spec,
                self.device,
            )
        if self._short_conv_group is not None:
            ys: list[Tensor] = self._short_conv_group(
                xs=xs,
                weights=weights,
                layer_id=layer_id,
                streams=streams,
                forward_batch=forward_batch,
                biases=biases,
                activation=activation,
                residual=residual,
            )
            return ys
        return [
            self._short_conv(
                x=x,
                weight=weight,
                layer_id=layer_id,
                stream=stream,
                forward_batch=forward_batch,
                bias=bias,
                activation=activation,
                residual=residual,
            )
            for x, weight, stream, bias in zip(xs, weights, streams, biases, strict=True)
        ]

    def gated_delta(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor,
        beta: Tensor,
        A_log: Tensor,
        dt_bias: Tensor | None,
        *,
        layer_id: int,
        forward_batch: ForwardBatch,
        scale: float | None = None,
        lower_bound: float | None = None,
        normalize_qk: bool = True,
    ) -> Tensor:
        """Apply the gated delta rule of one layer and advance its state. In graph.

        The arithmetic is that of :meth:`sconv.hookspecs.StepSpec.gated_delta`.

        Args:
            q: ``[T, H, dk]`` packed, unit channel stride: a view of a packed projection will do.
            k: ``[T, H, dk]``, like q.
            v: ``[T, HV, dv]``, like q.
            gate: ``[T, HV]`` or, with channel gates, ``[T, HV, dk]``: raw.
            beta: ``[T, HV]`` raw.
            A_log: ``[HV]``.
            dt_bias: ``[HV]`` or, with channel gates, ``[HV, dk]`` or ``[HV * dk]``; or None.
            layer_id: The layer.
            forward_batch: The batch that the step was prepared with.
            scale: What queries are multiplied by; None = ``dk ** -0.5``.
            lower_bound: Of the log-decay of a safe gate; channel gates only.
            normalize_qk: Divide queries and keys by ``sqrt(sum of squares + 1e-6)``.

        Returns:
            ``[T, HV, dv]`` in v's dtype; zero for rows without a slot. Not differentiable.

        Raises:
            BatchError: An argument has the wrong shape, dtype, device or strides; nothing changed.
            SpecError: The layer does not exist, or the spec has no recurrent state.
            MetadataError: The prepared step is another one.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.gated_delta(
                    q,
                    k,
                    v,
                    gate,
                    beta,
                    A_log,
                    dt_bias,
                    layer_id=layer_id,
                    forward_batch=forward_batch,
                    scale=scale,
                    lower_bound=lower_bound,
                    normalize_qk=normalize_qk,
                )
        delta = self.spec.recurrent
        if delta is None or self._gated_delta is None:
            raise SpecError(
                "gated_delta: the spec has no recurrent state: give StateSpec recurrent="
            )
        if scale is None:
            scale = delta.key_dim**-0.5
        if isinstance(dt_bias, Tensor) and dt_bias.shape == (delta.value_heads * delta.key_dim,):
            # Models keep the bias of channel gates in one row.
            dt_bias = dt_bias.reshape(delta.gate_shape) if delta.gate == "channel" else dt_bias
        check_delta(
            q,
            k,
            v,
            gate,
            beta,
            A_log,
            dt_bias,
            layer_id,
            scale,
            lower_bound,
            normalize_qk,
            forward_batch,
            self._conv_state_metadata(layer_id=layer_id, forward_batch=forward_batch),
            self.spec,
            self.device,
        )
        out: Tensor = self._gated_delta(
            q=q,
            k=k,
            v=v,
            gate=gate,
            beta=beta,
            A_log=A_log,
            dt_bias=dt_bias,
            layer_id=layer_id,
            forward_batch=forward_batch,
            scale=float(scale),
            lower_bound=lower_bound,
            normalize_qk=normalize_qk,
        )
        return out

    def warmup(self) -> None:
        """Compile what this spec needs, before serving. Out of graph."""
        if self._warmup is not None:
            self._warmup()

    def update_mamba_state_after_mtp_verify(
        self,
        last_correct_step_indices: Tensor,
        mamba_track_indices: Tensor | None = None,
        mamba_steps_to_track: Tensor | None = None,
        req_pool_indices: Tensor | None = None,
    ) -> None:
        """Keep what the last verify step accepted, for all layers and streams. In or out of graph.

        Args:
            last_correct_step_indices: ``[B]`` last kept node of each row, -1 = keep nothing.
            mamba_track_indices: ``[B]`` int64 slots that receive snapshots, -1 = none; or None.
            mamba_steps_to_track: ``[B]`` node whose window is the snapshot, -1 = none; or None.
            req_pool_indices: ``[B]`` int64 request rows (or slots, if the step was made with
                slots); looked up now, whatever ran since the verify step. Required: it stands last
                only so that all four may be given by position.

        Raises:
            TypeError: ``req_pool_indices`` is missing.
            BatchError: An argument has the wrong shape, dtype or device; nothing changed.
            MetadataError: There was no verify step.
        """
        if touches_arithmetic(self._device_type):
            with plain_arithmetic(self._device_type):
                self.update_mamba_state_after_mtp_verify(
                    last_correct_step_indices,
                    mamba_track_indices,
                    mamba_steps_to_track,
                    req_pool_indices,
                )
            return
        rows = required_rows(self.device, last_correct_step_indices, req_pool_indices)
        self._commit(
            last_correct_step_indices=last_correct_step_indices,
            mamba_track_indices=mamba_track_indices,
            mamba_steps_to_track=mamba_steps_to_track,
            req_pool_indices=rows,
        )

    def add_observer(self, observer: object) -> None:
        """Register pluggy wrappers around the hooks: profiling, tracing, fault injection.

        Only while an observer is registered do calls go through pluggy.

        Raises:
            ContractError: The observer names a hook or a parameter that does not exist.
        """
        self._observers.add(observer)
        self._freeze(self._observers.calls())

    def remove_observer(self, observer: object) -> None:
        """Unregister an observer; without any left, calls are direct again."""
        self._observers.remove(observer)
        self._freeze(self._observers.calls() if self._observers.active else self._direct)


def required_rows(
    device: torch.device, last_correct_step_indices: object, req_pool_indices: object
) -> Tensor:
    """Return the rows of a commit, ``[B]``. What goes with what is the implementation's check.

    Raises:
        TypeError: They are missing.
        BatchError: They, or the nodes, are not a tensor of that shape.
    """
    if req_pool_indices is None:
        raise TypeError(
            "update_mamba_state_after_mtp_verify: req_pool_indices is missing; without it the "
            "commit would go to whatever slots the last forward left behind"
        )
    for name, value in (
        ("last_correct_step_indices", last_correct_step_indices),
        ("req_pool_indices", req_pool_indices),
    ):
        if not isinstance(value, Tensor):
            raise BatchError(
                f"{name} is {kind_of(value)}: expected a tensor on {device}, one entry per row of "
                "the verify step"
            )
        if fault := memory_fault(value):
            raise BatchError(f"{name} {fault}")
    assert isinstance(req_pool_indices, Tensor)
    if req_pool_indices.dim() != 1:
        raise BatchError(
            f"req_pool_indices has shape {list(req_pool_indices.shape)}: expected [B], one entry "
            "per row of the verify step"
        )
    return req_pool_indices
