"""Why ``import torch`` failed, where a device extension is the reason.

torch imports the extensions that are installed (torch_npu, for example) with itself. If one cannot
be loaded, ``import torch`` raises an error that names neither the library that is missing nor what
its user can do, and torch cannot be imported again in the process: whoever catches the error and
tries once more gets another one, about a namespace.
"""

from __future__ import annotations

import os
import re
from typing import Final

from importlib_metadata import PackageNotFoundError, entry_points, version

from ..messages import one_line
from .selection import ENVIRONMENT

__all__ = ["torch_failure"]

_FIRST: Final = re.compile(r"Failed to load the backend extension: ([\w.-]+?)\. ")
_AGAIN: Final = "Only a single TORCH_LIBRARY can be used to register the namespace"

_SWITCH: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD=0"
_RESTART: Final = "torch cannot be imported again in this process"

#: Where torch looks for extensions that it imports with itself.
_GROUP: Final = "torch.backends"

#: What makes an extension loadable, and the backend that does not work without it.
_REMEDIES: Final = {"torch_npu": ("load CANN's set_env.sh", "ascend")}

#: What the first failure was, by extension: the errors that follow it do not say so.
_seen: dict[str, str] = {}


def torch_failure(error: BaseException, *, backend: str | None = None) -> str | None:
    """Return one line about a failed import of torch; None if the error is something else.

    A later import in the process fails otherwise; the line is then about the first one, if this
    function was told of it.

    Args:
        error: What ``import torch`` raised.
        backend: The backend that was asked for; None = what ``SCONV_BACKEND`` says. What makes its
            own extension work is named first: to switch the extension off would not help it.
    """
    if not isinstance(error, RuntimeError):
        return None
    if backend is None:
        backend = os.environ.get(ENVIRONMENT, "").strip() or None
    match = _FIRST.match(str(error))
    if match is not None:
        cause = "" if error.__cause__ is None else f" ({one_line(str(error.__cause__))})"
        _seen[match[1]] = (
            f"PyTorch could not start because the installed {_release(match[1])} failed to load"
            f"{cause}. This happens before sconv runs"
        )
    elif not str(error).startswith(_AGAIN):
        return None
    if _seen:
        name, what = next(iter(_seen.items()))
        return f"{what}: {_ways(name, backend)}. Then restart Python: {_RESTART}"
    earlier = "PyTorch failed to start earlier"
    installed = sorted({entry.module.partition(".")[0] for entry in entry_points(group=_GROUP)})
    if not installed:
        return f"{earlier}, and {_RESTART}: restart Python"
    suspects = " or ".join(map(_release, installed))
    return (
        f"{earlier}, most likely because the installed {suspects} failed to load; the first error "
        f"says why: {_ways(installed[0], backend)}. Then restart Python: {_RESTART}"
    )


def _ways(name: str, backend: str | None) -> str:
    """Return what can be done about an extension, what serves the backend asked for first."""
    remedy, needed_by = _REMEDIES.get(name, (None, None))
    off, without = f"start Python with {_SWITCH}", f"uninstall {name}"
    if remedy is None:
        return f"{off}, or {without}"
    if backend == needed_by:
        return (
            f"{remedy}, which the backend {backend!r} needs; for another backend, {off}, or "
            f"{without}"
        )
    return f"{off}, or {remedy}, or {without}"


def _release(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return name
