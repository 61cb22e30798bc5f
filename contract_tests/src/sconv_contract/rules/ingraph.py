"""SCV3xx: code that a graph records."""

from __future__ import annotations

from typing import Final

from ..findings import Severity
from .rule import Rule

__all__ = ["ALLOCATION", "BRANCH", "DYNAMIC_SHAPE", "OUTPUT", "RULES", "SYNC"]

SYNC: Final = Rule(
    "SCV301",
    "host sync in graph",
    "An in-graph hook, and what it calls, hands no device value to the host.",
    "A capture fails at a sync, or freezes the value of that moment into every replay.",
    "def init_forward_metadata_in_graph(self, forward_batch):\n"
    "    tokens = forward_batch.extend_seq_lens.sum().item()",
    "Do it in init_forward_metadata_out_graph, or keep the value on the device.",
)
ALLOCATION: Final = Rule(
    "SCV302",
    "allocation in graph",
    "init_forward_metadata_in_graph allocates nothing, and no in-graph hook keeps a new tensor.",
    "A replay runs no Python, so a tensor made there is at another address than the captured one."
    " Where the shape is static and the tensor dies with the call it may be harmless.",
    "def init_forward_metadata_in_graph(self, forward_batch):\n"
    "    self._index = torch.arange(forward_batch.batch_size)",
    "Allocate it in init_graph_state and fill it with out= or copy_.",
    Severity.WARNING,
)
DYNAMIC_SHAPE: Final = Rule(
    "SCV303",
    "data-dependent shape in graph",
    "No tensor of an in-graph hook has a shape that depends on values.",
    "A graph has one shape; nonzero and indexing with a mask ask the device how many there are.",
    "live = slots[slots >= 0]",
    "Keep the full shape and select with torch.where, or write unused rows to the dummy slot.",
)
BRANCH: Final = Rule(
    "SCV304",
    "Python decision on a device value",
    "No in-graph hook decides in Python by the value of a tensor.",
    "bool(tensor), int(tensor), if, while, assert and slice bounds sync; the branch taken at"
    " capture is replayed for ever.",
    "if forward_batch.seq_lens.max() > 0:\n    ...",
    "Select on the device with torch.where, or decide in the out-of-graph hook.",
)
OUTPUT: Final = Rule(
    "SCV305",
    "tensor printed or logged in graph",
    "No in-graph hook prints, formats or logs a tensor.",
    "Formatting a tensor copies it to the host, which is a sync.",
    'print("slots", slots)',
    "Remove it, or print the shape.",
)

RULES: Final = (SYNC, ALLOCATION, DYNAMIC_SHAPE, BRANCH, OUTPUT)
