"""Launch a kernel by the names of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..launch import Kernel, Launcher

__all__ = ["launch"]


def launch(
    launcher: Launcher,
    kernel: Kernel,
    programs: int,
    shared: Mapping[str, Any],
    own: Mapping[str, Any],
    *,
    warps: int,
    aligned: bool,
    registers: int = 0,
) -> None:
    """Compile a kernel if needed, and launch it.

    Args:
        launcher: Of the device.
        kernel: The kernel.
        programs: Their number.
        shared: Arguments and constants of several kernels, of which each takes those it names.
        own: Arguments and constants of this kernel, all of which it has to name.
        warps: Of a program.
        aligned: Whether all vector accesses are aligned.
        registers: Most registers of a thread; 0 = the compiler's choice.
    """
    given = {**shared, **own}
    if unknown := own.keys() - {*kernel.parameters, *kernel.constants}:
        raise TypeError(f"kernel {kernel.name!r} has no parameters {sorted(unknown)}")
    arguments = tuple(given[name] for name in kernel.parameters)
    constants = tuple(given[name] for name in kernel.constants)
    compiled = launcher.compile(
        kernel, arguments, constants, warps=warps, aligned=aligned, registers=registers
    )
    launcher.launch(compiled, (programs, 1, 1), launcher.freeze(arguments))
