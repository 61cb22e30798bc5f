"""A capture in progress, and what it leaves: operators on addresses, to be run in their order."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import MixedDevice, SimulationError, StaleAddress
from .kernels import Kernel
from .memory import Allocation, memory, on_device
from .operands import ShapeSide, tensors_in
from .races import refuse_race

__all__ = ["Capture"]


class Operand:
    """A tensor of the device as a graph knows it: an address and a shape, not the tensor."""

    __slots__ = ("allocation", "end", "host", "start")

    def __init__(self, tensor: Tensor) -> None:
        self.allocation = memory.find(tensor)
        self.host = memory.host(tensor)
        self.start, self.end = _extent(tensor)

    def overlaps(self, tensor: Tensor) -> bool:
        """Whether a tensor has an element in its memory."""
        if memory.find(tensor) is not self.allocation:
            return False
        start, end = _extent(tensor)
        return start < self.end and self.start < end


@dataclass(frozen=True)
class _Call:
    """One operator, with operands for its tensors; None for a result that is an argument's."""

    kernel: Kernel
    args: Any
    kwargs: Any
    written: list[Operand]
    results: list[Operand | None]

    def run(self) -> None:
        args, kwargs = _hosts(self.args), _hosts(self.kwargs)
        refuse_race(self.kernel.name, args, kwargs)
        out = self.kernel.operator(*args, **kwargs)
        for operand, value in zip(self.results, tensors_in([out]), strict=True):
            if operand is not None:
                if (value.size(), value.dtype) != (operand.host.size(), operand.host.dtype):
                    raise SimulationError(
                        f"{self.kernel.overload} returns {value.dtype} {list(value.size())} in a"
                        f" replay, and {operand.host.dtype} {list(operand.host.size())} in the"
                        " capture: its shape depends on values"
                    )
                operand.host.copy_(value)
                operand.allocation.written[self.kernel.name] += 1
        for operand in self.written:
            operand.allocation.written[self.kernel.name] += 1


class Capture:
    """What was called since ``capture_begin``. Nothing was executed.

    Attributes:
        failed: Why it cannot become a graph, if so.
        index: Of the device that is captured.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.failed: str | None = None
        self._calls: list[_Call] = []
        self._users: dict[Allocation, str] = {}
        self._operands: list[Operand] = []

    def fail(self, why: str) -> None:
        """Note that it cannot become a graph."""
        self.failed = self.failed or why

    def adopt(self, backing: torch.UntypedStorage, index: int) -> Tensor:
        """Allocate in the memory of the graph."""
        allocation, block = memory.adopt(backing, index)
        allocation.capture = weakref.ref(self)
        return block

    def record(
        self, kernel: Kernel, args: Sequence[Any], kwargs: dict[str, Any], index: int
    ) -> Any:
        """Note a call and return its results, whose values nobody has computed.

        Raises:
            MixedDevice: It runs on another device than the one that is captured.
            SimulationError: Its results' shapes cannot be told without its arguments' values.
        """
        if index != self.index:
            self.fail(f"{kernel.overload} runs on another device")
            raise MixedDevice(
                f"{kernel.overload} runs on npu:{index} in a capture on npu:{self.index}: capture"
                f" under torch.npu.device({index})"
            )
        shapes = ShapeSide(index, self)
        try:
            out = kernel.operator(*shapes.of(args), **shapes.of(kwargs))
        except Exception as exc:
            self.fail(f"{kernel.overload} cannot be captured")
            raise SimulationError(
                f"{kernel.overload} cannot be captured: its results' shapes are not known without"
                f" executing it ({exc})"
            ) from exc
        written = list(kernel.written(args, kwargs))
        for tensor in written:
            shapes.wrote(kernel.name, tensor)
        result = shapes.back(out, kernel.unwritten, kernel.name)
        if not kernel.unwritten:
            made = zip(tensors_in([out]), tensors_in([result]), strict=True)
            self._calls.append(
                _Call(
                    kernel,
                    # Only now: an empty out= has its memory since it was resized.
                    self._template(kernel, args),
                    self._template(kernel, kwargs),
                    [self._operand(kernel, tensor) for tensor in written],
                    [
                        self._operand(kernel, tensor) if shapes.is_new(shape) else None
                        for shape, tensor in made
                    ],
                )
            )
        return result

    def replay(self) -> None:
        """Run every call on the addresses of the capture.

        Raises:
            StaleAddress: Memory that the graph does not own was freed since.
            WriteRace: An operator writes two values to one place.
        """
        for allocation, user in self._users.items():
            if not allocation.live:
                raise StaleAddress(
                    f"{user} of this graph uses {allocation}, which was freed after the capture:"
                    " keep the buffer, and copy_ new values into it"
                )
        # Also what was captured in inference mode may be written then.
        with torch.inference_mode(), torch._C._DisableTorchDispatch():
            for call in self._calls:
                call.run()

    def uses(self, tensor: Tensor) -> bool:
        """Whether a replay reads or writes a tensor's memory."""
        return any(operand.overlaps(tensor) for operand in self._operands)

    def _operand(self, kernel: Kernel, tensor: Tensor) -> Operand:
        operand = Operand(tensor)
        self._operands.append(operand)
        owner = operand.allocation.capture
        if owner is None or owner() is not self:
            self._users.setdefault(operand.allocation, kernel.overload)
        return operand

    def _template(self, kernel: Kernel, value: Any) -> Any:
        if isinstance(value, Tensor):
            # A number of the host is baked in.
            return self._operand(kernel, value) if on_device(value) else value.clone()
        if isinstance(value, list | tuple):
            return [self._template(kernel, one) for one in value]
        if isinstance(value, dict):
            return {key: self._template(kernel, one) for key, one in value.items()}
        return torch.device("cpu") if isinstance(value, torch.device) else value


def _hosts(template: Any) -> Any:
    if isinstance(template, Operand):
        return template.host
    if isinstance(template, list):
        return [_hosts(one) for one in template]
    if isinstance(template, dict):
        return {key: _hosts(one) for key, one in template.items()}
    return template


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor within its memory, and the one behind its last."""
    if not tensor.numel():
        return 0, 0
    start = int(tensor.storage_offset()) * tensor.element_size()
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    last = sum((int(size) - 1) * int(stride) for size, stride in steps)
    return start, start + (last + 1) * tensor.element_size()
