"""From a kernel and its arguments to a launch: the right device, and no work that was done before.

Triton's own dispatcher looks at every argument of every call to find out which compilation it
wants. Here a kernel's constants, the dtypes of its tensors and one flag for alignment decide alone:
integers are 32 bits and never specialised, and either all vector accesses are aligned or none is
taken to be. So a caller can look its compilation up by a short key of its own, and what a step will
need is compiled in advance.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource

from sconv import SconvError

__all__ = ["ALIGNMENT", "Compiled", "Kernel", "Launcher", "NotCompiledError", "Tile", "kernel"]

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
        ahead: Start before the kernel in front has finished, where the mode can (:mod:`.overlap`).
        registers: Most registers of a thread; 0 = the compiler's choice.
    """

    block: int
    warps: int
    depth: int = 1
    ahead: bool = False
    registers: int = 0


class Kernel:
    """A Triton function. Its constants are the upper-case parameters, which come last.

    Tensors whose parameter ends in ``_index`` are read one element at a time: their alignment,
    which an engine's slice decides, does not matter.
    """

    __slots__ = ("constants", "function", "name", "parameters")

    def __init__(self, function: Callable[..., None]) -> None:
        names = tuple(inspect.signature(function).parameters)
        self.name = function.__name__
        self.parameters = tuple(name for name in names if not name.isupper())
        self.constants = tuple(name for name in names if name.isupper())
        self.function = triton.jit(function)

    def source(self, arguments: _Arguments, constants: _Arguments, *, aligned: bool) -> ASTSource:
        """Describe a compilation, by the dtypes of arguments; their values do not matter."""
        signature: dict[str, Any] = {}
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        for number, (name, value) in enumerate(zip(self.parameters, arguments, strict=True)):
            signature[name] = _signature(value)
            if aligned and not name.endswith("_index"):
                attributes |= {path: [["tt.divisibility", 16]] for path in _tensors(value, number)}
        values = {}
        for number, (name, value) in enumerate(zip(self.constants, constants, strict=True)):
            signature[name] = "constexpr"
            values[(len(self.parameters) + number,)] = value
        return ASTSource(self.function, signature, values, attributes)


def kernel(function: Callable[..., None]) -> Kernel:
    """Decorate a Triton function."""
    return Kernel(function)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel that is ready to be launched.

    Attributes:
        run: Launches it: Triton's launcher, or the interpreter.
        function: The driver's handle of the code.
        metadata: What Triton's launcher wants to know.
        constants: Of the compilation; they are arguments too.
    """

    run: Any
    function: Any
    metadata: Any
    constants: tuple[Any, ...]


class Launcher:
    """Compiles and launches kernels on one device, whichever device is the current one.

    Attributes:
        device: The device.
        interpreted: Whether Triton's interpreter runs the kernels.
        pdl: Whether kernels may overlap the tail of the one before (programmatic dependent launch,
            from compute capability 9.0 on).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pdl = False
        self.interpreted = device.type != "cuda"
        self._index = 0
        self._ready: dict[tuple[Any, ...], Compiled] = {}
        self._notes: dict[tuple[Any, ...], dict[str, Any]] | None = None
        self._fires = True
        if not self.interpreted:
            self._index = device.index if device.index is not None else torch.cuda.current_device()
            self.pdl = torch.cuda.get_device_capability(self._index) >= (9, 0)
            self._stream = triton.runtime.driver.active.get_current_stream

    @property
    def compiled(self) -> int:
        """Compilations that are ready."""
        return len(self._ready)

    def freeze(self, arguments: _Arguments) -> tuple[Any, ...]:
        """Replace tensors by their addresses, which spares the launcher a question for each.

        The interpreter wants the tensors.
        """
        if self.interpreted:
            return tuple(arguments)
        return tuple(
            [
                value.data_ptr()
                if isinstance(value, Tensor)
                else self.freeze(value)
                if isinstance(value, tuple)
                else value
                for value in arguments
            ]
        )

    def compile(
        self,
        kernel: Kernel,
        arguments: _Arguments,
        constants: tuple[Any, ...],
        *,
        warps: int,
        aligned: bool,
        registers: int = 0,
    ) -> Compiled:
        """Return a kernel compiled for arguments of these dtypes, and loaded on the device.

        Raises:
            NotCompiledError: It is not ready, and the stream is being captured.
        """
        if self.interpreted:
            return Compiled(kernel.function, None, None, constants)
        key = (kernel, warps, aligned, registers, constants, _dtypes(arguments))
        found = self._ready.get(key)
        if found is None and self._notes is not None:
            self._notes[key] = {
                "kernel": kernel,
                "arguments": arguments,
                "constants": constants,
                "warps": warps,
                "aligned": aligned,
                "registers": registers,
            }
            return Compiled(None, None, None, constants)
        if found is None:
            self._refuse_in_capture(kernel)
            with torch.cuda.device(self._index):
                compiled = triton.compile(
                    kernel.source(arguments, constants, aligned=aligned),
                    target=triton.runtime.driver.active.get_current_target(),
                    options=self.options(warps, registers),
                )
                found = Compiled(
                    compiled.run, compiled.function, compiled.packed_metadata, constants
                )
            self._ready[key] = found
        return found

    @contextmanager
    def launching_nothing(self) -> Iterator[None]:
        """Within it, launches do nothing."""
        self._fires = False
        try:
            yield
        finally:
            self._fires = True

    @contextmanager
    def taking_notes(self) -> Iterator[dict[tuple[Any, ...], dict[str, Any]]]:
        """Within it, missing compilations are noted, as arguments of compile; nothing runs."""
        self._notes = notes = {}
        try:
            with self.launching_nothing():
                yield notes
        finally:
            self._notes = None

    def options(self, warps: int, registers: int) -> dict[str, Any]:
        """Return Triton's options of a compilation."""
        found: dict[str, Any] = {"num_warps": warps, "launch_pdl": self.pdl}
        if registers:
            found["maxnreg"] = registers
        return found

    def launch(self, compiled: Compiled, grid: tuple[int, int, int], arguments: _Arguments) -> None:
        """Launch a grid of programs with frozen arguments."""
        if not self._fires:
            return
        if self.interpreted:
            compiled.run[grid](*arguments, *compiled.constants)
            return
        # A launch goes to the current device: the tensors' device has to be that one.
        if torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                self.launch(compiled, grid, arguments)
            return
        compiled.run(
            *grid, self._stream(self._index), compiled.function, compiled.metadata,
            None, None, None, *arguments, *compiled.constants,
        )  # fmt: skip

    def __call__(
        self,
        kernel: Kernel,
        grid: int,
        arguments: _Arguments,
        constants: tuple[Any, ...],
        *,
        warps: int,
        aligned: bool,
    ) -> None:
        """Compile if needed, and launch."""
        compiled = self.compile(kernel, arguments, constants, warps=warps, aligned=aligned)
        self.launch(compiled, (grid, 1, 1), self.freeze(arguments))

    def _refuse_in_capture(self, kernel: Kernel) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise NotCompiledError(
                f"kernel {kernel.name!r} is not compiled for these dtypes, and a capture is no "
                "place to compile: call backend.warmup(), or run the step once eagerly, before it"
            )


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


def _tensors(value: object, *path: int) -> list[tuple[int, ...]]:
    """Return the paths of all tensors of an argument."""
    if isinstance(value, Tensor):
        return [path]
    if isinstance(value, tuple):
        return [found for i, item in enumerate(value) for found in _tensors(item, *path, i)]
    return []
