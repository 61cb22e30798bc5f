"""The recurrent state of all layers: base states, records of a verify step, logs of slots.

The record of a token is what it does to the state ``S`` of a value head::

    S <- S * exp(g) + u k^T        (g per head, or per channel of the key)

so that the state after any path of tokens follows from the state before them, which a verify step
reads once and never writes: decay it by the path's gates, and add each ``u k^T`` decayed by the
gates after it (:func:`fold`). Records are float32, but for the keys, which are kept as the model
gave them; where keys are normalised, ``u`` has the factor.

One tensor holds a field of all layers, by row ``R`` and token ``P`` (heads first, so that a head's
records are one run of memory)::

    u  [L, R, value_heads, P, value_dim]
    k  [L, R, key_heads, P, key_dim]
    g  [L, R, value_heads, P] or [L, R, value_heads, P, key_dim]   one token's, not cumulative

Without a log (``GatedDelta.log == 0``) a row is a position in the batch, as for verify windows, and
``P = max_draft_tokens`` the tokens of the step. With one, a row is a slot and
``P = log + max_draft_tokens``: first the ``pending[layer, slot]`` accepted records that the base
state lacks, oldest first, then the tokens of the step. Beyond ``pending`` nothing means anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import GraphBufferError, SpecError
from ..messages import kind_of
from .gated_delta import GatedDelta
from .spec import StateSpec

__all__ = ["DeltaRecords", "RecurrentState", "all_true", "fold", "row_nbytes", "slot_nbytes"]


def fold(state: Tensor, u: Tensor, k: Tensor, g: Tensor, path: Tensor) -> Tensor:
    """Return the state after the records on a path. In graph.

    What is not on the path is selected away, NaN included. Decays are exponentials of sums of
    log-decays of one sign: none of them can overflow, and underflow means zero.

    Args:
        state: ``[B, HV, dv, dk]`` before the path, any dtype.
        u: ``[B, HV, P, dv]`` float32.
        k: ``[B, H, P, dk]``, any dtype.
        g: ``[B, HV, P]`` or ``[B, HV, P, dk]`` float32.
        path: ``[B, P]`` bool, in the order of the tokens.

    Returns:
        ``[B, HV, dv, dk]`` float32, a new tensor.
    """
    rows, heads, places, dv = u.shape
    on = path[:, None, :, None]  # [B, 1, P, 1]
    g = g if g.dim() == 4 else g[..., None]
    g = torch.where(on, g, 0)
    # The sum from a token on, itself included; what follows it is the next one's.
    from_here = g.flip(2).cumsum(2).flip(2)
    after = torch.cat([from_here[:, :, 1:], torch.zeros_like(g[:, :, :1])], dim=2)
    keys = torch.where(on, k.to(torch.float32), 0)
    keys = keys.repeat_interleave(heads // k.shape[1], dim=1) * after.exp()  # [B, HV, P, dk]
    values = torch.where(on, u, 0)
    decayed = state.to(torch.float32) * from_here[:, :, :1].exp()
    decayed.view(rows * heads, dv, -1).baddbmm_(
        values.reshape(rows * heads, places, dv).transpose(1, 2),
        keys.reshape(rows * heads, places, -1),
    )
    return decayed


def all_true(mask: Tensor) -> bool:
    """Whether a mask that a host can read is true throughout; False elsewhere.

    Selecting costs a pass over the states, and most steps have nothing to select away.
    """
    return mask.device.type == "cpu" and type(mask) is Tensor and bool(mask.all())


@dataclass
class DeltaRecords:
    """What verify steps keep, and the logs of slots. See the module for the layout.

    Attributes:
        spec: What they are for.
        device: Where they lie.
        pool_rows: Rows of the pool.
        rows: Positions in the batch that can be verified at once.
        ancestors: ``[rows, dtn, dtn]`` bool, ``[b, t, s]``: node ``s`` lies on the path from the
            root to ``t``, ``t`` included. Trees only; steps of chains leave it alone.
        resumes: ``[rows]`` bool, whether a row of the last verify step resumed its state.
        u, k, g: See the module; empty with ``records="snapshots"``.
        states: ``[L, rows, dtn, HV, dv, dk]`` in the state's dtype: the state after each node, with
            ``records="snapshots"``; else empty.
        pending: ``[L, pool_rows]`` int32 with a log; else empty.
    """

    spec: StateSpec
    device: torch.device
    pool_rows: int
    rows: int = 0
    ancestors: Tensor = field(init=False)
    resumes: Tensor = field(init=False)
    u: Tensor = field(init=False)
    k: Tensor = field(init=False)
    g: Tensor = field(init=False)
    states: Tensor = field(init=False)
    pending: Tensor = field(init=False)

    def __post_init__(self) -> None:
        with torch.inference_mode(False):
            for name in ("ancestors", "resumes"):
                setattr(self, name, torch.empty(0, dtype=torch.bool, device=self.device))
            for name in ("u", "k", "g", "states"):
                setattr(self, name, torch.empty(0, dtype=torch.float32, device=self.device))
            self.pending = torch.empty(0, dtype=torch.int32, device=self.device)
        self.reserve(self.spec.max_requests)

    @property
    def delta(self) -> GatedDelta:
        """The recurrent part of the spec."""
        assert self.spec.recurrent is not None
        return self.spec.recurrent

    @property
    def by_slot(self) -> bool:
        """Whether a row of ``u``, ``k`` and ``g`` is a slot, and begins with its log."""
        return self.delta.log > 0

    @property
    def takes_snapshots(self) -> bool:
        """Whether whole states are kept."""
        return self.delta.records == "snapshots"

    @property
    def nbytes(self) -> int:
        """Physical bytes, logs included."""
        held = (self.u, self.k, self.g, self.states, self.pending)
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` positions in the batch. Out of graph, before any capture.

        Raises:
            GraphBufferError: There is no memory for them; those that were there stay.
        """
        if rows <= self.rows:
            return
        try:
            # A tensor made under inference mode could not be written outside of it later.
            with torch.inference_mode(False):
                self._allocate(rows)
        except (RuntimeError, TypeError) as exc:
            raise GraphBufferError(
                f"no memory for the records of {rows} rows: `sconv plan` says how many requests "
                "fit",
                have={"rows": self.rows},
                need={"rows": rows},
            ) from exc
        self.rows = rows

    def _allocate(self, rows: int) -> None:
        delta, layers, dtn = self.delta, self.spec.num_layers, self.spec.max_draft_tokens
        ancestors = torch.zeros((rows, dtn, dtn), dtype=torch.bool, device=self.device)
        resumes = torch.zeros(rows, dtype=torch.bool, device=self.device)
        if self.takes_snapshots:
            shape = (layers, rows, dtn, *delta.state_shape)
            self.states = torch.zeros(shape, dtype=delta.dtype, device=self.device)
        elif not self.by_slot or not self.u.numel():
            count, places = (self.pool_rows if self.by_slot else rows), delta.log + dtn
            head = (layers, count)
            heads, wide = delta.gate_shape[:1], delta.gate_shape[1:]
            made = [
                torch.zeros((*head, *tail), dtype=dtype, device=self.device)
                for tail, dtype in (
                    ((delta.value_heads, places, delta.value_dim), torch.float32),
                    ((delta.key_heads, places, delta.key_dim), delta.key_dtype),
                    ((*heads, places, *wide), torch.float32),
                )
            ]
            if self.by_slot:
                self.pending = torch.zeros(head, dtype=torch.int32, device=self.device)
            self.u, self.k, self.g = made
        self.ancestors, self.resumes = ancestors, resumes

    def store_step(self, resumes: Tensor, taps: Tensor | None) -> None:
        """Note what the commit of a verify step must know of its rows. In graph; before its layers.

        Args:
            resumes: ``[B]`` bool, whether a row resumes a state; otherwise it starts from zeros,
                whatever its slot holds.
            taps: ``[B, dtn, K]`` int64 of :func:`sconv.plugin.ancestor_taps`; None for chains.
        """
        self.resumes[: resumes.shape[0]].copy_(resumes)
        if taps is None:
            return
        rows, nodes, width = taps.shape
        parents = taps[:, :, width - 2] - (width - 1)  # [B, dtn], negative = root
        before = parents.clamp(min=0)
        held = self.ancestors[:rows, :nodes, :nodes]
        held.zero_()
        held.diagonal(dim1=1, dim2=2).fill_(True)
        for node in range(1, nodes):
            # Parents are earlier nodes, so that their paths are known.
            index = before[:, node, None, None].expand(rows, 1, nodes)
            path = held.gather(1, index)[:, 0] & (parents[:, node, None] >= 0)
            held[:, node].logical_or_(path)

    def paths(self, nodes: Tensor, *, tree: bool) -> Tensor:
        """Return which tokens of the last verify step lead to a node of each row. In graph.

        Args:
            nodes: ``[B]`` int64, within the step.
            tree: Whether that step was a tree.

        Returns:
            ``[B, max_draft_tokens]`` bool.
        """
        dtn = self.spec.max_draft_tokens
        if not tree:
            return torch.arange(dtn, dtype=torch.int64, device=nodes.device) <= nodes[:, None]
        index = nodes[:, None, None].expand(-1, 1, dtn)
        return self.ancestors[: nodes.shape[0]].gather(1, index)[:, 0]


