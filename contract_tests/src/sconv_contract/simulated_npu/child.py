"""Runs Python on the simulated device, in a process that was started for it."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from .errors import SimulationError

__all__ = ["VARIABLE", "command_of", "environment"]

#: Set in such a process, so that its tests know.
VARIABLE: Final = "SCONV_SIM_NPU"

_IMPOSSIBLE: Final = 2


def environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of such a process: both have to be set before torch is imported."""
    variables = dict(os.environ if given is None else given)
    # Otherwise torch would load an installed torch_npu, and there can only be one npu.
    return variables | {VARIABLE: "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def command_of(python: Sequence[str], device_count: int = 2) -> list[str]:
    """Return the command of such a process.

    Args:
        python: What Python is to run: ``["-m", MODULE, …]``, ``["-c", CODE, …]``, ``[FILE.py, …]``,
            or a module's name and its arguments, such as ``["pytest", "tests"]``.
        device_count: How many devices there are.
    """
    return [sys.executable, "-m", __spec__.name, str(device_count), *python]


def run(python: Sequence[str], device_count: int = 2) -> int:
    """Run such a process and return its exit code, as a shell tells it."""
    done = subprocess.run(command_of(python, device_count), env=environment(), check=False)
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def _main(device_count: str, first: str, *rest: str) -> None:
    try:
        from .installing import install

        install(int(device_count))
    except (ModuleNotFoundError, SimulationError) as exc:
        sys.exit(_refused(exc))
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        return
    if first.endswith(".py"):
        sys.argv = [first, *rest]
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        runpy.run_path(first, run_name="__main__")
        return
    module, *arguments = rest if first == "-m" else (first, *rest)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _refused(exc: Exception) -> int:
    sys.stderr.write(f"sconv_contract.simulated_npu: {exc}\n")
    return _IMPOSSIBLE


if __name__ == "__main__":
    _main(*sys.argv[1:])
