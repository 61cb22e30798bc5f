"""SCV3xx: code that a graph records; :mod:`sconv_contract.graph_scan` follows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Final

from ..findings import Finding, Severity
from ..graph_scan.evaluator import BreachKind
from .rule import Rule
from .subjects import Recording

__all__ = ["RULES"]


class _Recorded(Rule[Recording]):
    """A rule that reports one kind of breach."""

    kind: ClassVar[BreachKind]
    scope = Recording

    def check(self, subject: Recording) -> Iterator[Finding]:
        """Yield the breaches of its kind."""
        for hook, breach in subject.breaches:
            if breach.kind is self.kind:
                yield self.found(breach.where, breach.message, hook=hook.name)


class HostSync(_Recorded):
    """An in-graph hook, and what it calls, hands no device value to the host.

    A capture fails at a sync, or freezes the value of that moment into every replay.
    """

    id = "SCV301"
    name = "host sync in graph"
    example = (
        "def init_forward_metadata_in_graph(self, forward_batch):\n"
        "    tokens = forward_batch.extend_seq_lens.sum().item()"
    )
    fix = "Do it in init_forward_metadata_out_graph, or keep the value on the device."
    kind = BreachKind.SYNC


class GraphAllocation(_Recorded):
    """init_forward_metadata_in_graph allocates nothing, and no in-graph hook keeps a new tensor.

    A replay runs no Python, so a tensor made there is at another address than the captured one.
    Where the shape is static and the tensor dies with the call it may be harmless.
    """

    id = "SCV302"
    name = "allocation in graph"
    example = (
        "def init_forward_metadata_in_graph(self, forward_batch):\n"
        "    self._index = torch.arange(forward_batch.batch_size)"
    )
    fix = "Allocate it in init_graph_state and fill it with out= or copy_."
    severity = Severity.WARNING
    kind = BreachKind.ALLOCATION


class DynamicShape(_Recorded):
    """No tensor of an in-graph hook has a shape that depends on values.

    A graph has one shape; nonzero and indexing with a mask ask the device how many there are.
    """

    id = "SCV303"
    name = "data-dependent shape in graph"
    example = "live = slots[slots >= 0]"
    fix = "Keep the full shape and select with torch.where, or write unused rows to the dummy slot."
    kind = BreachKind.DYNAMIC_SHAPE


class PythonDecision(_Recorded):
    """No in-graph hook decides in Python by the value of a tensor.

    bool(tensor), int(tensor), if, while, assert and slice bounds sync; the branch taken at capture
    is replayed for ever.
    """

    id = "SCV304"
    name = "Python decision on a device value"
    example = "if forward_batch.seq_lens.max() > 0:\n    ..."
    fix = "Select on the device with torch.where, or decide in the out-of-graph hook."
    kind = BreachKind.BRANCH


class TensorOutput(_Recorded):
    """No in-graph hook prints, formats or logs a tensor.

    Formatting a tensor copies it to the host, which is a sync.
    """

    id = "SCV305"
    name = "tensor printed or logged in graph"
    example = 'print("slots", slots)'
    fix = "Remove it, or print the shape."
    kind = BreachKind.OUTPUT


RULES: Final = (HostSync(), GraphAllocation(), DynamicShape(), PythonDecision(), TensorOutput())
