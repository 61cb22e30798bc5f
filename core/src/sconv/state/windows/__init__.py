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

from collections.abc import Sequence
from typing import Final

import torch

from ...errors import SpecError
from ..spec import StateSpec
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

#: Every layout of this project, the largest first.
LAYOUTS: Final[dict[str, type[VerifyWindows]]] = {
    kind.layout: kind for kind in (VerifyWindows, DedupWindows, InputWindows)
}


def choose_layout(
    spec: StateSpec, supported: Sequence[str], *, backend: str = "this backend"
) -> str:
    """Return the layout for a spec: the one that it names, or the first that can hold its drafts.

    Args:
        spec: What the windows are for.
        supported: Layouts that the backend keeps, first choice first.
        backend: Whom an error names.

    Raises:
        SpecError: The backend does not keep the layout, or the layout cannot hold trees.
    """
    wanted = spec.window_layout
    offered = list(supported) or ["dense"] * (spec.max_draft_tokens == 1)
    choices = offered if wanted == "auto" else [wanted]
    fitting = [layout for layout in choices if layout in offered and _holds(spec, layout)]
    if fitting:
        return fitting[0]
    kept = f"it keeps {', '.join(offered) or 'none'}"
    if wanted not in ("auto", *offered):
        raise SpecError(f"{backend} does not support window_layout={wanted!r} ({kept})")
    raise SpecError(
        f"{backend} does not support draft_topk={spec.draft_topk} with window_layout={wanted!r} "
        f"({kept}): in 'dedup' the windows of two children of one node would need different values "
        "in one column. Ask for 'dense' or 'inputs', or for draft_topk=1"
    )


def make_windows(layout: str, spec: StateSpec, device: torch.device) -> VerifyWindows:
    """Allocate verify windows of a layout, one row per request row. Out of graph.

    Raises:
        SpecError: No layout has this name.
    """
    try:
        kind = LAYOUTS[layout]
    except KeyError:
        raise SpecError(f"no window layout {layout!r}: expected {', '.join(LAYOUTS)}") from None
    return kind(spec, device)


def _holds(spec: StateSpec, layout: str) -> bool:
    # A layout that a plugin brings itself holds what its backend declares.
    kind = LAYOUTS.get(layout)
    return spec.draft_topk == 1 or kind is None or kind.takes_trees
