"""What checked mode knows of every slot: who owns it, whether it was written, and its length.

Host bookkeeping, kept in parallel to the state; nothing here reads a window. What cannot be known
is unknown and never refused: state that an engine wrote itself, or that a replay moved.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..errors import SlotError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Announced", "Content", "PoolShadow", "Shadowed", "SlotRecord"]


class Content(enum.Enum):
    """What a slot holds."""

    UNKNOWN = "unknown"
    UNWRITTEN = "unwritten"
    WRITTEN = "written"
    #: Some convolutions of a step have advanced their windows and others have not.
    TORN = "torn"


@dataclass(slots=True)
class SlotRecord:
    """One slot.

    Attributes:
        content: What it holds.
        length: Tokens in its state, None = unknown.
        owner: How often it was handed out or taken back.
        writes: How often its state was written.
        note: How it came to be so, for messages.
    """

    content: Content = Content.UNKNOWN
    length: int | None = None
    owner: int = 0
    writes: int = 0
    note: str = "nothing is known of it"

    def set(self, content: Content, length: int | None, note: str) -> None:
        """Record a write."""
        self.content, self.length, self.note = content, length, note
        self.writes += 1


class Announced(Protocol):
    """A step whose effect the host has announced and not seen: a replay."""

    step: object

    def settle(self) -> None:
        """Record its effect."""


class Shadowed(Protocol):
    """What a pool has that a shadow asks it for; see :class:`.pool.ConvStatePool`."""

    @property
    def adopted(self) -> bool:
        """Whether the engine hands out the slots itself."""

    @property
    def layers(self) -> Sequence[Tensor]:
        """The state of every layer; raises PoolError while the pool is not bound."""

    def live_slots(self) -> Sequence[int]:
        """Return the slots that are handed out."""


class PoolShadow:
    """The slots of one pool. The pool reports its calls; checked backends report their steps.

    Attributes:
        announced: Steps that are replayed without the host's knowledge; settled by the next call.
        watches: Whether a change of the state's memory that nobody reported is a write of the
            engine's. False once something was captured: replays change it as well.
    """

    def __init__(self, pool: Shadowed) -> None:
        self._pool = pool
        self._records: dict[int, SlotRecord] = {}
        self._in_use: set[int] | None = None
        if not pool.adopted and pool.live_slots():
            self._in_use = set(pool.live_slots())
        self._versions: list[int] | None = None
        self.announced: list[Announced] = []
        self.watches = True
        self.wrote()

    def __getitem__(self, slot: int) -> SlotRecord:
        """Return the record of a row of the pool."""
        return self._records.setdefault(slot, SlotRecord())

    def in_use(self, slot: int) -> bool:
        """Whether a slot is handed out; True where the engine hands out the slots itself."""
        return self._in_use is None or slot in self._in_use

    def enter(self) -> None:
        """Record what happened since the last call: replays, and writes of the engine."""
        announced, self.announced = self.announced, []
        for step in announced:
            step.settle()
        self.look()

    def look(self) -> None:
        """Look for writes that nobody reported: they are the engine's."""
        if self.watches and self._versions != self._read_versions():
            self.forget("the state was written directly")
            self.wrote()

    def wrote(self) -> None:
        """Take note that the writes so far were reported."""
        self._versions = self._read_versions()

    def forget(self, why: str) -> None:
        """Know nothing of the content of any slot from now on."""
        for slot in self._records:
            self.doubt(slot, why)

    def doubt(self, slot: int, why: str) -> None:
        """Know nothing of the content of one slot from now on. No step is to blame for it."""
        record = self[slot]
        record.content, record.length, record.note = Content.UNKNOWN, None, why

    def handed_out(self, slots: Iterable[int]) -> None:
        """Record :meth:`ConvStatePool.alloc`."""
        self.enter()
        if self._in_use is None:
            self._in_use = set()
        for slot in slots:
            self._in_use.add(slot)
            record = self[slot]
            record.owner += 1
            record.set(Content.UNWRITTEN, None, "it was handed out and not written since")

    def taken_back(self, slots: Iterable[int]) -> None:
        """Record :meth:`ConvStatePool.free`."""
        self.enter()
        for slot in slots:
            if self._in_use is not None:
                self._in_use.discard(slot)
            record = self[slot]
            record.owner += 1
            record.set(Content.UNWRITTEN, None, "it was freed")

    def cleared(self, slots: Iterable[int]) -> None:
        """Record :meth:`ConvStatePool.clear`."""
        self.enter()
        for slot in slots:
            self[slot].set(Content.WRITTEN, 0, "it was cleared")

    def restored(self, slots: Iterable[int]) -> None:
        """Record :meth:`ConvStatePool.restore`, which does not say how many tokens it brings."""
        self.enter()
        for slot in slots:
            self[slot].set(Content.WRITTEN, None, "it was restored")

    def told(self, slots: Sequence[int], lengths: Sequence[int | None]) -> None:
        """Record :meth:`ConvStatePool.mark_written`."""
        self.enter()
        self.wrote()
        for slot, length in zip(slots, lengths, strict=True):
            self[slot].set(Content.WRITTEN, length, "the engine wrote it")

    def copied(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Record :meth:`ConvStatePool.copy`, after :meth:`check_read`."""
        for source, target in zip(sources, targets, strict=True):
            record = self[source]
            self[target].set(record.content, record.length, f"it is a copy of slot {source}")

    def rebound(self) -> None:
        """Record :meth:`ConvStatePool.bind`."""
        self.enter()
        self.forget("the pool was bound to other tensors")
        self.wrote()

    def check_read(self, what: str, slots: Iterable[int]) -> None:
        """Refuse to hand on a state that was never written, or half a step.

        Raises:
            SlotError: The message says which slot, and why.
        """
        self.enter()
        for slot in slots:
            record = self[slot]
            if record.content is Content.UNWRITTEN:
                raise SlotError(
                    f"{what}: slot {slot} was never written by its owner: {record.note}. Treat it "
                    "as a miss: prefill instead of copying"
                )
            if record.content is Content.TORN:
                raise SlotError(
                    f"{what}: slot {slot} holds half a step: {record.note}. Run the step to its "
                    "end first, or free the slot"
                )

    def _read_versions(self) -> list[int] | None:
        """Return torch's counters of writes, one per layer; None where there are none."""
        try:
            return [layer._version for layer in self._pool.layers]
        except RuntimeError:
            # An unbound pool (PoolError), and tensors of inference mode, which are not counted.
            return None
