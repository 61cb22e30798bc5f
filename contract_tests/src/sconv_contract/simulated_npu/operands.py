"""The arguments of one call, as something that can run sees them, and the way back for results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .audit import count
from .errors import SimulationError
from .memory import CPU_KERNELS, POISON, memory, on_device, view_of

__all__ = ["HostSide", "ShapeSide", "tensors_in"]


class HostSide:
    """Tensors of the host over the memory of the device: what a kernel computes on."""

    device = "cpu"

    def __init__(self, index: int) -> None:
        self._index = index
        self._stand_ins: dict[int, Tensor] = {}
        self._given: dict[int, Tensor] = {}
        self._by_storage: dict[int, Tensor] = {}

    def of(self, value: Any) -> Any:
        """Return the same arguments with a stand-in for each tensor of the device."""
        if isinstance(value, Tensor):
            return self._of_tensor(value) if on_device(value) else value
        if isinstance(value, list | tuple):
            return [self.of(one) for one in value]
        if isinstance(value, dict):
            return {key: self.of(one) for key, one in value.items()}
        return torch.device(self.device) if isinstance(value, torch.device) else value

    def wrote(self, name: str, tensor: Tensor) -> None:
        """Note that an operator wrote a tensor of the device.

        Raises:
            SimulationError: It resized one that was not empty.
        """
        stand_in = self._stand_ins[id(tensor)]
        if stand_in.size() != tensor.size():
            self._resize(tensor, stand_in)
        memory.find(tensor).written[name] += 1

    def back(self, out: Any, unwritten: bool, name: str) -> Any:
        """Return what results of the stand-ins are on the device.

        Args:
            out: What the operator returned.
            unwritten: Whether new memory is as nobody wrote it.
            name: The operator's.
        """
        if isinstance(out, Tensor):
            same = self._given.get(id(out))
            return self._place(out, unwritten, name) if same is None else same
        if isinstance(out, list | tuple):
            return [self.back(one, unwritten, name) for one in out]
        return out

    def _of_tensor(self, tensor: Tensor) -> Tensor:
        stand_in = self._stand_ins.get(id(tensor))
        if stand_in is None:
            stand_in = self._stand_ins[id(tensor)] = self._make(tensor)
            self._given[id(stand_in)] = tensor
            self._by_storage[stand_in.untyped_storage()._cdata] = tensor
        return stand_in

    def _make(self, tensor: Tensor) -> Tensor:
        return memory.host(tensor)

    def _place(self, out: Tensor, unwritten: bool, name: str) -> Tensor:
        key = out.untyped_storage()._cdata
        base = self._by_storage.get(key)
        if base is None:
            base = self._by_storage[key] = self._new(out, unwritten)
            if not unwritten:
                memory.find(base).written[name] += 1
        return view_of(base, out)

    def _new(self, out: Tensor, unwritten: bool) -> Tensor:
        count("alloc")
        if unwritten:
            poison(out.untyped_storage())
        return memory.adopt(out.untyped_storage(), self._index)[1]

    def _resize(self, tensor: Tensor, stand_in: Tensor) -> None:
        if tensor.numel():
            raise SimulationError(
                f"an operator resized its output from {list(tensor.size())} to"
                f" {list(stand_in.size())}; give it one of the right size, or an empty one"
            )
        torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
            CPU_KERNELS,
            tensor,
            self._new(stand_in, unwritten=False).untyped_storage(),
            stand_in.storage_offset(),
            stand_in.size(),
            stand_in.stride(),
        )


class ShapeSide(HostSide):
    """Tensors without memory: what a call that is captured, and not executed, goes by."""

    device = "meta"

    def __init__(self, index: int, owner: Any) -> None:
        super().__init__(index)
        self._owner = owner
        self._storages: dict[int, torch.UntypedStorage] = {}

    def is_new(self, out: Tensor) -> bool:
        """Whether a result lies in memory of its own."""
        return out.untyped_storage()._cdata not in {
            storage._cdata for storage in self._storages.values()
        }

    def _make(self, tensor: Tensor) -> Tensor:
        allocation = memory.find(tensor)
        storage = self._storages.get(allocation.address)
        if storage is None:
            whole = torch.empty(allocation.nbytes, dtype=torch.uint8, device="meta")
            storage = self._storages[allocation.address] = whole.untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype, device="meta")
        return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _new(self, out: Tensor, unwritten: bool) -> Tensor:
        count("alloc")
        count("alloc_in_graph")
        size = out.untyped_storage().nbytes()
        backing = torch.UntypedStorage(size)  # type: ignore[no-untyped-call]
        poison(backing)
        made: Tensor = self._owner.adopt(backing, self._index)
        return made


def poison(storage: torch.UntypedStorage) -> None:
    """Fill memory with what nobody would write: a large negative number in every dtype."""
    torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).fill_(POISON)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments, those in lists included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
