"""The module that a model uses for one of its short convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from ..errors import MetadataError, SpecError
from ..messages import kind_of
from ..state.spec import StateSpec
from ..state.tensor_memory import memory_fault
from ..step.batch import ForwardBatch, ForwardMode, check_is_batch
from .sharding import Part, check_rank, shard_streams

__all__ = ["Part", "ShortConvBackend", "ShortConvolution", "shard_streams"]

_ACTIVATIONS: Final = (None, "silu", "swish")

#: What a checkpoint may hold; a code of fewer bits needs a scale that a parameter has no place for.
_WEIGHTS: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class ShortConvBackend(Protocol):
    """What the module asks of its backend: :class:`sconv.Backend`, or a hybrid around one."""

    @property
    def spec(self) -> StateSpec:
        """What the backend was built for."""

    #: :meth:`sconv.Backend.short_conv`.
    short_conv: Callable[..., Tensor]


class ShortConvolution(nn.Module):
    """A depthwise causal convolution whose state lies in a backend's pool.

    For inference: the state changes in place, so the parameters take no gradient. Subclasses may
    override :meth:`_apply_decode_sconv_kernel` and :meth:`_apply_causal_sconv_kernel`; an engine
    that hands the weights to ``short_conv_group`` goes around both.

    Attributes:
        weight: ``[D, 1, K]``, the layout of checkpoints; ``weight[..., K-1]`` multiplies the
            current token.
        bias: ``[D]``, or None.
        backend: Where the state lies; None until :meth:`bind`.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        *,
        layer_id: int,
        stream: str,
        backend: ShortConvBackend | None = None,
        bias: bool = False,
        activation: str | None = None,
        use_residual: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        tp_rank: int | None = None,
        tp_size: int = 1,
        parts: Sequence[Part] | None = None,
    ) -> None:
        """Make the parameters.

        Args:
            hidden_size: D, the channels on this tensor-parallel rank.
            kernel_size: K.
            layer_id: The layer whose state is used, counted over the layers that have convolutions.
            stream: The stream of that layer.
            backend: The backend, if it exists already.
            bias: Whether there is a bias.
            activation: None, ``"silu"`` or ``"swish"``.
            use_residual: Add the input to the output, after the activation.
            dtype: Of the parameters; None = torch's default.
            device: Of the parameters; None = torch's default.
            tp_rank: This rank; required if there are several.
            tp_size: Tensor-parallel ranks.
            parts: What lies side by side in the unsharded channels, if more than one projection
                does or if a projection is held by every rank.

        Raises:
            SpecError: A size is not a number, the activation does not exist, the rank does not
                exist or is missing, the parts do not give a rank ``hidden_size`` channels, or the
                backend does not fit.
        """
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise SpecError(f"activation={activation!r}: expected one of {_ACTIVATIONS}")
        for name, size in (("hidden_size", hidden_size), ("kernel_size", kernel_size)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise SpecError(f"{name}={size!r}: expected an int, 1 or more")
        if tp_rank is None:
            if tp_size != 1:
                raise SpecError(
                    f"tp_rank is missing: with tp_size={tp_size} every rank loads other channels, "
                    "so say which one this is, 0 or more"
                )
            tp_rank = 0
        check_rank(tp_rank, tp_size)
        if parts is not None:
            if not isinstance(parts, Sequence) or not all(isinstance(p, Part) for p in parts):
                raise SpecError(f"parts is {parts!r}: expected a list of sconv.nn.Part")
            local = sum(part.local_channels(tp_size) for part in parts)
            if local != hidden_size:
                raise SpecError(
                    f"hidden_size={hidden_size}, but the parts give every one of {tp_size} ranks "
                    f"{local} channels"
                )
        self.hidden_size = hidden_size
        self.kernel_size = kernel_size
        self.layer_id = layer_id
        self.stream = stream
        self.activation = activation
        self.use_residual = use_residual
        self.tp_rank = tp_rank
        self.tp_size = tp_size
        self.parts = None if parts is None else tuple(parts)
        self.weight = self._parameter((hidden_size, 1, kernel_size), dtype, device)
        self.bias = self._parameter((hidden_size,), dtype, device) if bias else None
        self.backend: ShortConvBackend | None = None
        if backend is not None:
            self.bind(backend)

    def _parameter(
        self, shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device | str | None
    ) -> nn.Parameter:
        # As torch's own convolution: each output sums K products.
        bound = self.kernel_size**-0.5
        values = torch.empty(shape, dtype=dtype, device=device)
        parameter = nn.Parameter(nn.init.uniform_(values, -bound, bound), requires_grad=False)
        # Where engines look for the loader of a parameter.
        parameter.weight_loader = self.weight_loader  # type: ignore[attr-defined]
        return parameter

    def bind(self, backend: ShortConvBackend) -> None:
        """Use this backend's state.

        Raises:
            SpecError: The backend has no such layer or stream, or it was built for another width or
                kernel; nothing changed.
        """
        if not isinstance(getattr(backend, "spec", None), StateSpec):
            raise SpecError(
                f"backend is {kind_of(backend)}: expected a sconv.Backend, or a hybrid around one"
            )
        expected = backend.spec.stream_slice(self.layer_id, self.stream).dim
        if expected != self.hidden_size:
            raise SpecError(
                f"this convolution has {self.hidden_size} channels, and stream {self.stream!r} of "
                f"layer {self.layer_id} has {expected}; both count the channels of one rank"
            )
        if backend.spec.kernel_size != self.kernel_size:
            raise SpecError(
                f"this convolution has kernel_size={self.kernel_size}, and the backend was built "
                f"for {backend.spec.kernel_size}"
            )
        self.backend = backend

    def forward(self, hidden_states: Tensor, forward_batch: ForwardBatch) -> Tensor:
        """Convolve ``[T, D]`` packed inputs of a prepared step.

        Returns:
            ``[T, D]`` in the dtype of the inputs.

        Raises:
            MetadataError: No backend is bound.
            BatchError: An argument does not fit, see :meth:`sconv.Backend.short_conv`.
        """
        try:
            decodes = forward_batch.forward_mode is ForwardMode.DECODE
        except AttributeError:
            check_is_batch(forward_batch)
            raise
        if decodes:
            return self._apply_decode_sconv_kernel(hidden_states, forward_batch)
        return self._apply_causal_sconv_kernel(hidden_states, forward_batch)

    def _apply_decode_sconv_kernel(
        self, hidden_states: Tensor, forward_batch: ForwardBatch
    ) -> Tensor:
        """Convolve one token per row. Override to use a kernel of your own."""
        return self._short_conv(hidden_states, forward_batch)

    def _apply_causal_sconv_kernel(
        self, hidden_states: Tensor, forward_batch: ForwardBatch
    ) -> Tensor:
        """Convolve a step of any other mode. Override to use a kernel of your own."""
        return self._short_conv(hidden_states, forward_batch)

    def _short_conv(self, hidden_states: Tensor, forward_batch: ForwardBatch) -> Tensor:
        if self.backend is None:
            raise MetadataError(
                f"layer {self.layer_id}, stream {self.stream!r} has no backend: call bind(backend)"
            )
        return self.backend.short_conv(
            hidden_states,
            self.weight,
            layer_id=self.layer_id,
            stream=self.stream,
            forward_batch=forward_batch,
            bias=self.bias,
            activation=self.activation,
            residual=self.use_residual,
        )

    def weight_loader(self, param: Tensor, loaded_weight: Tensor) -> None:
        """Fill a parameter from a checkpoint, cut to this rank's channels where needed.

        Args:
            param: ``weight`` or ``bias``.
            loaded_weight: ``[D, 1, K]``, ``[D, K]`` or ``[D]`` with the channels of this rank, or
                the same with the channels of all ranks.

        Raises:
            SpecError: It is neither, or it holds no floating-point numbers in plain memory; the
                message has both shapes, the rank and the ranks. The parameter is as it was.
        """
        if not isinstance(loaded_weight, Tensor):
            raise SpecError(f"the loaded weight is {kind_of(loaded_weight)}: expected a tensor")
        if fault := memory_fault(loaded_weight):
            raise self._cannot_load(param, loaded_weight, f"it {fault}")
        if loaded_weight.device.type == "meta":
            raise self._cannot_load(param, loaded_weight, "it is on meta, without values")
        if loaded_weight.dtype not in _WEIGHTS:
            raise self._cannot_load(
                param,
                loaded_weight,
                f"it holds {loaded_weight.dtype}, which is a number only together with its scale: "
                "dequantise it to bfloat16, float16 or float32 first",
            )
        local = loaded_weight.detach()
        if (local.dim(), param.dim()) == (2, 3):
            local = local.unsqueeze(1)
        if local.dim() == param.dim() and local.shape[0] != param.shape[0]:
            local = self._shard(param, local, loaded_weight)
        if local.shape != param.shape:
            raise self._cannot_load(param, loaded_weight, "the shapes differ beyond the channels")
        param.data.copy_(local)

    def _shard(self, param: Tensor, full: Tensor, loaded_weight: Tensor) -> Tensor:
        channels = full.shape[0]
        parts = self.parts
        if parts is None:
            if channels != self.hidden_size * self.tp_size:
                raise self._cannot_load(
                    param,
                    loaded_weight,
                    f"expected {self.hidden_size} channels of this rank or "
                    f"{self.hidden_size * self.tp_size} of all ranks",
                )
            parts = (Part(channels),)
        elif channels != sum(part.channels for part in parts):
            raise self._cannot_load(
                param,
                loaded_weight,
                f"expected {self.hidden_size} channels of this rank or "
                f"{' + '.join(str(part.channels) for part in parts)} of all ranks",
            )
        return shard_streams(full, parts, tp_rank=self.tp_rank, tp_size=self.tp_size)

    def _cannot_load(self, param: Tensor, loaded_weight: Tensor, why: str) -> SpecError:
        return SpecError(
            f"cannot load a checkpoint tensor {list(loaded_weight.shape)} into a parameter "
            f"{list(param.shape)} of layer {self.layer_id}, stream {self.stream!r}, on rank "
            f"{self.tp_rank} of {self.tp_size}: {why}"
        )

    def extra_repr(self) -> str:
        """Show what :class:`torch.nn.Module` prints."""
        return (
            f"{self.hidden_size}, kernel_size={self.kernel_size}, layer_id={self.layer_id}, "
            f"stream={self.stream!r}, activation={self.activation!r}, "
            f"use_residual={self.use_residual}"
        )
