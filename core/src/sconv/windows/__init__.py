"""Where a verify step keeps what the commit needs, in one of three layouts.

Rows are positions in the batch (of the graph bucket), not slots: a padded row has its own and
overwrites nobody's. Verify writes here and leaves the pool alone: a skipped commit loses nothing.

* `dense`, :class:`VerifyWindows`: the window after every token, each on its own;
* `dedup`, :class:`DedupWindows`: the same windows overlapping in memory; chains only;
* `inputs`, :class:`InputWindows`: the tokens alone; a window is rebuilt at the commit.

All three restore the same bits. :func:`choose_layout` is the one place where the layout of a
backend is decided, :func:`make_windows` the one where it is made.
"""

from __future__ import annotations

from .choice import LAYOUTS, choose_layout, make_windows
from .dedup import DedupWindows
from .dense import VerifyWindows
from .inputs import InputWindows

__all__ = [
    "LAYOUTS",
    "DedupWindows",
    "InputWindows",
    "VerifyWindows",
    "choose_layout",
    "make_windows",
]
