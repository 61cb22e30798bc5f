"""The convolution state of one cache: leased slots, the running forward, its history."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from .conv_modules import ConvModule
from .history import History
from .slot_leases import SlotLedger
from .step_runner import Part, StepRunner

__all__ = ["Binding"]


@dataclass(slots=True)
class _Step:
    """A forward: its parts, and how many of its convolutions have not run yet."""

    rows: int
    tokens: int
    parts: tuple[Part, ...]
    recorded: bool
    resumes: bool
    left: int


class Binding:
    """Ties one cache to the pool. All its rows have the same number of tokens, padding included.

    Attributes:
        runner: Calls the backend.
        ledger: Where slots come from.
        num_convolutions: Convolutions of a forward.
        static: The cache has layers of a fixed size.
        slots: ``[B]`` int64 slot of each row on the device, or None before the first forward.
        committed: Tokens of each row that are in the pool.
        history: Tokens behind them that a rollback may take back.
        advancing: Serves the one convolution that calls ``cache.update_conv_state`` now, see
            :meth:`ConvHook.serve`; None = no such call is expected.
    """

    __slots__ = (
        "__weakref__",
        "_drafted",
        "_lease",
        "_step",
        "advancing",
        "committed",
        "history",
        "ledger",
        "num_convolutions",
        "runner",
        "slots",
        "static",
    )

    def __init__(
        self, runner: StepRunner, ledger: SlotLedger, num_convolutions: int, *, static: bool = False
    ) -> None:
        self.runner = runner
        self.ledger = ledger
        self.num_convolutions = num_convolutions
        self.static = static
        self.slots: Tensor | None = None
        self.committed = 0
        self.history = History()
        self.advancing: Callable[[Tensor, int], Tensor] | None = None
        self._lease: list[int] = []
        self._step: _Step | None = None
        self._drafted = 0
        # At interpreter exit the pool dies with its slots, and torch may be half gone.
        weakref.finalize(self, ledger.returned.append, self._lease).atexit = False

    @property
    def rows(self) -> int:
        """Rows that hold a slot."""
        return len(self._lease)

    @property
    def has_state(self) -> bool:
        """Whether a forward has run."""
        return self.committed + self.history.length > 0

    def lease(self, rows: int) -> Tensor:
        """Take a slot per row, if there is none yet.

        Raises:
            sconv.PoolExhaustedError: Live caches hold too many.
            ValueError: The cache holds another number of rows.
        """
        if self.slots is None:
            self._lease[:] = self.ledger.take(rows)
            self.slots = self.runner.index(self._lease)
        elif len(self._lease) != rows:
            raise ValueError(
                f"the cache holds {len(self._lease)} rows, the batch has {rows}: make them equal "
                "first, with cache.batch_repeat_interleave(repeats) or "
                "cache.batch_select_indices(indices) on a copy of the cache"
            )
        return self.slots

    def begin(self, rows: int, tokens: int, *, recording: bool) -> None:
        """Prepare a forward of ``tokens`` tokens per row.

        Args:
            rows: Rows B.
            tokens: Tokens T of every row, padding included.
            recording: A rollback may follow (``cache.activate_past_recording()``).
        """
        self._require_whole()
        logits, self.runner.announced.logits = self.runner.announced.logits, None
        slots = self.lease(rows)
        resumes = self.has_state
        if recording:
            drafted = min(logits, tokens) if logits else tokens if self.has_state else 1
            parts = self._plan_recorded(slots, tokens)
            self._drafted += drafted - 1
        else:
            if self.history.length:
                # Recording was switched off without a crop: everything recorded so far is certain.
                self.crop(0)
            if tokens == 1 and self.committed:
                parts = (self.runner.decode(slots),)
            else:
                parts = (self.runner.extend(slots, tokens, self.committed),)
            self.committed += tokens
        self.runner.counters.forwards += 1
        self._step = _Step(rows, tokens, parts, recording, resumes, self.num_convolutions)

    def convolve(
        self, conv: ConvModule, x: Tensor, weight: Tensor, bias: Tensor | None, residual: bool
    ) -> Tensor:
        """Run one convolution of the forward that was begun: ``[B, T, D]`` in and out."""
        step = self._running(conv, x)
        if not step.recorded:
            y = self.runner.convolve(step.parts[0], x, conv, weight, bias, residual)
        else:
            y = self._convolve_recorded(step, conv, x, weight, bias, residual)
        step.left -= 1
        return y

    def advance(self, conv: ConvModule, x: Tensor) -> Tensor:
        """Advance a convolution that its module computes itself.

        Args:
            conv: The convolution.
            x: ``[B, T, D]`` inputs.

        Returns:
            ``[B, h + T, D]``, the inputs before ``x`` that the taps of x reach, then ``x``.
        """
        step = self._running(conv, x)
        pool = self.runner.backend.pool
        window = pool.conv(conv.layer_id, conv.stream)
        if pool.spec.window_axis == "channel":
            window = window.transpose(1, 2)
        assert self.slots is not None
        before = window.index_select(0, self.slots).to(x.dtype)
        if not step.resumes:
            before = torch.zeros_like(before)
        inputs = torch.cat([before, self.history.chain(conv, x)], dim=1)
        # Only the state is advanced, so any weight will do.
        self.convolve(conv, x, x.new_zeros(conv.weight.shape), None, residual=False)
        return inputs

    def _running(self, conv: ConvModule, x: Tensor) -> _Step:
        step = self._step
        if step is None or step.left == 0 or x.shape[0] != step.rows or x.shape[1] != step.tokens:
            raise RuntimeError(
                f"the convolution {conv.stream!r} of cache layer {conv.cache_layer} ran outside of "
                "a forward of the attached model; call the model, not its layers"
            )
        return step

    def crop(self, removed: int) -> None:
        """Commit what was recorded, but for the last ``removed`` tokens of every row.

        Raises:
            ValueError: Fewer tokens can be taken back; nothing changed here.
        """
        with self.runner.lock:
            self._require_whole()
            recorded = self.history.length
            if removed > recorded:
                self._refuse_rollback(removed)
            if recorded == 0:
                return
            assert self.slots is not None
            kept = recorded - removed
            if self._owns_last_verify():
                self.runner.commit(self.slots, kept)
            elif kept:
                self._replay(self.slots, kept)
            counters = self.runner.counters
            counters.commits += 1
            counters.drafted += self._drafted
            counters.accepted += max(self._drafted - removed, 0)
            self._drafted = 0
            self.committed += kept
            self.history.clear()

    def select_rows(self, rows: list[int]) -> None:
        """Make row i what row ``rows[i]`` was: beams, repeats and selections of a batch.

        The first row that wants a source keeps its slot, the others get copies in the slots that
        nobody wants any more. So a reorder needs no slot beyond those of the cache, and copies no
        more rows than change.
        """
        with self.runner.lock:
            self._require_whole()
            if self.slots is None or rows == list(range(self.rows)):
                return
            old = list(self._lease)
            new, copies = _share_slots([old[row] for row in rows])
            kept = set(new)
            spare = [slot for slot in old if slot not in kept]
            fresh = self.ledger.take(max(len(copies) - len(spare), 0))
            targets = (spare + fresh)[: len(copies)]
            for (row, _), slot in zip(copies, targets, strict=True):
                new[row] = slot
            # The lease names fresh slots before they are filled: a failure below loses none.
            self._lease[:] = old + fresh
            if copies:
                self.ledger.pool.copy([source for _, source in copies], targets)
            self._lease[:] = new
            self.ledger.give_back(spare[len(copies) :])
            self.history.select_rows(self.runner.index(rows))
            self.slots = self.runner.index(new)
            self._step = None

    def reset(self) -> None:
        """Forget all tokens and return the slots, so that the cache can be used with any batch."""
        with self.runner.lock:
            self.ledger.give_back(list(self._lease))
            self._lease.clear()
            self.slots = None
            self.committed = 0
            self.history.clear()
            self._step = None
            self._drafted = 0

    def adopt_state(self, committed: int, history: History) -> None:
        """Take over the token counts of a state that was written to the leased slots."""
        self.committed = committed
        self.history = history

    def __deepcopy__(self, memo: dict[int, object]) -> Binding:
        """Copy the rows into slots of their own; the pool is never copied."""
        with self.runner.lock:
            self._require_whole()
            other = Binding(self.runner, self.ledger, self.num_convolutions, static=self.static)
            memo[id(self)] = other
            if self.slots is not None:
                other.lease(self.rows)
                self.ledger.pool.copy(self._lease, other._lease)
                other.adopt_state(self.committed, self.history.copy())
                other._drafted = self._drafted
            return other

    def _plan_recorded(self, slots: Tensor, tokens: int) -> tuple[Part, ...]:
        """Prepare the uncommitted chain: what no rollback can reach is kept for certain at once."""
        if self.static:
            raise ValueError(
                "assisted decoding with a static cache is refused: transformers 5.24 leaves "
                "rejected keys in it, reads unwritten slots while it records, and can index past "
                "its end. Use a dynamic cache"
            )
        if self.runner.max_rollback == 0:
            raise ValueError(
                "this cache records for a rollback (assisted decoding), but the model was "
                "attached with max_rollback=0: attach with max_rollback of at least the number of "
                "draft tokens"
            )
        total = self.history.length + tokens
        certain = max(total - self.runner.backend.spec.max_draft_tokens, 0)
        parts: tuple[Part, ...] = ()
        if certain:
            parts = (self.runner.extend(slots, certain, self.committed),)
        elif not self.has_state:
            # A verify step resumes the window whatever it holds.
            self.ledger.pool.clear(self._lease)
        parts += (self.runner.verify(slots, certain, total),)
        self.committed += certain
        self.history.length = total - certain
        return parts

    def _convolve_recorded(
        self,
        step: _Step,
        conv: ConvModule,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: bool,
    ) -> Tensor:
        chain = self.history.chain(conv, x)
        outputs = []
        for part in step.parts:
            inputs = chain[:, part.start : part.stop]
            outputs.append(self.runner.convolve(part, inputs, conv, weight, bias, residual))
        self.history.keep(conv, chain, step.parts[-1].start)
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return y[:, -step.tokens :]

    def _owns_last_verify(self) -> bool:
        return self._step is not None and self._step.parts[-1] is self.runner.last_verify

    def _replay(self, slots: Tensor, kept: int) -> None:
        """Commit without verify windows: another cache has verified since, or rows have moved."""
        part = self.runner.extend(slots, kept, self.committed)
        self.runner.replay(part, ((key, value[:, :kept]) for key, value in self.history.items()))

    def _refuse_rollback(self, removed: int) -> NoReturn:
        limit = self.runner.max_rollback
        if self.history.length > limit:
            raise ValueError(
                f"a rollback of {removed} tokens is deeper than max_rollback={limit}: attach with "
                f"max_rollback={removed} or more"
            )
        raise ValueError(
            f"a rollback of {removed} tokens, but the cache has recorded {self.history.length} "
            "since the last crop: convolution state that was cropped once cannot be cropped "
            "further"
        )

    def _require_whole(self) -> None:
        if self._step is not None and self._step.left:
            raise RuntimeError(
                "the last forward with this cache was aborted half-way, so its layers disagree "
                "about what they have seen: call cache.reset(), or start from a new cache"
            )


def _share_slots(sources: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Give every slot to the first row that wants it; list ``(row, slot)`` of the others."""
    new: list[int] = []
    copies: list[tuple[int, int]] = []
    seen: set[int] = set()
    for row, slot in enumerate(sources):
        if slot in seen:
            copies.append((row, slot))
        seen.add(slot)
        new.append(slot)
    return new, copies
