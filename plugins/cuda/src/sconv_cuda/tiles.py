"""Program shapes by shape class: what ``benchmarks/tune.py`` found on one NVIDIA H200.

Nothing is tuned while serving. A class is a range of work, measured in channels of all rows or tokens
of a launch; its shape was the fastest over the sizes in it, and :mod:`sconv_cuda.warmup` compiles
each of them.
"""

from __future__ import annotations

from typing import Final

from .launch import Tile

__all__ = [
    "COMMIT",
    "DECODE",
    "EXTEND",
    "RAGGED_ROWS",
    "TOKEN_CHUNK",
    "TREE_ROWS",
    "UNIFORM_ROWS",
    "VERIFY",
    "fit",
    "tile_for",
]

#: (most work, shape), in ascending order; the last one has no bound.
Table = tuple[tuple[float, Tile], ...]

_NO_BOUND: Final = float("inf")

DECODE: Final[Table] = (
    (1 << 16, Tile(block=256, warps=1, depth=1)),
    (_NO_BOUND, Tile(block=512, warps=2, depth=1)),
)

EXTEND: Final[Table] = (
    (1 << 22, Tile(block=256, warps=1, depth=4)),
    (1 << 25, Tile(block=512, warps=2, depth=8)),
    (_NO_BOUND, Tile(block=512, warps=2, depth=16)),
)

#: Also draft-extend. The depth is that of one pass over a row's tokens.
VERIFY: Final[Table] = ((_NO_BOUND, Tile(block=512, warps=2, depth=4)),)

COMMIT: Final[Table] = ((_NO_BOUND, Tile(block=1024, warps=4, depth=1)),)

#: Rows of a program of uniform metadata, and of such with trees, which are done one by one.
UNIFORM_ROWS: Final = 128
TREE_ROWS: Final = 2

#: (most rows of the batch, rows of a program, lengths read at once) of ragged metadata.
RAGGED_ROWS: Final = ((512, 2, 512), (_NO_BOUND, 16, 4096))

#: Tokens whose row a program of ragged metadata writes at once.
TOKEN_CHUNK: Final = 1024

#: Smallest block: one vector access of each lane of a warp.
_SMALLEST: Final = 256


def tile_for(table: Table, work: int, widest: int) -> Tile:
    """Return the shape for a launch.

    Args:
        table: One of the tables above.
        work: Channels times rows, tokens, or rows and layers.
        widest: Channels of the widest stream; no block is more than twice as wide.
    """
    for bound, tile in table:
        if work <= bound:
            return fit(tile, widest)
    raise AssertionError("the last class of a table has no bound")


def fit(tile: Tile, widest: int) -> Tile:
    """Narrow a shape to streams that are much narrower than its block."""
    block, warps = tile.block, tile.warps
    while block > _SMALLEST and block >= 2 * widest:
        block, warps = block // 2, max(warps // 2, 1)
    return Tile(block, warps, tile.depth)
