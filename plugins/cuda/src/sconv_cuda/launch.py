"""From a kernel and its arguments to a launch: the right device, and no work that was done before.

Triton's own dispatcher looks at every argument of every call to find out which compilation it wants.
Here a kernel's constants, the dtypes of its tensors and one flag for alignment decide alone:
integers are 32 bits and never specialised, and either all vector accesses are aligned or none is
taken to be. So a short key finds what to call, and what a step will need is compiled in advance.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource

from sconv.errors import SconvError

__all__ = ["ALIGNMENT", "Kernel", "Launcher", "NotCompiledError", "Tile", "kernel"]

#: Bytes to which pointers and rows of an aligned launch are aligned: one vector access.
ALIGNMENT: Final = 16

_Arguments: TypeAlias = Sequence[Any]

_POINTERS: Final = {
    torch.bool: "*i1",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
}


class NotCompiledError(SconvError, RuntimeError):
    """A kernel would have to be compiled inside of a capture."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of a program.

    Attributes:
        block: Channels of a program; rows where a kernel has no channels.
        warps: Its warps.
        depth: Its tokens, rows or layers, where a kernel has that choice.
    """

    block: int
    warps: int
    depth: int = 1


class Kernel:
    """A Triton function. Its constants are the upper-case parameters, which come last.

    Tensors whose parameter ends in ``_index`` are read one element at a time: their alignment, which
    an engine's slice decides, does not matter.
    """

    __slots__ = ("constants", "function", "name", "parameters")

    def __init__(self, function: Callable[..., None]) -> None:
        names = tuple(inspect.signature(function).parameters)
        self.name = function.__name__
        self.parameters = tuple(name for name in names if not name.isupper())
        self.constants = tuple(name for name in names if name.isupper())
        self.function = triton.jit(function)

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter runs it, on tensors of any device."""
        return not isinstance(self.function, triton.runtime.JITFunction)

    def source(self, arguments: _Arguments, constants: _Arguments, *, aligned: bool) -> ASTSource:
        """Describe a compilation to Triton, by the dtypes of arguments; their values do not matter."""
        signature: dict[str, Any] = {}
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        for number, (name, value) in enumerate(zip(self.parameters, arguments, strict=True)):
            signature[name] = _signature(value)
            if aligned and not name.endswith("_index"):
                attributes |= {path: [["tt.divisibility", 16]] for path in _pointers(value, number)}
        values = {}
        for number, (name, value) in enumerate(zip(self.constants, constants, strict=True)):
            signature[name] = "constexpr"
            values[(len(self.parameters) + number,)] = value
        return ASTSource(self.function, signature, values, attributes)


def kernel(function: Callable[..., None]) -> Kernel:
    """Decorate a Triton function."""
    return Kernel(function)


class Launcher:
    """Launches kernels on one device, whichever device is the current one.

    Attributes:
        device: The device.
        pdl: Whether kernels may overlap the tail of the one before (programmatic dependent launch,
            from compute capability 9.0 on).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ready: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}
        self._index = 0
        self.pdl = False
        if device.type == "cuda":
            self._index = device.index if device.index is not None else torch.cuda.current_device()
            self.pdl = torch.cuda.get_device_capability(self._index) >= (9, 0)

    @property
    def compiled(self) -> int:
        """Compilations that are ready."""
        return len(self._ready)

    def __call__(
        self,
        kernel: Kernel,
        grid: int,
        arguments: _Arguments,
        constants: _Arguments,
        *,
        warps: int,
        aligned: bool,
    ) -> None:
        """Launch ``grid`` programs.

        Raises:
            NotCompiledError: The stream is being captured and this compilation is not ready.
        """
        if kernel.interpreted:
            kernel.function[(grid,)](*arguments, *constants)
            return
        with self._guard():
            key = (kernel, warps, aligned, constants, _dtypes(arguments))
            ready = self._ready.get(key)
            if ready is None:
                self._refuse_in_capture(kernel)
                ready = self._compile(key, kernel, arguments, constants, warps, aligned)
            run, function, metadata = ready
            stream = triton.runtime.driver.active.get_current_stream(self._index)
            run(
                grid, 1, 1, stream, function, metadata, None, None, None, *arguments, *constants
            )  # fmt: skip

    def prepare(
        self,
        kernel: Kernel,
        arguments: _Arguments,
        constants: _Arguments,
        *,
        warps: int,
        aligned: bool,
    ) -> None:
        """Compile for arguments of these dtypes, and load the code, without a launch."""
        if kernel.interpreted:
            return
        key = (kernel, warps, aligned, constants, _dtypes(arguments))
        if key not in self._ready:
            with self._guard():
                self._compile(key, kernel, arguments, constants, warps, aligned)

    def _compile(
        self,
        key: tuple[Any, ...],
        kernel: Kernel,
        arguments: _Arguments,
        constants: _Arguments,
        warps: int,
        aligned: bool,
    ) -> tuple[Any, Any, Any]:
        source = kernel.source(arguments, constants, aligned=aligned)
        options = {"num_warps": warps, "launch_pdl": self.pdl}
        target = triton.runtime.driver.active.get_current_target()
        compiled = triton.compile(source, target=target, options=options)
        ready = (compiled.run, compiled.function, compiled.packed_metadata)
        self._ready[key] = ready
        return ready

    def _guard(self) -> AbstractContextManager[Any]:
        # A launch goes to the current device: the tensors' device has to be that one.
        if torch.cuda.current_device() == self._index:
            return _UNGUARDED
        return torch.cuda.device(self._index)

    def _refuse_in_capture(self, kernel: Kernel) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise NotCompiledError(
                f"kernel {kernel.name!r} is not compiled for these dtypes, and a capture is no place to "
                "compile: call backend.warmup(), or run the step once eagerly, before capturing it"
            )


_UNGUARDED: Final = nullcontext()


def _dtypes(arguments: _Arguments) -> tuple[Any, ...]:
    return tuple(
        [
            value.dtype
            if isinstance(value, Tensor)
            else _dtypes(value)
            if isinstance(value, tuple)
            else None
            for value in arguments
        ]
    )


def _signature(value: object) -> Any:
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, tuple):
        return tuple(_signature(item) for item in value)
    return "i32"


def _pointers(value: object, *path: int) -> list[tuple[int, ...]]:
    if isinstance(value, Tensor):
        return [path]
    if isinstance(value, tuple):
        return [found for i, item in enumerate(value) for found in _pointers(item, *path, i)]
    return []
