"""From a kernel and its arguments to a launch: the right device, and no work that was done before.

Triton's own dispatcher looks at every argument of every call to find out which compilation it
wants. Here a kernel's constants, the dtypes of its tensors and one flag for alignment decide alone:
integers are 32 bits and never specialised, and either all vector accesses are aligned or none is
taken to be. So a caller can look its compilation up by a short key of its own, and what a step will
need is compiled in advance.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Final, TypeAlias

import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource

from sconv import SconvError

__all__ = [
    "ALIGNMENT",
    "ArgumentNameError",
    "Compiled",
    "Kernel",
    "Launcher",
    "NotCompiledError",
    "Tile",
    "kernel",
    "merged",
]

#: Bytes to which pointers and rows of an aligned launch are aligned: one vector access.
ALIGNMENT: Final = 16

_Arguments: TypeAlias = Sequence[Any]
_Named: TypeAlias = Mapping[str, Any]

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


class ArgumentNameError(SconvError, TypeError):
    """A launch names other arguments than its kernel has."""


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

    Callers give arguments and constants by name; the kernel alone knows their order.
    """

    __slots__ = (
        "_take_arguments",
        "_take_constants",
        "constants",
        "function",
        "name",
        "parameters",
    )

    def __init__(self, function: Callable[..., None]) -> None:
        names = tuple(inspect.signature(function).parameters)
        self.name = function.__name__
        self.parameters = tuple(name for name in names if not name.isupper())
        self.constants = tuple(name for name in names if name.isupper())
        self.function = triton.jit(function)
        self._take_arguments = itemgetter(*self.parameters)
        self._take_constants = itemgetter(*self.constants)

    def arguments_in_order(self, named: _Named) -> tuple[Any, ...]:
        """Return arguments in the order of the parameters.

        Raises:
            ArgumentNameError: One is missing, or is not a parameter.
        """
        try:
            if len(named) == len(self.parameters):
                return self._take_arguments(named)  # type: ignore[no-any-return]
        except KeyError:
            pass
        raise self._name_error("arguments", self.parameters, named)

    def constants_in_order(self, named: _Named) -> tuple[Any, ...]:
        """Return constants in the order of the upper-case parameters.

        Raises:
            ArgumentNameError: One is missing, or is not a parameter.
        """
        try:
            if len(named) == len(self.constants):
                return self._take_constants(named)  # type: ignore[no-any-return]
        except KeyError:
            pass
        raise self._name_error("constants", self.constants, named)

    def _name_error(self, what: str, expected: Sequence[str], named: _Named) -> ArgumentNameError:
        missing = [name for name in expected if name not in named]
        unknown = [name for name in named if name not in expected]
        return ArgumentNameError(
            f"kernel {self.name!r}: {what} missing: {missing}, not among its parameters: {unknown}"
        )

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
        order: Brings a caller's arguments into the kernel's order; None = they are in it.
    """

    run: Any
    function: Any
    metadata: Any
    constants: tuple[Any, ...]
    order: Callable[[_Arguments], tuple[Any, ...]] | None = None


def merged(*groups: _Named) -> dict[str, Any]:
    """Return all arguments of a launch.

    Raises:
        ArgumentNameError: Two groups give the same one.
    """
    found: dict[str, Any] = {}
    for group in groups:
        if twice := found.keys() & group.keys():
            raise ArgumentNameError(f"arguments are given twice: {sorted(twice)}")
        found |= group
    return found


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
                # Numbers first: of all questions this one costs least.
                value
                if type(value) is int
                else value.data_ptr()
                if isinstance(value, Tensor)
                else self.freeze(value)
                if isinstance(value, tuple)
                else value
                for value in arguments
            ]
        )

    def look_up(
        self,
        kernel: Kernel,
        arguments: _Named,
        constants: _Named,
        *,
        warps: int,
        aligned: bool,
        registers: int = 0,
    ) -> Compiled:
        """Return what launches a kernel with arguments in the order in which they are given here.

        Raises:
            ArgumentNameError: The names are not those of the kernel's parameters.
            NotCompiledError: It is not ready, and the stream is being captured.
        """
        found = self.compile(
            kernel,
            kernel.arguments_in_order(arguments),
            kernel.constants_in_order(constants),
            warps=warps,
            aligned=aligned,
            registers=registers,
        )
        places = {name: place for place, name in enumerate(arguments)}
        order = kernel.arguments_in_order(places)
        if order == tuple(range(len(order))):
            return found
        return replace(found, order=itemgetter(*order))

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

        Both are in the kernel's order.

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
        if compiled.order is not None:
            arguments = compiled.order(arguments)
        if self.interpreted:
            compiled.run[grid](*arguments, *compiled.constants)
            return
        # A launch goes to the current device: the tensors' device has to be that one.
        if torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                self.launch(replace(compiled, order=None), grid, arguments)
            return
        compiled.run(
            *grid, self._stream(self._index), compiled.function, compiled.metadata,
            None, None, None, *arguments, *compiled.constants,
        )  # fmt: skip

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
