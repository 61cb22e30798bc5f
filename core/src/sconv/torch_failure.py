"""Why ``import torch`` failed, where a device extension is the reason.

torch imports the extensions that are installed (torch_npu, for example) with itself. If one cannot
be loaded, ``import torch`` raises an error that names neither the library that is missing nor what
its user can do, and torch cannot be imported again in the process: whoever catches the error and
tries once more gets another one, about a namespace.
"""

from __future__ import annotations

import re
from typing import Final

from importlib_metadata import PackageNotFoundError, version

from .wording import one_line

__all__ = ["torch_failure"]

_FIRST: Final = re.compile(r"Failed to load the backend extension: ([\w.-]+?)\. ")
_AGAIN: Final = "Only a single TORCH_LIBRARY can be used to register the namespace"

_SWITCH: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD=0"
_RESTART: Final = "torch cannot be imported again in this process"

#: What makes an extension loadable, besides what helps with any of them.
_REMEDIES: Final = {"torch_npu": "load CANN's set_env.sh"}


def torch_failure(error: BaseException) -> str | None:
    """Return one line about a failed import of torch; None if the error is something else."""
    if not isinstance(error, RuntimeError):
        return None
    if str(error).startswith(_AGAIN):
        return f"PyTorch failed to start earlier, and {_RESTART}: restart Python"
    match = _FIRST.match(str(error))
    if match is None:
        return None
    name = match[1]
    cause = "" if error.__cause__ is None else f" ({one_line(str(error.__cause__))})"
    ways = [f"start Python with {_SWITCH}", _REMEDIES.get(name), f"uninstall {name}"]
    return (
        f"PyTorch could not start because the installed {_release(name)} failed to load{cause}. "
        f"This happens before sconv runs: {', or '.join(way for way in ways if way)}. "
        f"Then restart Python: {_RESTART}"
    )


def _release(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return name
