"""The slot allocator: which slots are in use. Host bookkeeping; it touches no device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..errors import PoolExhaustedError, SlotError

__all__ = ["SlotAllocator"]


class SlotAllocator:
    """Hands out slots 1 to ``num_slots``, oldest free slot first.

    Slot 0 is the dummy that padded rows point at, so it is neither handed out nor taken back.
    First-in first-out keeps a freed slot unused for as long as possible, which turns a stale read
    into a visibly old value instead of another request's fresh one.
    """

    __slots__ = ("_freed", "_in_use", "_unused", "num_slots")

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        # Slots that were never handed out come before those that were freed: a number is enough.
        self._unused = 1
        self._freed: deque[int] = deque()
        self._in_use: set[int] = set()

    @property
    def num_free(self) -> int:
        """Slots that can still be handed out."""
        return self.num_slots - len(self._in_use)

    def live(self) -> list[int]:
        """Return the slots in use, in ascending order."""
        return sorted(self._in_use)

    def take(self, count: int) -> list[int]:
        """Hand out ``count`` slots.

        Raises:
            SlotError: ``count`` is negative or no int.
            PoolExhaustedError: Fewer are free; none is taken.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise SlotError(f"alloc({count!r}): expected the number of slots, 0 or more")
        if count > self.num_free:
            raise PoolExhaustedError(
                f"alloc({count}): {self.num_free} of {self.num_slots} slots are free. Free "
                "finished requests and snapshots that nobody needs, or build the backend with more "
                "num_slots"
            )
        first = self._unused
        self._unused = min(first + count, self.num_slots + 1)
        slots = list(range(first, self._unused))
        slots += [self._freed.popleft() for _ in range(count - len(slots))]
        self._in_use.update(slots)
        return slots

    def give_back(self, slots: Sequence[int]) -> None:
        """Take slots back; all of them or, on an error, none.

        Raises:
            SlotError: A slot is not in use (a double free), is named twice, or was never handed
                out.
        """
        self.check_in_use("free", slots)
        self._in_use.difference_update(slots)
        self._freed.extend(slots)

    def check_in_use(self, what: str, slots: Sequence[int]) -> None:
        """Raise :class:`SlotError` unless all slots are in use and named once."""
        for slot in slots:
            if not 0 < slot <= self.num_slots:
                hint = " (slot 0 is the dummy, -1 means no slot)" if slot in (0, -1) else ""
                raise SlotError(f"{what}: slot {slot} is outside 1..{self.num_slots}{hint}")
            if slot not in self._in_use:
                raise SlotError(
                    f"{what}: slot {slot} is not in use; it was freed or never handed out"
                )
        if len(set(slots)) != len(slots):
            raise SlotError(f"{what}: {list(slots)} names a slot twice")
