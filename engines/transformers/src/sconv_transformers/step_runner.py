"""The only place that calls the backend's step hooks, and counts them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from threading import RLock, local

import torch
from torch import Tensor

from sconv import Backend, ForwardBatch, ForwardMode, ShortConvMetadata

from .conv_modules import ConvModule

__all__ = ["Counters", "Part", "StepRunner"]


@dataclass(slots=True)
class Counters:
    """What happened since the model was attached.

    Attributes:
        forwards: Forwards that read or wrote convolution state.
        metadata_builds: Calls of ``init_forward_metadata``. One per forward; a recording forward
            that outgrows ``max_rollback`` (prompt and first draft together) takes two, and so does
            a rollback that has to be replayed.
        commits: Rollback points, one per target forward of assisted decoding.
        drafted: Candidate tokens that were verified; a compiled first forward of a cache, which
            has them behind its prompt, does not count.
        accepted: Candidate tokens that were kept.
        reorders: Beam reorders.
    """

    forwards: int = 0
    metadata_builds: int = 0
    commits: int = 0
    drafted: int = 0
    accepted: int = 0
    reorders: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return a copy as a plain dictionary."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Part:
    """One prepared step over tokens ``start`` to ``stop`` of every row.

    A forward is one part, except where a draft is verified behind a long prompt.
    """

    batch: ForwardBatch
    metadata: ShortConvMetadata
    start: int
    stop: int

    @property
    def verifies(self) -> bool:
        """Whether its tokens may be taken back."""
        return self.batch.forward_mode is ForwardMode.TARGET_VERIFY


class _Announced(local):
    logits: int | None = None


class StepRunner:
    """A backend with its counters.

    Attributes:
        backend: The backend.
        max_rollback: Most tokens that a rollback takes back.
        counters: What was called.
        last_verify: The part that the backend's verify windows belong to.
        announced: ``logits_to_keep`` of the forward that runs now in this thread, as far as it is
            an int. In assisted decoding that is the number of candidates plus one.
        lock: Held by a thread while it calls the backend or changes slots: a backend is for one
            thread at a time. No code of the model or of transformers runs under it.
    """

    def __init__(self, backend: Backend, max_rollback: int) -> None:
        self.backend = backend
        self.max_rollback = max_rollback
        self.counters = Counters()
        self.last_verify: Part | None = None
        self.announced = _Announced()
        self.lock = RLock()
        self._current: Part | None = None

    def index(self, values: list[int]) -> Tensor:
        """Return an int64 tensor on the backend's device that outlives inference mode."""
        with torch.inference_mode(False):
            return torch.tensor(values, dtype=torch.int64, device=self.backend.pool.device)

    def decode(self, slots: Tensor) -> Part:
        """Prepare one token per row."""
        return self._prepare(ForwardBatch.decode(slots=slots), 0, 1)

    def extend(self, slots: Tensor, tokens: int, prefix: int) -> Part:
        """Prepare ``tokens`` tokens per row, behind ``prefix`` tokens that are in the state."""
        rows = slots.shape[0]
        batch = ForwardBatch.extend(
            slots=slots,
            extend_seq_lens=torch.full_like(slots, tokens),
            extend_prefix_lens=torch.full_like(slots, prefix),
            num_tokens=rows * tokens,
        )
        return self._prepare(batch, 0, tokens)

    def verify(self, slots: Tensor, start: int, stop: int) -> Part:
        """Prepare tokens that may be taken back."""
        batch = ForwardBatch.target_verify(slots=slots, draft_token_num=stop - start)
        self.last_verify = self._prepare(batch, start, stop)
        return self.last_verify

    def convolve(
        self,
        part: Part,
        x: Tensor,
        conv: ConvModule,
        weight: Tensor,
        bias: Tensor | None,
        residual: bool,
    ) -> Tensor:
        """Run one convolution of a part: ``[B, T, D]`` in and out, T being the part's tokens."""
        self._make_current(part)
        rows, tokens, dim = x.shape
        y = self.backend.short_conv(
            x.reshape(rows * tokens, dim),
            weight,
            layer_id=conv.layer_id,
            stream=conv.stream,
            forward_batch=part.batch,
            bias=bias,
            residual=residual,
        )
        return y.view(rows, tokens, dim)

    def replay(self, part: Part, inputs: Iterable[tuple[tuple[int, str], Tensor]]) -> None:
        """Advance windows by inputs that were convolved before, ``[B, T, D]`` each."""
        kernel = self.backend.spec.kernel_size
        for (layer_id, stream), x in inputs:
            # Only the state matters, so any weight will do; the real one may be offloaded by now.
            self.backend.short_conv(
                x.flatten(0, 1),
                x.new_zeros(x.shape[2], kernel),
                layer_id=layer_id,
                stream=stream,
                forward_batch=part.batch,
                residual=False,
            )

    def commit(self, slots: Tensor, tokens: int) -> None:
        """Keep the first ``tokens`` tokens of the last verify step of every row, 0 = none."""
        self.backend.update_mamba_state_after_mtp_verify(
            last_correct_step_indices=torch.full_like(slots, tokens - 1),
            mamba_track_indices=None,
            mamba_steps_to_track=None,
            req_pool_indices=slots,
        )

    def _prepare(self, batch: ForwardBatch, start: int, stop: int) -> Part:
        self.backend.init_forward_metadata(batch)
        self.counters.metadata_builds += 1
        metadata = self.backend.forward_metadata
        assert metadata is not None
        self._current = Part(batch, metadata, start, stop)
        return self._current

    def _make_current(self, part: Part) -> None:
        """Put the step of a part back, where another part or another thread has prepared its own.

        The verify windows of the backend are those of one step. They are given up when an earlier
        verify step goes on, as it writes to them too.
        """
        if self._current is not part:
            self.backend.forward_metadata = part.metadata
            self._current = part
        if self.last_verify is not None and part is not self.last_verify and part.verifies:
            self.last_verify = None
