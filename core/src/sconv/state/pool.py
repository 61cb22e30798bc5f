"""Where the state lies, and the life of a slot: alloc, clear, copy, assign, free.

All streams of a layer lie side by side in one tensor, so clearing, copying and committing a slot
is one piece of work per layer, whatever the streams. Row 0 is the dummy that padded rows point at:
it is never handed out, and its content means nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ..errors import PoolError, SlotError, SpecError
from ..messages import kind_of
from .layer_tensors import LayerTensors
from .slots import SlotAllocator
from .spec import StateSpec, check_is_spec
from .windows import VerifyWindows, make_windows

__all__ = ["ConvStatePool", "SlotIds"]

SlotIds: TypeAlias = int | Sequence[int] | Tensor


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
    """

    def __init__(
        self,
        spec: StateSpec,
        device: torch.device | str = "cpu",
        *,
        layers: LayerTensors | None = None,
        windows: VerifyWindows | None = None,
        null_slots: Sequence[int] = (-1,),
        virtual_to_physical: Tensor | Callable[[Tensor], Tensor] | None = None,
        adopted: bool = False,
    ) -> None:
        """Allocate the state, zeroed; :meth:`adopt` is the way to bring an engine's own."""
        check_is_spec(spec)
        self.spec = spec
        try:
            self.null_slots = tuple(sorted({operator.index(slot) for slot in null_slots}))
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
        _check_translation(virtual_to_physical)
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
        self._windows = windows
        self._windows_given = windows is not None

    @classmethod
    def adopt(
        cls,
        spec: StateSpec,
        layers: Tensor | Sequence[Tensor] | None = None,
        *,
        device: torch.device | str | None = None,
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
                window axis, any strides with a unit stride on the last axis. None = bind later.
            device: Where the tensors lie; only needed when they are bound later. An accelerator
                without an index means its current one.
            windows: One dense verify buffer ``[rows, dtn, ...]`` per layer; None = the backend
                allocates them, in the layout it chooses.
            null_slots: Ids that mean "no slot": ``(-1,)``, ``(0,)`` or ``(-1, 0)``. Row 0 is never
                a request's either way.
            virtual_to_physical: See the class.

        Raises:
            SpecError: A tensor does not fit the spec; the message says which and how.
        """
        check_is_spec(spec)
        bound = None
        if layers is not None:
            bound = LayerTensors.adopt(spec, layers)
            device = bound.tensors[0].device
        return cls(
            spec,
            device if device is not None else "cpu",
            layers=bound,
            windows=None if windows is None else VerifyWindows.adopt(spec, windows),
            null_slots=null_slots,
            virtual_to_physical=virtual_to_physical,
            adopted=True,
        )

    def bind(self, layers: Tensor | Sequence[Tensor]) -> None:
        """Bind the tensors of an adopted pool, once, before its first step.

        Raises:
            PoolError: The pool owns its state or is bound already.
            SpecError: A tensor does not fit the spec.
        """
        if self._layers is not None:
            raise PoolError("bind: this pool has its state; only an adopted, unbound pool is bound")
        self._layers = LayerTensors.adopt(self.spec, layers, device=self.device)

    @property
    def layers(self) -> tuple[Tensor, ...]:
        """The windows: one tensor ``[rows, K-1, D]`` or ``[rows, D, K-1]`` per layer."""
        return self._bound().tensors

    @property
    def stacked(self) -> Tensor | None:
        """All layers in one tensor ``[L, rows, ...]`` where they lie in one, else None."""
        return self._bound().stacked

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
        """Physical bytes of the state and of the verify windows."""
        return sum(self.nbytes_by_part.values())

    @property
    def nbytes_by_part(self) -> dict[str, int]:
        """Physical bytes by part: ``"state"`` and ``"verify_windows"``."""
        return {"state": self._bound().nbytes, "verify_windows": self.windows.nbytes}

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

    def translate_(self, ids: Tensor) -> Tensor:
        """Turn the engine's slot ids into rows of the pool, in place; every "no slot" becomes -1.

        In graph, unless :attr:`translates_on_host`.

        Args:
            ids: int32 or int64, any shape.
        """
        for null in self.null_slots:
            if null != -1:
                ids.masked_fill_(ids == null, -1)
        translate = self.virtual_to_physical
        if translate is not None:
            # What is not in the table is masked, not looked up: no sentinel at its end is needed.
            if isinstance(translate, Tensor):
                known = ids.clamp(0, translate.shape[0] - 1)
                physical = translate.index_select(0, known)
                ids.copy_(torch.where(known == ids, physical, -1))
            else:
                ids.copy_(torch.where(ids < 0, -1, translate(ids.clamp(min=0))))
        return ids.clamp_(min=-1)

    def alloc(self, n: int) -> Tensor:
        """Hand out ``n`` slots as an int64 host tensor ``[n]``. Host only: no device work.

        The content is whatever was left there. A prefill does not read it; a request that starts
        by decoding needs :meth:`clear` first.

        Raises:
            PoolExhaustedError: Fewer than ``n`` are free; none is taken.
        """
        return torch.tensor(self._allocator("alloc").take(n), dtype=torch.int64)

    def free(self, slots: SlotIds) -> None:
        """Take slots back; rows of ``req_to_slot`` that name one of them become -1.

        Out of graph; ids in a device tensor cost a sync.

        Raises:
            SlotError: A slot is not in use, named twice or out of range; nothing changes.
        """
        ids = _host_ids("free", slots)
        self._allocator("free").give_back(ids)
        if ids:
            freed = torch.tensor(ids, dtype=torch.int32, device=self.device)
            self.req_to_slot.masked_fill_(torch.isin(self.req_to_slot, freed), -1)

    def assign(self, req_rows: SlotIds, slots: SlotIds) -> None:
        """Give request rows their slots; -1 takes a row's slot away without freeing it.

        Out of graph.

        Raises:
            SlotError: A row is outside 1..max_requests or named twice, a slot is not in use, or one
                slot would belong to two rows; nothing changes.
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
        elif len(set(named)) != len(named):
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
        """Zero the windows of slots in all layers and streams. Out of graph.

        Raises:
            SlotError: A slot is not in use, named twice or out of range; nothing changes.
        """
        index = self._index(self._checked("clear", slots))
        for layer in self.layers:
            layer.index_fill_(0, index, 0)

    def copy(self, src: SlotIds, dst: SlotIds) -> None:
        """Copy windows from slot to slot in all layers and streams. Out of graph.

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
        for layer in self.layers:
            layer.index_copy_(0, target, layer.index_select(0, source))

    def fork(self, src: SlotIds) -> Tensor:
        """Hand out one new slot per source and copy its windows there (copy-on-write).

        Raises:
            SlotError: A source is not in use or out of range.
            PoolExhaustedError: Too few slots are free; none is taken.
        """
        sources = _host_ids("fork", src)
        self._checked("fork", sorted(set(sources)))
        slots = self.alloc(len(sources))
        try:
            self.copy(sources, slots)
        except BaseException:
            self.free(slots)
            raise
        return slots

    def export(self, slots: SlotIds) -> list[Tensor]:
        """Copy windows out, one tensor ``[n, ...]`` per layer, for a host tier or another worker.

        Raises:
            SlotError: A slot is not in use, named twice or out of range.
        """
        index = self._index(self._checked("export", slots))
        return [layer.index_select(0, index) for layer in self.layers]

    def restore(self, slots: SlotIds, data: Sequence[Tensor]) -> None:
        """Write exported windows into slots. All tensors are checked before the first is written.

        Raises:
            SlotError: A slot is not usable, or ``data`` is not one fitting tensor per layer: treat
                it as a miss, nothing was written.
        """
        index = self._index(self._checked("restore", slots))
        if not isinstance(data, Sequence):
            raise SlotError(f"restore: data is {kind_of(data)}: expected one tensor per layer")
        if len(data) != len(self.layers):
            raise SlotError(f"restore: {len(data)} tensors for {len(self.layers)} layers")
        for number, (layer, value) in enumerate(zip(self.layers, data, strict=True)):
            expected = (index.shape[0], *layer.shape[1:])
            if not isinstance(value, Tensor):
                raise SlotError(f"restore: layer {number} is {kind_of(value)}: expected a tensor")
            if tuple(value.shape) != expected or value.dtype != layer.dtype:
                raise SlotError(
                    f"restore: layer {number} is {list(value.shape)} {value.dtype}, expected "
                    f"{list(expected)} {layer.dtype}"
                )
        for layer, value in zip(self.layers, data, strict=True):
            layer.index_copy_(0, index, value.to(layer.device))

    def _allocator(self, what: str) -> SlotAllocator:
        if self._slots is None:
            raise PoolError(f"{what}: ask the engine's allocator, the pool's slots are its own")
        return self._slots

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


def _check_translation(translation: object) -> None:
    if isinstance(translation, Tensor):
        if translation.dim() == 1 and translation.dtype in (torch.int32, torch.int64):
            return
        what = f"{translation.dtype} of shape {list(translation.shape)}"
    elif translation is None or callable(translation):
        return
    else:
        what = kind_of(translation)
    raise SpecError(
        f"virtual_to_physical is {what}: expected an int32 or int64 table, one entry per slot id, "
        "or a function from ids to rows"
    )


def _host_ids(what: str, slots: SlotIds) -> list[int]:
    if isinstance(slots, Tensor):
        if slots.dtype not in (torch.int32, torch.int64) or slots.dim() > 1:
            raise SlotError(
                f"{what}: got a {slots.dtype} tensor of shape {list(slots.shape)}; expected int32 "
                "or int64 ids in one dimension"
            )
        return [int(slot) for slot in slots.reshape(-1).tolist()]
    if isinstance(slots, int) and not isinstance(slots, bool):
        return [slots]
    try:
        ids = list(slots)  # type: ignore[arg-type]
        return [slot.__index__() for slot in ids]
    except (TypeError, AttributeError):
        raise SlotError(
            f"{what}: got {slots!r}; expected an id, a sequence of ids or a tensor"
        ) from None
