"""Checked mode: a backend that compares every call with what it knows of the slots.

``SCONV_CHECK=1`` makes :func:`sconv.load_backend` return one. It stands around any backend's hooks
and reads values on the host, so that each call syncs. What is refused has changed nothing.

Replays of captured steps pass by the host. There the out-of-graph half is what counts: a step that
it announces is taken as replayed by the next call.
"""

from __future__ import annotations

import operator
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import MetadataError
from ..state.shadow import PoolShadow
from ..step.batch import ForwardBatch, ForwardMode, check_is_batch
from ..step.batch_checks import check_batch, check_commit
from ..step.conv_checks import check_same_rows
from ..step.metadata import ShortConvMetadata
from ..step.value_checks import check_undefined, check_values, values_are_checked
from .backend import Backend, required_rows
from .checked_commit import plan_commit
from .checked_step import CheckedStep, plan_step
from .process import plain_arithmetic

__all__ = ["CheckedBackend", "checks_state"]

#: Prepared steps that are remembered, for engines that put metadata back.
_STEPS: Final = 8
#: The backend has a bound of its own, and says so itself.
_ANY_ROWS: Final = 2**62


def checks_state() -> bool:
    """Whether ``SCONV_CHECK=1``. Read when a backend is loaded."""
    return os.environ.get("SCONV_CHECK", "0") not in ("", "0")


