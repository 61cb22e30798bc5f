"""Slots on lease: taken by a cache when it is first used, returned when it dies."""

from __future__ import annotations

import gc
from collections import deque

from sconv import ConvStatePool, PoolExhaustedError

__all__ = ["SlotLedger"]


class SlotLedger:
    """Hands out the slots of a pool and takes back those of dead caches.

    A cache may die inside the allocator, in any thread, wherever the garbage collector happens to
    run. So a finalizer only appends its slots to :attr:`returned`; the next :meth:`take` gives them
    back.
    """

    def __init__(self, pool: ConvStatePool, max_requests: int) -> None:
        self.pool = pool
        self.max_requests = max_requests
        self.returned: deque[list[int]] = deque()

    @property
    def rows_held(self) -> int:
        """Rows whose state is alive now."""
        self._drain()
        return self.max_requests - self.pool.num_free

    def take(self, rows: int) -> list[int]:
        """Lease one slot per row; their content is undefined.

        Raises:
            sconv.PoolExhaustedError: Live caches hold too many; none is taken.
        """
        if rows > self.max_requests:
            raise PoolExhaustedError(
                f"a batch of {rows} rows (sequences or beams) does not fit: the model was attached "
                f"with max_requests={self.max_requests}"
            )
        self._drain()
        if rows > self.pool.num_free:
            # A cache in a reference cycle, of a caught exception for example, is dead but not yet
            # found.
            gc.collect()
            self._drain()
        if rows > self.pool.num_free:
            raise PoolExhaustedError(
                f"{rows} more rows are needed, but {self.rows_held} of "
                f"max_requests={self.max_requests} are held by live caches: prompt caches and "
                "their copies, the cache of a GenerateOutput, a generation that is still running, "
                "or a caught exception's traceback. Drop what is no longer needed, or attach with "
                "more max_requests"
            )
        return [int(slot) for slot in self.pool.alloc(rows)]

    def give_back(self, slots: list[int]) -> None:
        """Return slots at once."""
        self.pool.free(slots)

    def _drain(self) -> None:
        while self.returned:
            self.pool.free(self.returned.popleft())
