"""Where the state lies, and the life of a slot: alloc, clear, copy, assign, free.

All streams of a layer lie side by side in one tensor, so clearing, copying and committing a slot
is one piece of work per layer, whatever the streams. Row 0 is the dummy that padded rows point at:
it is never handed out, and its content means nothing.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor

from ..errors import BatchError, PoolError, SlotError, SpecError
from ..messages import kind_of
from .exported import ExportedState
from .layer_tensors import LayerTensors
from .overlap import first_overlap
from .recurrent import RecurrentState
from .slots import SlotAllocator
from .spec import MOST_SLOTS, StateSpec, check_is_spec
from .tensor_memory import memory_fault
from .windows import VerifyWindows, make_windows

if TYPE_CHECKING:
    from .shadow import PoolShadow

__all__ = ["ConvStatePool", "SlotIds"]

SlotIds: TypeAlias = int | Sequence[int] | Tensor

_INDEX: Final = (torch.int32, torch.int64)


class ConvStatePool:
    """The convolution state of all requests of one model runner.

    Attributes:
        spec: What it was sized for.
        device: Where it lies, index included.
        req_to_slot: ``[max_requests + 1]`` int32, slot of each request row; -1 = none. Row 0 is the
            engine's dummy request and always names slot 0.
        null_slots: Slot ids that mean "no slot" in a batch.
        virtual_to_physical: Maps the engine's slot ids to rows of the pool, as an integer table of
            one entry per id or as a function (run out of graph); None = they are the same.
        shadow: What checked mode knows of the slots; None without ``SCONV_CHECK=1``.
    """

    def __init__(
        self,
        spec: StateSpec,
        device: torch.device | str = "cpu",
        *,
        layers: LayerTensors | None = None,
        recurrent: RecurrentState | None = None,
        windows: VerifyWindows | None = None,
        null_slots: Sequence[int] = (-1,),
        virtual_to_physical: Tensor | Callable[[Tensor], Tensor] | None = None,
        adopted: bool = False,
    ) -> None:
        """Allocate the state, zeroed; :meth:`adopt` is the way to bring an engine's own."""
        check_is_spec(spec)
        self.spec = spec
        try:
            self.null_slots = tuple(sorted({_index_of(slot) for slot in null_slots}))
        except TypeError:
            raise SpecError(
                f"null_slots is {null_slots!r}: expected the slot ids that mean none, for example "
                "(-1,)"
            ) from None
        if self.null_slots and self.null_slots[-1] > 0:
            raise SpecError(
                f"null_slots holds {self.null_slots[-1]}: expected 0 or negative ids, since a "
                "positive one is a request's"
            )
        if self.null_slots and self.null_slots[0] < -MOST_SLOTS:
            raise SpecError(
                f"null_slots holds {self.null_slots[0]}: expected {-MOST_SLOTS} or more, since "
                "slots are int32"
            )
        _check_translation(virtual_to_physical)
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError):
            raise SpecError(
                f"device is {device!r}: expected a torch.device, or its name such as 'cpu'"
            ) from None
        self.virtual_to_physical = virtual_to_physical
        self._slots = None if adopted else SlotAllocator(spec.num_slots)
        # A tensor made under inference mode could not be written outside of it later.
        with torch.inference_mode(False):
            self.req_to_slot = torch.full(
                (spec.max_requests + 1,), -1, dtype=torch.int32, device=device
            )
            # As tensors name it: of an accelerator they know the index, also where none was given.
            self.device = self.req_to_slot.device
            self.req_to_slot[0] = 0
            self._layers = layers if adopted else LayerTensors.allocate(spec, self.device)
            if spec.recurrent is not None and not adopted:
                recurrent = RecurrentState.allocate(spec, self.device)
        self._recurrent = recurrent
        self._most_rows = 0
        if isinstance(virtual_to_physical, Tensor) and virtual_to_physical.device != self.device:
            raise SpecError(
                f"virtual_to_physical is on {virtual_to_physical.device}, the state on "
                f"{self.device}: a step looks rows up where the state is"
            )
        self._windows = windows
        self._windows_given = windows is not None
        self._caches: list[dict[Any, Any]] = []
        self._recorded: set[str] = set()
        self.shadow: PoolShadow | None = None

    @classmethod
    def adopt(
        cls,
        spec: StateSpec,
        layers: Tensor | Sequence[Tensor] | None = None,
        *,
        device: torch.device | str | None = None,
        recurrent: Tensor | Sequence[Tensor] | None = None,
        windows: Sequence[Tensor] | None = None,
        null_slots: Sequence[int] = (-1,),
        virtual_to_physical: Tensor | Callable[[Tensor], Tensor] | None = None,
    ) -> ConvStatePool:
        """Use state that an engine allocated and whose slots it hands out itself.

        Batches, ``assign`` and ``req_to_slot`` then speak of the engine's slot ids; ``clear``,
        ``copy``, ``export`` and ``restore`` of rows of the tensors.

        Args:
            spec: The shape of the state. A slot may be wider than K-1: the window is its end.
            layers: One tensor ``[L, rows, ...]``, or one ``[rows, ...]`` per layer, in the spec's
                window axis, any strides with a unit stride on the last axis; no two places share
                memory. None = bind later.
            device: Where the tensors lie; only needed when they are bound later. An accelerator
                without an index means its current one.
            recurrent: Where the spec has a recurrent state: one tensor ``[L, rows, HV, dv, dk]``,
                or one ``[rows, HV, dv, dk]`` per layer. Slots and layers may lie apart.
            windows: One dense verify buffer ``[rows, dtn, ...]`` per layer, whose windows may slide
                over shared columns where the spec has chains alone; None = the backend allocates
                them, in the layout it chooses.
            null_slots: Ids that mean "no slot": ``(-1,)``, ``(0,)`` or ``(-1, 0)``. Row 0 is never
                a request's either way.
            virtual_to_physical: See the class.

        Raises:
            SpecError: A tensor does not fit the spec; the message says which and how.
        """
        check_is_spec(spec)
        bound = states = None
        if layers is not None:
            bound = LayerTensors.adopt(spec, layers)
            device = bound.tensors[0].device
            states = _adopt_recurrent(spec, bound, recurrent)
        elif recurrent is not None:
            raise SpecError("adopt: recurrent comes with layers: bind both later, or give both now")
        kept = None if windows is None else VerifyWindows.adopt(spec, windows)
        if kept is not None:
            _check_windows_apart(kept, bound, device)
        return cls(
            spec,
            device if device is not None else "cpu",
            layers=bound,
            recurrent=states,
            windows=kept,
            null_slots=null_slots,
            virtual_to_physical=virtual_to_physical,
            adopted=True,
        )

    def bind(
        self,
        layers: Tensor | Sequence[Tensor],
        recurrent: Tensor | Sequence[Tensor] | None = None,
        *,
        recapture: bool = False,
    ) -> None:
        """Bind the tensors of an adopted pool: before its first step, or anew between two steps.

        A captured graph reads and writes the memory that was bound when it was captured. So once a
        step was recorded the caller says that its graphs, those of commits too, are captured again.

        Args:
            layers: As in :meth:`adopt`.
            recurrent: As in :meth:`adopt`.
            recapture: All graphs will be captured again before their next replay.

        Raises:
            PoolError: The pool owns its state, or steps were recorded and ``recapture`` is False;
                the message names them. What is bound stays bound.
            SpecError: A tensor does not fit the spec; what is bound stays bound.
        """
        self._check_adopted("bind")
        if self._recorded and not recapture:
            raise PoolError(
                f"bind: graphs may hold recorded steps ({', '.join(sorted(self._recorded))}) and "
                "their commits, which would go on with the memory that was bound before: capture "
                "them all again, and say so with bind(layers, recapture=True)"
            )
        bound = LayerTensors.adopt(self.spec, layers, device=self.device)
        if self._windows is not None and self._windows.adopted:
            _check_windows_apart(self._windows, bound, self.device)
        states = _adopt_recurrent(self.spec, bound, recurrent)
        if states is not None:
            states.reserve(self._most_rows)
        self._rebind(bound, states)
        self._recorded.clear()

    def release(self) -> None:
        """Let go of an adopted pool's tensors between two steps, as when an engine sleeps.

        Until the next :meth:`bind` no step can be prepared. Request rows keep their slots.

        Raises:
            PoolError: The pool owns its state.
        """
        self._check_adopted("release")
        self._rebind(None, None)

    def _rebind(self, layers: LayerTensors | None, recurrent: RecurrentState | None) -> None:
        self._layers, self._recurrent = layers, recurrent
        for cache in self._caches:
            cache.clear()
        if self.shadow is not None:
            self.shadow.rebound()

    def _check_adopted(self, what: str) -> None:
        if not self.adopted:
            raise PoolError(
                f"{what}: this pool has its state; only that of an adopted pool is bound and "
                "released"
            )

    def new_cache(self) -> dict[Any, Any]:
        """Return a dictionary for what a backend derives from the state's addresses.

        It is emptied whenever the state is bound anew or released.
        """
        cache: dict[Any, Any] = {}
        self._caches.append(cache)
        return cache

    def note_recorded(self, step: str) -> None:
        """Note that a step ran which a graph may have recorded; :meth:`bind` names it."""
        self._recorded.add(step)

    @property
    def layers(self) -> tuple[Tensor, ...]:
        """The windows: one tensor ``[rows, K-1, D]`` or ``[rows, D, K-1]`` per layer."""
        return self._bound().tensors

    @property
    def stacked(self) -> Tensor | None:
        """All layers in one tensor ``[L, rows, ...]`` where they lie in one, else None."""
        return self._bound().stacked

    @property
    def recurrent(self) -> RecurrentState | None:
        """The recurrent matrices of the same slots; None where the spec has none."""
        return self._recurrent

    def reserve(self, rows: int) -> None:
        """Make room for verify steps of ``rows`` rows. Out of graph, before any capture.

        Raises:
            GraphBufferError: There is none.
        """
        self.windows.reserve(rows)
        if self._recurrent is not None:
            self._recurrent.reserve(rows)
        self._most_rows = max(self._most_rows, rows)

    @property
    def adopted(self) -> bool:
        """Whether an engine owns the state and hands out its slots."""
        return self._slots is None

    @property
    def num_rows(self) -> int:
        """Rows of the state tensors: the usable slots and the dummy."""
        return self.layers[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Physical bytes of all parts."""
        return sum(self.nbytes_by_part.values())

    @property
    def nbytes_by_part(self) -> dict[str, int]:
        """Physical bytes by part: ``"state"`` and ``"verify_windows"``.

        With a recurrent state also ``"recurrent"``, and ``"records"`` with the logs of slots.
        """
        parts = {"state": self._bound().nbytes, "verify_windows": self.windows.nbytes}
        if self._recurrent is not None:
            records = self._recurrent.records
            parts["recurrent"] = self._recurrent.nbytes
            parts["records"] = 0 if records is None else records.nbytes
        return parts

    @property
    def windows(self) -> VerifyWindows:
        """The verify windows. A backend assigns them, unless :attr:`has_windows`.

        A pool without a backend makes its own when they are first read: in the layout that the spec
        names, dense if that is "auto".
        """
        if self._windows is None:
            layout = self.spec.window_layout
            layout = "dense" if layout == "auto" else layout
            self._windows = make_windows(layout, self.spec, self.device)
        return self._windows

    @windows.setter
    def windows(self, windows: VerifyWindows) -> None:
        self._windows = windows
        self._windows_given = True

    @property
    def has_windows(self) -> bool:
        """Whether verify windows came with the pool, or were assigned."""
        return self._windows_given

    @property
    def window_layout(self) -> str:
        """Layout of the verify windows in force."""
        return self.windows.layout

    @property
    def num_free(self) -> int:
        """Slots that can still be handed out."""
        return self._allocator("num_free").num_free

    def live_slots(self) -> list[int]:
        """Return the slots in use, in ascending order."""
        return self._allocator("live_slots").live()

    def conv(self, layer_id: int, stream: str) -> Tensor:
        """Return one stream's state: a view ``[rows, K-1, D]`` or ``[rows, D, K-1]``.

        Raises:
            SpecError: The layer or the stream does not exist.
        """
        part = self.spec.stream_slice(layer_id, stream)
        axis = 2 if self.spec.window_axis == "time" else 1
        return self.layers[layer_id].narrow(axis, part.start, part.dim)

    @property
    def translates_on_host(self) -> bool:
        """Whether ids are translated by a function, which no graph can record."""
        return self.virtual_to_physical is not None and not isinstance(
            self.virtual_to_physical, Tensor
        )

    def lookup_slots(
        self, req_pool_indices: Tensor | None, slots: Tensor | None, *, out: Tensor
    ) -> None:
        """Write the engine's slot id of each row to ``out``, -1 where no row is named. In graph.

        Args:
            req_pool_indices: ``[B]`` int32 or int64 request rows, or None.
            slots: ``[B]`` int32 or int64 slot ids, or None.
            out: ``[B]`` int32 or int64.

        Raises:
            BatchError: A request row is out of range, and the memory is the host's.
        """
        if slots is not None:
            out.copy_(slots)
        elif req_pool_indices is not None:
            try:
                if out.dtype is self.req_to_slot.dtype:
                    torch.index_select(self.req_to_slot, 0, req_pool_indices, out=out)
                    return
                slot_of_row = self.req_to_slot.index_select(0, req_pool_indices)
            except IndexError:
                # Only host memory notices, and its message names neither the row nor the bound.
                self.check_request_rows(req_pool_indices)
                raise
            out.copy_(slot_of_row)
        else:
            out.fill_(-1)

    def check_request_rows(self, rows: Tensor) -> None:
        """Check the values of request rows. Reads them on the host.

        Raises:
            BatchError: One is out of range.
        """
        most = self.spec.max_requests
        wrong = [row for row in rows.tolist() if not 0 <= row <= most]
        if wrong:
            raise BatchError(f"req_pool_indices holds {wrong[0]}: expected 0 to {most}")

    def translate_(self, ids: Tensor) -> Tensor:
        """Turn the engine's slot ids into rows of the pool, in place; every "no slot" becomes -1.

        In graph, unless :attr:`translates_on_host`.

        Args:
            ids: int32 or int64, any shape.

        Raises:
            SlotError: The ids are not a tensor of integers.
            BatchError: The function returned something else than a row for each id; the ids are as
                they were.
        """
        if not isinstance(ids, Tensor) or ids.dtype not in _INDEX:
            what = ids.dtype if isinstance(ids, Tensor) else kind_of(ids)
            raise SlotError(f"translate_: ids are {what}: expected an int32 or int64 tensor")
        translate = self.virtual_to_physical
        if translate is not None and not isinstance(translate, Tensor):
            known = ids.clone()
            self._mask_nulls(known)
            physical = _checked_rows(translate(known.clamp(min=0)), known)
            ids.copy_(torch.where(known < 0, -1, physical))
            return ids.clamp_(min=-1)
        self._mask_nulls(ids)
        if translate is not None:
            # What is not in the table is masked, not looked up: no sentinel at its end is needed.
            known = ids.clamp(0, translate.shape[0] - 1)
            physical = translate.index_select(0, known)
            ids.copy_(torch.where(known == ids, physical, -1))
        return ids.clamp_(min=-1)

    def _mask_nulls(self, ids: Tensor) -> None:
        for null in self.null_slots:
            if null != -1:
                ids.masked_fill_(ids == null, -1)

    def alloc(self, n: int) -> Tensor:
        """Hand out ``n`` slots as an int64 host tensor ``[n]``. Host only: no device work.

        The content is whatever was left there. A prefill does not read it; a request that starts
        by decoding needs :meth:`clear` first.

        Raises:
            PoolExhaustedError: Fewer than ``n`` are free; none is taken.
        """
        slots = self._allocator("alloc").take(n)
        if self.shadow is not None:
            self.shadow.handed_out(slots)
        return torch.tensor(slots, dtype=torch.int64, device="cpu")

    def free(self, slots: SlotIds) -> None:
        """Take slots back; rows of ``req_to_slot`` that name one of them become -1.

        Out of graph; ids in a device tensor cost a sync.

        Raises:
            SlotError: A slot is not in use, named twice or out of range; nothing changes.
        """
        ids = _host_ids("free", slots)
        self._allocator("free").give_back(ids)
        if self.shadow is not None:
            self.shadow.taken_back(ids)
        if ids:
            freed = torch.tensor(ids, dtype=torch.int32, device=self.device)
            self.req_to_slot.masked_fill_(torch.isin(self.req_to_slot, freed), -1)

    def assign(self, req_rows: SlotIds, slots: SlotIds) -> None:
        """Give request rows their slots; -1 takes a row's slot away without freeing it.

        Out of graph.

        Raises:
            SlotError: A row is outside 1..max_requests or named twice, a slot is not in use or, of
                an engine's, cannot be one, or one slot would belong to two rows; nothing changes.
        """
        rows, ids = _host_ids("assign", req_rows), _host_ids("assign", slots)
        if len(rows) != len(ids):
            raise SlotError(f"assign: {len(rows)} request rows for {len(ids)} slots")
        for row in rows:
            if not 0 < row <= self.spec.max_requests:
                raise SlotError(
                    f"assign: request row {row} is outside 1..{self.spec.max_requests} "
                    "(row 0 is the dummy)"
                )
        if len(set(rows)) != len(rows):
            raise SlotError(f"assign: {rows} names a request row twice")
        named = [slot for slot in ids if slot != -1]
        if self._slots is not None:
            self._slots.check_in_use("assign", named)
        else:
            self._check_engine_slots(named)
            if len(set(named)) != len(named):
                raise SlotError(f"assign: {ids} names a slot twice")
        index = torch.tensor(rows, dtype=torch.int64, device=self.device)
        value = torch.tensor(ids, dtype=torch.int32, device=self.device)
        moved = self.req_to_slot.clone().index_copy_(0, index, value)
        if named:
            # By neighbours in order, with operators that every device has and one read on the host.
            owned = moved.sort().values
            if bool(((owned[1:] == owned[:-1]) & (owned[1:] > 0)).any()):
                raise SlotError(f"assign: a slot of {ids} belongs to another request row already")
        self.req_to_slot.copy_(moved)

    def clear(self, slots: SlotIds) -> None:
        """Zero the windows and recurrent states of slots in all layers. Out of graph.

        Raises:
            SlotError: A slot is not in use, named twice or out of range; nothing changes.
        """
        ids = self._checked("clear", slots)
        index = self._index(ids)
        if self.shadow is not None:
            self.shadow.cleared(ids)
        for layer in self.layers:
            layer.index_fill_(0, index, 0)
        if self._recurrent is not None:
            self._recurrent.clear(index)
        if self.shadow is not None:
            self.shadow.wrote()

    def copy(self, src: SlotIds, dst: SlotIds) -> None:
        """Copy windows and recurrent states from slot to slot in all layers. Out of graph.

        A source may be named twice (one prefix, several requests).

        Raises:
            SlotError: A slot is not in use or out of range, a destination is named twice, or a slot
                is both source and destination; nothing changes.
        """
        sources, targets = _host_ids("copy", src), _host_ids("copy", dst)
        if len(sources) != len(targets):
            raise SlotError(f"copy: {len(sources)} sources for {len(targets)} destinations")
        self._checked("copy", sorted(set(sources)))
        self._checked("copy", targets)
        if both := sorted(set(sources) & set(targets)):
            raise SlotError(
                f"copy: slots {both} are source and destination; the order would decide"
            )
        source, target = self._index(sources), self._index(targets)
        if self.shadow is not None:
            self.shadow.check_read("copy", sources)
            self.shadow.copied(sources, targets)
        for layer in self.layers:
            layer.index_copy_(0, target, layer.index_select(0, source))
        if self._recurrent is not None:
            self._recurrent.copy(source, target)
        if self.shadow is not None:
            self.shadow.wrote()

    def fork(self, src: SlotIds) -> Tensor:
        """Hand out one new slot per source and copy its state there (copy-on-write).

        Raises:
            SlotError: A source is not in use or out of range.
            PoolExhaustedError: Too few slots are free; none is taken.
        """
        sources = _host_ids("fork", src)
        self._checked("fork", sorted(set(sources)))
        if self.shadow is not None:
            self.shadow.check_read("fork", sources)
        slots = self.alloc(len(sources))
        try:
            self.copy(sources, slots)
        except BaseException:
            self.free(slots)
            raise
        return slots

    def export(self, slots: SlotIds) -> ExportedState:
        """Copy the state of slots out, for a host tier or another worker.

        Raises:
            SlotError: A slot is not in use, named twice or out of range.
        """
        ids = self._checked("export", slots)
        if self.shadow is not None:
            self.shadow.check_read("export", ids)
        index = self._index(ids)
        layers = tuple(layer.index_select(0, index) for layer in self.layers)
        recurrent = () if self._recurrent is None else self._recurrent.export(index)
        return ExportedState(self.spec.fingerprint, layers, recurrent)

    def restore(self, slots: SlotIds, data: ExportedState) -> None:
        """Write exported state into slots. All of it is read before the first is written.

        Raises:
            SlotError: A slot is not usable, or ``data`` is not the exported state of as many slots
                of a like pool: treat it as a miss, nothing was written.
        """
        ids = self._checked("restore", slots)
        index = self._index(ids)
        if not isinstance(data, ExportedState):
            raise SlotError(
                f"restore: data is {kind_of(data)}: expected the sconv.ExportedState that export() "
                "returned, or one that was built again from its fingerprint and its layers"
            )
        if data.fingerprint != self.spec.fingerprint:
            raise SlotError(
                f"restore: the state is of {data.fingerprint!r}, this pool's of "
                f"{self.spec.fingerprint!r}: prefill instead"
            )
        if not isinstance(data.layers, Sequence) or len(data.layers) != len(self.layers):
            count = len(data.layers) if isinstance(data.layers, Sequence) else "no"
            raise SlotError(f"restore: {count} tensors for {len(self.layers)} layers")
        recurrent = () if self._recurrent is None else self._recurrent.layers
        if not isinstance(data.recurrent, Sequence) or len(data.recurrent) != len(recurrent):
            raise SlotError(
                f"restore: the state has not one recurrent tensor for each of {len(recurrent)}"
            )
        values = [
            self._restorable(f"layer {number}", layer, index.shape[0], value)
            for number, (layer, value) in enumerate(zip(self.layers, data.layers, strict=True))
        ]
        states = [
            self._restorable(f"the recurrent state of layer {number}", layer, index.shape[0], value)
            for number, (layer, value) in enumerate(zip(recurrent, data.recurrent, strict=True))
        ]
        if self.shadow is not None:
            self.shadow.restored(ids)
        for layer, value in zip(self.layers, values, strict=True):
            layer.index_copy_(0, index, value)
        if self._recurrent is not None:
            self._recurrent.restore(index, states)
        if self.shadow is not None:
            self.shadow.wrote()

    def mark_written(
        self, slots: SlotIds, lengths: int | Sequence[int | None] | None = None
    ) -> None:
        """Tell checked mode what slots hold that the engine wrote itself; nothing without it.

        For state that no call of sconv wrote and no operator of torch: an engine's own kernels, a
        transfer, a step that was announced and never replayed.

        Args:
            slots: Rows of the pool.
            lengths: Tokens in their state, one number for all or one per slot; None = unknown.

        Raises:
            SlotError: A slot is not in use, named twice or out of range, or the lengths are not one
                per slot.
        """
        ids = self._checked("mark_written", slots)
        given = [lengths] * len(ids) if lengths is None or isinstance(lengths, int) else lengths
        if len(given) != len(ids) or any(length is not None and length < 0 for length in given):
            raise SlotError(
                f"mark_written: lengths={lengths!r} for {len(ids)} slots: expected one number of "
                "tokens, 0 or more, per slot, or None"
            )
        if self.shadow is not None:
            self.shadow.told(ids, given)

    def _restorable(self, where: str, layer: Tensor, count: int, value: object) -> Tensor:
        """Return one tensor of an exported state as it can be written."""
        expected = (count, *layer.shape[1:])
        if not isinstance(value, Tensor):
            raise SlotError(f"restore: {where} is {kind_of(value)}: expected a tensor")
        if fault := memory_fault(value):
            raise SlotError(f"restore: {where} {fault}")
        if tuple(value.shape) != expected or value.dtype != layer.dtype:
            raise SlotError(
                f"restore: {where} is {list(value.shape)} {value.dtype}, expected "
                f"{list(expected)} {layer.dtype}"
            )
        if value.device.type == "meta" != layer.device.type:
            raise SlotError(f"restore: {where} is on meta, without values")
        # The state must not hold a caller's autograd graph.
        moved = value.detach().to(layer.device)
        # A part of the pool would be read while it is written.
        held = [*self.layers, *(() if self._recurrent is None else self._recurrent.layers)]
        return moved.clone() if first_overlap([moved, *held]) else moved

    def _allocator(self, what: str) -> SlotAllocator:
        if self._slots is None:
            raise PoolError(f"{what}: ask the engine's allocator, the pool's slots are its own")
        return self._slots

    def _check_engine_slots(self, ids: Sequence[int]) -> None:
        """Check ids of an engine's allocator that are to be kept in ``req_to_slot``."""
        table = self.virtual_to_physical
        last = MOST_SLOTS
        if isinstance(table, Tensor):
            last = table.shape[0] - 1
        elif table is None and self._layers is not None:
            last = self.num_rows - 1
        # Without a table, row 0 is the dummy.
        first = 1 if table is None else 0
        for slot in ids:
            if not first <= slot <= last and slot not in self.null_slots:
                raise SlotError(
                    f"assign: slot {slot} is outside {first}..{last}: -1 takes a row's slot away"
                )

    def _bound(self) -> LayerTensors:
        if self._layers is None:
            raise PoolError("this adopted pool has no state yet: call pool.bind(tensors) first")
        return self._layers

    def _checked(self, what: str, slots: SlotIds) -> list[int]:
        ids = _host_ids(what, slots)
        if self._slots is not None:
            self._slots.check_in_use(what, ids)
            return ids
        for slot in ids:
            if not 0 < slot < self.num_rows:
                raise SlotError(f"{what}: slot {slot} is outside 1..{self.num_rows - 1}")
        if len(set(ids)) != len(ids):
            raise SlotError(f"{what}: {ids} names a slot twice")
        return ids

    def _index(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.device)


def _check_windows_apart(
    windows: VerifyWindows, bound: LayerTensors | None, device: torch.device | str | None
) -> None:
    """Check that an engine's verify windows share no memory with each other or with the state."""
    if not windows.layers:
        return
    where = windows.layers[0].device
    if device is not None and where.type != torch.device(device).type:
        raise SpecError(f"windows: layer 0 is on {where}, the state on {device}")
    count = len(windows.layers)
    shared = first_overlap([*windows.layers, *(() if bound is None else bound.tensors)])
    if shared is not None:
        first, second = (
            f"the windows of layer {number}" if number < count else f"state layer {number - count}"
            for number in shared
        )
        raise SpecError(f"windows: {first} and {second} share memory")


def _adopt_recurrent(
    spec: StateSpec, bound: LayerTensors, recurrent: Tensor | Sequence[Tensor] | None
) -> RecurrentState | None:
    if (recurrent is None) != (spec.recurrent is None):
        raise SpecError(
            "adopt: the spec has no recurrent state, give none"
            if spec.recurrent is None
            else "adopt: the spec has a recurrent state: give recurrent= [L, rows, HV, dv, dk]"
        )
    if recurrent is None:
        return None
    first = bound.tensors[0]
    states = RecurrentState.adopt(spec, recurrent, rows=first.shape[0], device=first.device)
    if first_overlap([*bound.tensors, *states.layers]):
        raise SpecError("adopt: recurrent shares memory with another layer or with the windows")
    return states


def _check_translation(translation: object) -> None:
    if translation is None or (callable(translation) and not isinstance(translation, Tensor)):
        return
    if not isinstance(translation, Tensor):
        what = kind_of(translation)
    elif fault := memory_fault(translation):
        what = f"a tensor that {fault}"
    elif translation.dim() == 1 and translation.shape[0] and translation.dtype in _INDEX:
        return
    else:
        what = f"{translation.dtype} of shape {list(translation.shape)}"
    raise SpecError(
        f"virtual_to_physical is {what}: expected an int32 or int64 table, one entry per slot id, "
        "or a function from ids to rows"
    )


def _checked_rows(rows: object, ids: Tensor) -> Tensor:
    """Check what an allocator's function returned."""
    if isinstance(rows, Tensor) and memory_fault(rows) is None:
        if rows.dtype in _INDEX and rows.shape == ids.shape and rows.device == ids.device:
            return rows
        what = f"a {rows.dtype} tensor of shape {list(rows.shape)} on {rows.device}"
    else:
        what = kind_of(rows)
    raise BatchError(
        f"virtual_to_physical returned {what}: expected an int32 or int64 tensor of shape "
        f"{list(ids.shape)} on {ids.device}, a row for each id"
    )


def _host_ids(what: str, slots: SlotIds) -> list[int]:
    if isinstance(slots, Tensor):
        return _ids_of_tensor(what, slots)
    # Text and bytes are sequences of something else, and a set has no order.
    if not isinstance(slots, str | bytes | bytearray | Mapping | Set):
        try:
            return [_index_of(slots)]
        except TypeError:
            pass
        try:
            return [_index_of(slot) for slot in slots]  # type: ignore[union-attr]
        except Exception:
            # Whatever an engine's own container raises, these are no ids.
            pass
    raise SlotError(
        f"{what}: got {reprlib.repr(slots)}; expected an id, a sequence of ids or a tensor"
    )


def _ids_of_tensor(what: str, slots: Tensor) -> list[int]:
    fault = memory_fault(slots)
    got = "a tensor that " + fault if fault else f"a {slots.dtype} tensor of shape {[*slots.shape]}"
    if fault is None and slots.dtype in _INDEX and slots.dim() < 2:
        if slots.device.type == "meta":
            got = "a tensor on meta, without values"
        else:
            try:
                return [int(slot) for slot in slots.reshape(-1).tolist()]
            except RuntimeError as exc:
                got = f"a tensor that cannot be read ({type(exc).__name__})"
    raise SlotError(f"{what}: got {got}; expected int32 or int64 ids in one dimension")


def _index_of(value: object) -> int:
    """Return an integer of any type.

    Raises:
        TypeError: It is a bool, or none.
    """
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype is torch.bool):
        raise TypeError("a bool is not an id")
    return operator.index(value)  # type: ignore[arg-type]
