"""Program shapes by shape class: what ``benchmarks/bench.py --tune`` found on one NVIDIA H200.

Nothing is tuned while serving. A class is a range of work, measured in channels of all rows or
tokens of a launch; its shape was among the fastest at all measured sizes in it (the results are in
``benchmarks/results/``), and :mod:`sconv_cuda.warmup` compiles each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from .launch import Tile

__all__ = [
    "COMMIT_TILES",
    "DECODE_TILES",
    "DRAFT_EXTEND_TILES",
    "EXTEND_TILES",
    "RAGGED_TILES",
    "TREE_ROWS",
    "UNIFORM_ROWS",
    "VERIFY_TILES",
    "RaggedTile",
    "fit",
    "tile_for",
]


@dataclass(frozen=True, slots=True)
class RaggedTile:
    """The shape of a program of ragged metadata.

    Attributes:
        rows: Its rows.
        scan: Words of lengths that it adds up at once.
        chunk: Tokens whose row it writes at once.
        warps: Its warps.
        shares: Programs that own the same rows and share their tokens.
    """

    rows: int
    scan: int
    chunk: int
    warps: int
    shares: int


#: (most work, shape), in ascending order; the last one has no bound.
Table = tuple[tuple[float, Tile], ...]

_NO_BOUND: Final = float("inf")

DECODE_TILES: Final[Table] = (
    (1 << 20, Tile(block=256, warps=4, depth=1, ahead=True)),
    (1 << 22, Tile(block=512, warps=2, depth=4, ahead=True)),
    (_NO_BOUND, Tile(block=256, warps=2, depth=4, ahead=True)),
)

EXTEND_TILES: Final[Table] = (
    (1 << 22, Tile(block=512, warps=4, depth=4, registers=64)),
    (1 << 24, Tile(block=256, warps=2, depth=8, registers=64)),
    (_NO_BOUND, Tile(block=256, warps=2, depth=12, registers=72)),
)

#: The depth is that of one pass over a row's tokens.
VERIFY_TILES: Final[Table] = (
    (_NO_BOUND, Tile(block=256, warps=2, depth=4, ahead=True, registers=64)),
)
DRAFT_EXTEND_TILES: Final[Table] = ((_NO_BOUND, Tile(block=256, warps=2, depth=4)),)

COMMIT_TILES: Final[Table] = ((_NO_BOUND, Tile(block=1024, warps=4, depth=1)),)

#: Rows of a program of uniform metadata, and of such with trees, which are done one by one.
UNIFORM_ROWS: Final = 128
TREE_ROWS: Final = 2

RAGGED_TILES: Final = (
    (512, RaggedTile(rows=2, scan=512, chunk=256, warps=4, shares=8)),
    (2048, RaggedTile(rows=4, scan=1024, chunk=256, warps=4, shares=1)),
    (_NO_BOUND, RaggedTile(rows=32, scan=4096, chunk=256, warps=8, shares=1)),
)

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
    if block == tile.block:
        return tile
    return replace(tile, block=block, warps=warps)
