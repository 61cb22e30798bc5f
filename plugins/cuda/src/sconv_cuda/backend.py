"""The CUDA backend: the hooks of the contract, each as one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import triton
from torch import Tensor

from sconv import (
    ConvStatePool,
    ForwardBatch,
    ForwardMode,
    ShortConvMetadata,
    SpecError,
    StateSpec,
    hookimpl,
)
from sconv.plugin import MetadataBuffers, PluginBackend, check_commit

from .commits import Commits
from .convolution import Convolutions
from .delta.inputs import Inputs
from .delta.steps import DeltaSteps
from .launch import Launcher
from .metadata import Metadata
from .warmup import warm_up

__all__ = ["CudaBackend", "create"]


class CudaBackend(PluginBackend):
    """All modes in Triton kernels; verify keeps its inputs alone, unless a spec asks otherwise.

    Results of a row do not depend on the other rows of the batch, bit for bit: no sum crosses rows,
    and each output is one chain of operations whatever the shape of the launch.
    """

    window_layouts: ClassVar[tuple[str, ...]] = ("inputs", "dense", "dedup")

    def __init__(
        self, *, spec: StateSpec, device: torch.device, pool: ConvStatePool | None
    ) -> None:
        """Build the state, unless an adopted pool brings it.

        Raises:
            SpecError: The device has no CUDA, or the pool's "no slot" is not one the kernels know.
        """
        device = _with_index(device)
        if pool is not None:
            if unknown := [slot for slot in pool.null_slots if slot > 0]:
                raise SpecError(f"null_slots={unknown}: the kernels know 0 and negative numbers")
            pool.device = _with_index(pool.device)
            device = pool.device
        super().__init__(spec=spec, device=device, pool=pool)
        self._launch = Launcher(self.device)
        self._convolutions = Convolutions(spec, self.pool, self._launch)
        self._metadata = Metadata(spec, self.pool, self._launch)
        self._commits = Commits(spec, self.pool, self._launch)
        self._delta: DeltaSteps | None = None
        if spec.recurrent is not None:
            self._delta = DeltaSteps(spec, self.pool, self._launch)

    def _prepare_static(self, buffers: MetadataBuffers) -> None:
        super()._prepare_static(buffers)
        if self._delta is not None:
            self._delta.reserve(buffers.max_bs)

    def _plan(self, batch: ForwardBatch) -> int:
        tokens = super()._plan(batch)
        if self._delta is not None:
            self._delta.check(batch)
        return tokens

    def _begin(self, batch: ForwardBatch) -> None:
        super()._begin(batch)
        if batch.forward_mode is ForwardMode.TARGET_VERIFY:
            self._commits.prepare()
            if self._delta is not None:
                self._delta.prepare()

    def _fill(self, meta: ShortConvMetadata, batch: ForwardBatch, buffers: MetadataBuffers) -> None:
        self._metadata.fill(meta, batch, buffers)
        self._convolutions.settled = False
        if self._delta is not None and meta.forward_mode is ForwardMode.TARGET_VERIFY:
            self._delta.note(meta)

    @hookimpl
    def short_conv(
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
        """See :meth:`sconv.hookspecs.StepSpec.short_conv`."""
        meta = self.conv_state_metadata(layer_id, forward_batch)
        return self._convolutions.run(
            meta, layer_id, (stream,), (x,), (weight,), (bias,), activation is not None, residual
        )[0]

    @hookimpl
    def short_conv_group(
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
        """See :meth:`sconv.hookspecs.StepSpec.short_conv_group`."""
        meta = self.conv_state_metadata(layer_id, forward_batch)
        return self._convolutions.run_group(
            meta,
            layer_id,
            tuple(streams),
            tuple(xs),
            tuple(weights),
            tuple(biases),
            activation is not None,
            residual,
        )

    @hookimpl
    def gated_delta(
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
        """See :meth:`sconv.hookspecs.StepSpec.gated_delta`."""
        assert self._delta is not None
        meta = self.conv_state_metadata(layer_id, forward_batch)
        inputs = Inputs(q, k, v, gate, beta, A_log, dt_bias, scale, lower_bound, normalize_qk)
        return self._delta.run(meta, layer_id, inputs)

    @hookimpl
    def update_mamba_state_after_mtp_verify(
        self,
        last_correct_step_indices: Tensor,
        mamba_track_indices: Tensor | None,
        mamba_steps_to_track: Tensor | None,
        req_pool_indices: Tensor,
    ) -> None:
        """See :meth:`sconv.hookspecs.StepSpec.update_mamba_state_after_mtp_verify`."""
        check_commit(
            req_pool_indices.shape[0],
            self.pool,
            self.verify_tokens,
            self.verify_rows,
            last_correct_step_indices=last_correct_step_indices,
            mamba_track_indices=mamba_track_indices,
            mamba_steps_to_track=mamba_steps_to_track,
            req_pool_indices=req_pool_indices,
        )
        self._commits.run(
            req_pool_indices,
            last_correct_step_indices,
            mamba_track_indices,
            mamba_steps_to_track,
            drafts=self.verify_tokens,
            slots=self.verify_by_slots,
            tree=self.verify_tree,
        )
        if self._delta is not None:
            self._delta.commit(
                req_pool_indices,
                last_correct_step_indices,
                mamba_track_indices,
                mamba_steps_to_track,
                drafts=self.verify_tokens,
                slots=self.verify_by_slots,
                tree=self.verify_tree,
            )

    @hookimpl
    def warmup(self) -> None:
        """See :meth:`sconv.hookspecs.StepSpec.warmup`."""
        warm_up(self.spec, self._convolutions, self._metadata, self._commits, self._delta)


def create(*, spec: StateSpec, device: torch.device, pool: ConvStatePool | None) -> CudaBackend:
    """Build the backend; the entry point's factory."""
    return CudaBackend(spec=spec, device=device, pool=pool)


def _with_index(device: torch.device) -> torch.device:
    """Name the device as its tensors do, index included."""
    if device.type == "cuda":
        return (
            device
            if device.index is not None
            else torch.device("cuda", torch.cuda.current_device())
        )
    if not triton.knobs.runtime.interpret:
        raise SpecError(
            f"the CUDA backend cannot use {str(device)!r} (TRITON_INTERPRET=1 is not set)"
        )
    return device