class RecurrentState:
    """The recurrent matrices of every slot, beside the windows of the same slot.

    The methods that take an index are the pool's: it checks slots first.

    Attributes:
        layers: ``[rows, HV, dv, dk]`` per layer: the base states.
        stacked: The same as one tensor ``[L, rows, HV, dv, dk]`` where they lie in one, else None.
        records: Records and logs; None where the spec has neither drafts nor a log.
    """

    def __init__(self, spec: StateSpec, layers: Sequence[Tensor], stacked: Tensor | None) -> None:
        """Wrap checked tensors; :meth:`allocate` and :meth:`adopt` make or check them."""
        assert spec.recurrent is not None
        self.layers = tuple(layers)
        self.stacked = stacked
        self.records: DeltaRecords | None = None
        if spec.max_draft_tokens > 1 or spec.recurrent.log:
            first = self.layers[0]
            self.records = DeltaRecords(spec, first.device, pool_rows=first.shape[0])

    @classmethod
    def allocate(cls, spec: StateSpec, device: torch.device) -> RecurrentState:
        """Allocate zeroed state, stacked."""
        assert spec.recurrent is not None
        shape = (spec.num_layers, spec.num_slots + 1, *spec.recurrent.state_shape)
        stacked = torch.zeros(shape, dtype=spec.recurrent.dtype, device=device)
        return cls(spec, stacked.unbind(0), stacked)

    @classmethod
    def adopt(
        cls, spec: StateSpec, layers: Tensor | Sequence[Tensor], *, rows: int, device: torch.device
    ) -> RecurrentState:
        """Use an engine's states, of any layer and slot stride; a state itself is contiguous.

        Args:
            spec: The shape of the state.
            layers: One tensor ``[L, rows, HV, dv, dk]``, or one ``[rows, HV, dv, dk]`` per layer.
            rows: Rows of the windows.
            device: Where the windows lie.

        Raises:
            SpecError: The message says which tensor differs, and in what.
        """
        assert spec.recurrent is not None
        if not isinstance(layers, Sequence) and not (isinstance(layers, Tensor) and layers.dim()):
            raise SpecError(f"adopt: recurrent is {kind_of(layers)}: expected one tensor per layer")
        stacked = layers if isinstance(layers, Tensor) else None
        tensors = list(layers.unbind(0)) if isinstance(layers, Tensor) else list(layers)
        if len(tensors) != spec.num_layers:
            raise SpecError(
                f"adopt: recurrent has {len(tensors)} layers, the spec {spec.num_layers}"
            )
        expected = (rows, *spec.recurrent.state_shape)
        for number, tensor in enumerate(tensors):
            where = f"adopt: recurrent layer {number}"
            if not isinstance(tensor, Tensor):
                raise SpecError(f"{where} is {kind_of(tensor)}: expected a tensor")
            if tensor.device != device:
                raise SpecError(f"{where} is on {tensor.device}, the windows on {device}")
            if tuple(tensor.shape) != expected or tensor.dtype != spec.recurrent.dtype:
                raise SpecError(
                    f"{where} is {list(tensor.shape)} {tensor.dtype}, expected "
                    f"[rows, HV, dv, dk] = {list(expected)} {spec.recurrent.dtype}"
                )
            if not tensor[0].is_contiguous():
                raise SpecError(
                    f"{where} has strides {list(tensor.stride())}: slots may lie apart, the state "
                    "of one is contiguous"
                )
        return cls(spec, tensors, stacked)

    @property
    def nbytes(self) -> int:
        """Physical bytes of the base states."""
        return sum(layer.numel() * layer.element_size() for layer in self.layers)

    @property
    def has_log(self) -> bool:
        """Whether accepted records may be pending."""
        return self.records is not None and self.records.by_slot

    def reserve(self, rows: int) -> None:
        """See :meth:`DeltaRecords.reserve`."""
        if self.records is not None:
            self.records.reserve(rows)

    def read(self, layer_id: int, rows: Tensor) -> Tensor:
        """Return the states of slots, with what is pending. In graph.

        Args:
            layer_id: The layer.
            rows: ``[B]`` int64 rows of the pool.

        Returns:
            ``[B, HV, dv, dk]`` float32, a new tensor.
        """
        base = self.layers[layer_id].index_select(0, rows)
        if not self.has_log:
            return base.to(torch.float32)
        records = self.records
        assert records is not None
        u, k, g = (
            each[layer_id].index_select(0, rows) for each in (records.u, records.k, records.g)
        )
        pending = records.pending[layer_id].index_select(0, rows)
        if all_true(pending == 0):
            return base.to(torch.float32)
        held = torch.arange(u.shape[2], dtype=torch.int64, device=rows.device) < pending[:, None]
        folded = fold(base, u, k, g, held)
        return torch.where((pending > 0)[:, None, None, None], folded, base.to(torch.float32))

    def write(self, layer_id: int, rows: Tensor, states: Tensor, due: Tensor) -> None:
        """Write states where they are due, with nothing pending. In graph.

        Args:
            layer_id: The layer.
            rows: ``[B]`` int64 rows of the pool.
            states: ``[B, HV, dv, dk]`` float32, rounded once.
            due: ``[B]`` bool.
        """
        layer = self.layers[layer_id]
        new = states.to(layer.dtype)
        if not all_true(due):
            new = torch.where(due[:, None, None, None], new, layer.index_select(0, rows))
        layer.index_copy_(0, rows, new)
        if self.has_log:
            assert self.records is not None
            counts = self.records.pending[layer_id]
            counts.index_copy_(0, rows, torch.where(due, 0, counts.index_select(0, rows)))

    def clear(self, index: Tensor) -> None:
        """Zero slots in all layers."""
        for layer in self.layers:
            layer.index_fill_(0, index, 0)
        self._forget(index)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy slots bit by bit, logs included, in all layers."""
        for layer in self.layers:
            layer.index_copy_(0, target, layer.index_select(0, source))
        if self.has_log:
            assert self.records is not None
            records = self.records
            for each in (records.u, records.k, records.g, records.pending):
                each.index_copy_(1, target, each.index_select(1, source))

    def export(self, index: Tensor) -> list[Tensor]:
        """Return the states of slots, one ``[n, HV, dv, dk]`` per layer, what is pending folded."""
        return [
            self.read(number, index).to(layer.dtype) for number, layer in enumerate(self.layers)
        ]

    def restore(self, index: Tensor, states: Sequence[Tensor]) -> None:
        """Write checked states into slots, one per layer."""
        for layer, state in zip(self.layers, states, strict=True):
            layer.index_copy_(0, index, state.to(layer.device))
        self._forget(index)

    def _forget(self, index: Tensor) -> None:
        if self.has_log:
            assert self.records is not None
            self.records.pending.index_fill_(1, index, 0)


def slot_nbytes(spec: StateSpec) -> int:
    """Return the bytes that the recurrent state of one slot takes in all layers, its log too."""
    delta = spec.recurrent
    if delta is None:
        return 0
    nbytes = delta.state_nbytes
    if delta.log:
        nbytes += (delta.log + spec.max_draft_tokens) * delta.record_nbytes() + 4
    return nbytes * spec.num_layers


def row_nbytes(spec: StateSpec) -> int:
    """Return the bytes that the records of one batch row take in all layers; 0 with a log."""
    delta = spec.recurrent
    if delta is None or delta.log or spec.max_draft_tokens == 1:
        return 0
    return math.prod((spec.num_layers, spec.max_draft_tokens, delta.record_nbytes()))
