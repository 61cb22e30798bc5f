"""Memory of the simulated device: tensors at addresses that hold nothing.

A tensor of the device is an ordinary ``torch.Tensor`` of the device type that torch reserves for
backends outside of its tree. It is made from a DLPack description, which may name any address:
addresses are handed out once, and lie where no process can map anything, so host code that follows
one ends the process instead of working. What the device would keep there lies in a storage of the
host, found by address; kernels compute on tensors over that storage.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.multiprocessing.reductions import StorageWeakRef

from .errors import SimulationError
from .state import settings

__all__ = [
    "CPU_KERNELS",
    "POISON",
    "Allocation",
    "Memory",
    "ledger",
    "memory",
    "on_device",
    "view_of",
]

#: Dispatch to the CPU's kernel whatever the tensor: right for what changes descriptions alone.
CPU_KERNELS: Final = DispatchKeySet(DispatchKey.CPU)
#: The byte of memory that nobody wrote.
POISON: Final = 0xCB

_ALIGNMENT: Final = 512
#: Device i begins at (16 + i) << 48: above what x86-64 and arm64 give to processes.
_FIRST_REGION: Final = 16
_REGION_BITS: Final = 48

_EXTENSION_DEVICE: Final = 12  # kDLExtDev of dlpack.h, which torch reads as its reserved device
_UNSIGNED: Final = 1  # kDLUInt


class _Description(ctypes.Structure):
    """``DLManagedTensor`` of dlpack.h (DLPack 0.8), of one dimension of bytes."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        # What the two pointers above name; no part of DLPack.
        ("size", ctypes.c_int64),
        ("step", ctypes.c_int64),
    )


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Allocation:
    """One piece of device memory.

    Attributes:
        address: Where it begins.
        index: Of its device.
        backing: What it holds, in a storage of the host.
        written: Operator -> how often it wrote here; transfers are ``h2d`` and ``p2p``.
        capture: Of the graph whose memory it is, which keeps it alive.
        freed: Whether it was given back.
    """

    __slots__ = (
        "__weakref__",
        "_description",
        "_storage",
        "address",
        "backing",
        "capture",
        "freed",
        "index",
        "written",
    )

    def __init__(self, address: int, index: int, backing: torch.UntypedStorage) -> None:
        self.address, self.index, self.backing = address, index, backing
        self.written: Counter[str] = Counter()
        self.capture: weakref.ref[object] | None = None
        self.freed = False
        self._storage: StorageWeakRef | None = None
        # It must outlive the tensors: torch reads its deleter when the last of them goes. There is
        # none on purpose: a deleter in Python would run in the middle of a kernel's exception, on
        # its way through C++.
        self._description = _Description(
            data=address,
            device_type=_EXTENSION_DEVICE,
            device_id=index,
            ndim=1,
            code=_UNSIGNED,
            bits=8,
            lanes=1,
            size=backing.nbytes(),
            step=1,
        )
        here = ctypes.addressof(self._description)
        self._description.shape = here + _Description.size.offset
        self._description.strides = here + _Description.step.offset

    def tensor(self) -> Tensor:
        """Return the bytes of a new allocation as a tensor of the device. To be called once."""
        made = torch._C._from_dlpack(
            _capsule(ctypes.addressof(self._description), b"dltensor", None)
        )
        self._storage = StorageWeakRef(made.untyped_storage())  # type: ignore[no-untyped-call]
        return made

    @property
    def nbytes(self) -> int:
        """Its size."""
        return int(self.backing.nbytes())

    @property
    def held(self) -> bool:
        """Whether a tensor on it is alive."""
        return self._storage is not None and not self._storage.expired()  # type: ignore[no-untyped-call]

    @property
    def live(self) -> bool:
        """Whether a tensor or a graph uses it."""
        kept = self.capture is not None and self.capture() is not None
        return not self.freed and (kept or self.held)

    def __str__(self) -> str:
        return f"npu:{self.index} {self.address:#x} ({self.nbytes} bytes)"