class CheckedBackend(Backend):
    """A backend in checked mode; see :class:`sconv.Backend` for its methods.

    Every method also raises what checked mode finds: ``BatchError`` for what a batch or a commit
    says, ``MetadataError`` for calls out of order and for a second thread.
    """

    __slots__ = (
        "_commit_replays",
        "_convolutions",
        "_in_call",
        "_known",
        "_pending",
        "_shadow",
        "_steps",
        "_verify",
    )

    def __init__(self, **given: Any) -> None:
        """Take what :class:`sconv.Backend` takes, and attach the pool's records."""
        super().__init__(**given)
        pool = self.pool
        if pool.shadow is None:
            pool.shadow = PoolShadow(pool)
        self._shadow = pool.shadow
        self._convolutions = [
            (layer_id, stream.name)
            for layer_id in range(self.spec.num_layers)
            for stream in self.spec.layer_streams(layer_id)
        ]
        self._known = frozenset(self._convolutions)
        self._in_call = threading.RLock()
        self._steps: deque[CheckedStep] = deque(maxlen=_STEPS)
        #: The last step of an out-of-graph half, until its in-graph half is seen; a captured one
        #: until the next step.
        self._pending: CheckedStep | None = None
        self._commit_replays = False
        self._verify: CheckedStep | None = None

    def __repr__(self) -> str:
        return super().__repr__()[:-1] + ", checked>"

    @property
    def forward_metadata(self) -> ShortConvMetadata | None:
        """Metadata of the prepared step; a step whose metadata was read may be put back later."""
        meta: ShortConvMetadata | None = self._impl.forward_metadata
        if (step := self._step_of(meta)) is not None:
            step.put_aside = True
        return meta

    @forward_metadata.setter
    def forward_metadata(self, value: ShortConvMetadata | None) -> None:
        self._impl.forward_metadata = value
        if (step := self._step_of(value)) is not None:
            step.put_back()

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """See :meth:`sconv.Backend.init_forward_metadata`."""
        with self._call():
            step = self._plan(forward_batch, captured=False)
            super().init_forward_metadata(forward_batch)
            step.meta = self._impl.forward_metadata
            self._begin(step)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """See :meth:`sconv.Backend.init_forward_metadata_out_graph`."""
        with self._call():
            step = self._plan(forward_batch, captured=in_capture)
            super().init_forward_metadata_out_graph(forward_batch, in_capture)
            self._begin(step)
            self._pending = step
            if in_capture:
                self._captures(step)
            else:
                self._shadow.announced.append(_Replay(self, step))

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """See :meth:`sconv.Backend.init_forward_metadata_in_graph`."""
        with self._call(settles=False):
            super().init_forward_metadata_in_graph(forward_batch)
            step, self._pending = self._pending, None
            if step is None:
                # It runs a second time, on rows that nobody has announced.
                step = CheckedStep(forward_batch, self._shadow, (), [], [], [])
                self._captures(step)
            elif step.captured or is_capturing(self.device):
                self._captures(step)
                self._pending = step
            else:
                # No replay: the host sees each convolution.
                step.ran.clear()
                step.put_back()
            self._shadow.announced = [
                each for each in self._shadow.announced if each.step is not step
            ]
            step.meta = self._impl.forward_metadata
            self._steps.append(step)

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
        """See :meth:`sconv.Backend.short_conv`."""
        with self._call(settles=False):
            streams = [stream]
            step = self._check_convolutions(layer_id, streams, forward_batch)
            y = super().short_conv(
                x,
                weight,
                layer_id=layer_id,
                stream=stream,
                forward_batch=forward_batch,
                bias=bias,
                activation=activation,
                residual=residual,
            )
            self._convolved(step, layer_id, streams)
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
        """See :meth:`sconv.Backend.short_conv_group`."""
        with self._call(settles=False):
            step = self._check_convolutions(layer_id, streams, forward_batch)
            ys = super().short_conv_group(
                xs,
                weights,
                layer_id=layer_id,
                streams=streams,
                forward_batch=forward_batch,
                biases=biases,
                activation=activation,
                residual=residual,
            )
            self._convolved(step, layer_id, streams)
            return ys

    def warmup(self) -> None:
        """See :meth:`sconv.Backend.warmup`."""
        with self._call():
            super().warmup()

    def update_mamba_state_after_mtp_verify(
        self,
        last_correct_step_indices: Tensor,
        mamba_track_indices: Tensor | None = None,
        mamba_steps_to_track: Tensor | None = None,
        req_pool_indices: Tensor | None = None,
    ) -> None:
        """See :meth:`sconv.Backend.update_mamba_state_after_mtp_verify`."""
        given: tuple[Any, ...] = (
            last_correct_step_indices,
            mamba_track_indices,
            mamba_steps_to_track,
            req_pool_indices,
        )
        pending = self._pending
        if is_capturing(self.device) or (pending is not None and pending.captured):
            # Recorded: nothing can be read, and its replays pass by the host.
            with self._call(settles=False):
                super().update_mamba_state_after_mtp_verify(*given)
                self._commit_replays = True
            return
        with self._call():
            rows = required_rows(self.device, last_correct_step_indices, req_pool_indices)
            verify = self._verify
            record = None
            if verify is not None and not verify.captured:
                check_commit(
                    rows.shape[0],
                    self.pool,
                    verify.batch.tokens_per_row or 0,
                    verify.batch.batch_size,
                    last_correct_step_indices=last_correct_step_indices,
                    mamba_track_indices=mamba_track_indices,
                    mamba_steps_to_track=mamba_steps_to_track,
                    req_pool_indices=rows,
                )
                record = plan_commit(verify, self.pool, *given)
            super().update_mamba_state_after_mtp_verify(*given)
            if record is not None:
                record()
            else:
                self._shadow.forget("a commit of a step that was captured")

    def _plan(self, batch: ForwardBatch, *, captured: bool) -> CheckedStep:
        """Check a batch, its values and its rows."""
        pool = self.pool
        check_is_batch(batch)
        check_batch(batch, self.spec, pool, _ANY_ROWS)
        if not values_are_checked(self.device):
            check_values(batch, self.spec, pool)
        check_undefined(batch, pool)
        last = self._steps[-1] if self._steps else None
        if last is not None and last.put_aside and not last.complete:
            last.doubt("a step whose metadata was put aside may run later")
        return plan_step(
            batch, self.spec, pool, self._shadow, self._convolutions, captured=captured
        )

    def _begin(self, step: CheckedStep) -> None:
        self._pending = None
        if step.meta is not None:
            self._steps.append(step)
        if step.batch.forward_mode is ForwardMode.TARGET_VERIFY:
            self._verify = step

    def _captures(self, step: CheckedStep) -> None:
        """Give up on what a capture may write: warm-ups run as often as the engine likes."""
        step.captured = True
        self._shadow.watches = False
        step.doubt("a step was captured on it")
        if not step.convolutions:
            self._shadow.forget("the in-graph half of a step ran without its out-of-graph half")

    def _step_of(self, meta: ShortConvMetadata | None) -> CheckedStep | None:
        if meta is None:
            return None
        return next((step for step in reversed(self._steps) if step.meta is meta), None)

    def _check_convolutions(
        self, layer_id: int, streams: Sequence[str], batch: ForwardBatch
    ) -> CheckedStep | None:
        """Check convolutions whose layer and streams exist; of others the backend says so."""
        meta = self._impl.forward_metadata
        step = self._step_of(meta)
        if step is None or not self._exist(layer_id, streams):
            return step
        if not isinstance(batch, ForwardBatch):
            return step
        step.check_may_run(operator.index(layer_id), streams, batch)
        if not values_are_checked(self.device):
            # There the base compares neither values nor memory.
            check_same_rows(meta, batch)
        return step

    def _exist(self, layer_id: int, streams: Sequence[str]) -> bool:
        try:
            place = operator.index(layer_id)
            return all((place, stream) in self._known for stream in streams)
        except TypeError:
            return False

    def _convolved(self, step: CheckedStep | None, layer_id: int, streams: Sequence[str]) -> None:
        if step is None:
            self._shadow.forget("a step ran that was not prepared here")
        else:
            step.has_run(operator.index(layer_id), streams)

    @contextmanager
    def _call(self, *, settles: bool = True) -> Iterator[None]:
        """Refuse a second thread; take what the call has written as reported."""
        if not self._in_call.acquire(blocking=False):
            raise MetadataError(
                "two threads use one backend at once: a backend belongs to one thread. Give each "
                "thread a backend of its own, or a lock around whole steps"
            )
        try:
            if settles:
                self._shadow.enter()
            else:
                self._shadow.look()
            try:
                # Now, so that the base does not call these methods a second time to do it.
                with plain_arithmetic(self._device_type):
                    yield
            finally:
                self._shadow.wrote()
        finally:
            self._in_call.release()


class _Replay:
    """A step that was announced for a replay."""

    def __init__(self, backend: CheckedBackend, step: CheckedStep) -> None:
        self._backend = backend
        self.step: object = step
        self._step = step

    def settle(self) -> None:
        """Take it as replayed."""
        self._step.settle()
        if self._backend._commit_replays and self._backend._verify is self._step:
            self._step.doubt("a commit that was captured may have been replayed")


def is_capturing(device: torch.device) -> bool:
    """Whether the device's current stream records instead of running."""
    if device.type == "cpu":
        return False
    capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return capturing is not None and bool(capturing())