class Memory:
    """Every allocation of every device of the process."""

    def __init__(self) -> None:
        self._by_address: dict[int, Allocation] = {}
        self._next: dict[int, int] = {}
        self._sweep_at = 256
        self._lock = threading.RLock()

    def adopt(self, backing: torch.UntypedStorage, index: int) -> tuple[Allocation, Tensor]:
        """Hand out an address for a storage of the host, and a tensor of the bytes there.

        Raises:
            SimulationError: There is no such device, or none at the moment.
        """
        devices = settings.devices if settings.available else 0
        if not 0 <= index < devices:
            raise SimulationError(f"there is no npu:{index}; there are {devices} devices")
        with self._lock:
            address = self._next.get(index, (_FIRST_REGION + index) << _REGION_BITS) + _ALIGNMENT
            # One unit stays free behind every allocation: the end of one is not the next.
            self._next[index] = address + -(-backing.nbytes() // _ALIGNMENT) * _ALIGNMENT
            allocation = Allocation(address, index, backing)
            self._by_address[address] = allocation
            tensor = allocation.tensor()
            if len(self._by_address) >= self._sweep_at:
                self.sweep()
            return allocation, tensor

    def find(self, tensor: Tensor) -> Allocation:
        """Return the allocation of a tensor of the device.

        Raises:
            SimulationError: The device never handed out that memory.
        """
        address = tensor.untyped_storage().data_ptr()
        try:
            return self._by_address[address]
        except KeyError:
            raise SimulationError(
                f"there is no allocation at {address:#x}: a tensor of {tensor.device} was made"
                " without the simulated device"
            ) from None

    def host(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host over the memory of one of the device."""
        backing = self.find(tensor).backing
        empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return empty.set_(backing, tensor.storage_offset(), tensor.size(), tensor.stride())

    def sweep(self) -> None:
        """Let go of what nobody uses any more."""
        with self._lock:
            for address, allocation in list(self._by_address.items()):
                if not allocation.live:
                    allocation.freed = True
                    del self._by_address[address]
            self._sweep_at = max(256, 2 * len(self._by_address))

    def live_bytes(self, index: int) -> int:
        """Return how much of a device is in use."""
        self.sweep()
        return sum(one.nbytes for one in self._by_address.values() if one.index == index)


memory: Final = Memory()


def on_device(value: object) -> bool:
    """Whether a value is a tensor of the simulated device."""
    return isinstance(value, Tensor) and value.device.type == "npu"


def ledger(tensor: Tensor) -> dict[str, int]:
    """Return which operators wrote the memory that a tensor lies in, and how often.

    The memory is the whole allocation: a pool's, if the tensor is a slice of it. Copies from the
    host are ``h2d``, from another device ``p2p``; the operator that made it is counted as well.

    Raises:
        SimulationError: It is no tensor of the device.
    """
    if not on_device(tensor):
        raise SimulationError(f"only the device keeps a ledger, and this is on {tensor.device}")
    return dict(memory.find(tensor).written)


def view_of(base: Tensor, like: Tensor) -> Tensor:
    """Return what a tensor of the host describes, over the memory of one of the device."""
    if base.dtype != like.dtype:
        base = _elements(base, like.dtype)
    return _strided(base, like.size(), like.stride(), int(like.storage_offset()))


def _elements(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return all of a tensor's memory as elements of another dtype."""
    nbytes = tensor.untyped_storage().nbytes()
    whole = nbytes // dtype.itemsize * dtype.itemsize
    if tensor.dtype is not torch.uint8 or tensor.size() != (whole,):
        flat = _strided(tensor, (nbytes // tensor.dtype.itemsize,), (1,), 0)
        tensor = _strided(_as_dtype(flat, torch.uint8), (whole,), (1,), 0)
    return _as_dtype(tensor, dtype)


def _strided(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    as_strided = torch.ops.aten.as_strided.default
    made: Tensor = as_strided.redispatch(CPU_KERNELS, tensor, size, stride, offset)
    return made


def _as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    made: Tensor = torch.ops.aten.view.dtype.redispatch(CPU_KERNELS, tensor, dtype)
    return made
