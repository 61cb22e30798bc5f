"""Whether an NPU can be used here, and what is missing where it cannot.

Reads metadata and looks for files. It never imports torch_npu: without CANN's libraries that import
fails, and when torch runs it by itself, ``import torch`` fails with it and cannot be repeated in
the process. So "is it installed" says nothing about "can it be used", and trying is no way to ask.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from importlib_metadata import PackageNotFoundError, distribution

from sconv import Available, Unavailable
from sconv.plugin import one_line_error

__all__ = ["AUTOLOAD", "PRIORITY", "probe"]

#: Below a GPU's and far above a CPU's. The two do not meet: torch has one accelerator at a time.
PRIORITY: Final = 90

#: torch's switch for importing device extensions by itself.
AUTOLOAD: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"

#: The library of CANN that the import of torch_npu asks for first.
_CANN_LIBRARY: Final = "libhccl.so"

_VERSION: Final = re.compile(r"^Version:[ \t]*(\S+)", re.MULTILINE)
_WANTED_TORCH: Final = re.compile(
    r"^Requires-Dist:[ \t]*torch[ \t]*\(?==[ \t]*([0-9.]+?)(?:\.\*)?\)?[ \t]*(?:;|$)", re.MULTILINE
)

_NODES: Final = "davinci[0-9]*"
_DEVICE_FOLDER = Path("/dev")
_LOADER_CACHE = Path("/etc/ld.so.cache")

_SET_ENV: Final = "run 'source <CANN>/set_env.sh' in the shell that starts Python"


def probe() -> Available | Unavailable:
    """Say whether an NPU can be used here, or what is missing and what to do.

    If torch_npu is imported already, it is asked: that is the case in every process with a working
    installation that has imported torch, since torch imports torch_npu with itself.
    """
    loaded = sys.modules.get("torch_npu")
    if loaded is not None:
        return _ask(str(getattr(loaded, "__version__", "")))
    reason = _missing_package() or _missing_cann() or _missing_device()
    return Available(PRIORITY) if reason is None else Unavailable(reason)


def _ask(release: str) -> Available | Unavailable:
    npu = getattr(sys.modules.get("torch"), "npu", None)
    try:
        if npu is not None and npu.is_available():
            return Available(PRIORITY)
        count = 0 if npu is None else npu.device_count()
    except Exception as exc:
        return Unavailable(f"torch_npu {release} cannot ask for devices: {one_line_error(exc)}")
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    hidden = "" if visible is None else f" (ASCEND_RT_VISIBLE_DEVICES={visible!r})"
    found = f"none of {count} devices that can be used" if count else "no device"
    return Unavailable(f"torch_npu {release} finds {found}{hidden}")


def _missing_package() -> str | None:
    release = _version("torch_npu")
    if release is None:
        return "torch_npu is not installed: pip install 'sconv-plugin-ascend[npu]'"
    torch = _version("torch")
    if torch is None:
        return "torch is not installed: pip install torch"
    wanted = _wanted_torch()
    if wanted is not None and not f"{torch.partition('+')[0]}.".startswith(f"{wanted}."):
        return (
            f"torch_npu {release} is made for torch {wanted}, and torch {torch} is installed: "
            f"pip install 'torch=={wanted}.*' or the torch_npu for torch {torch}"
        )
    return None


def _wanted_torch() -> str | None:
    """Return the torch release that torch_npu asks for, such as ``2.13.0``; None = not one."""
    match = _WANTED_TORCH.search(_metadata("torch_npu"))
    return None if match is None else match[1]


def _missing_cann() -> str | None:
    if any((folder / _CANN_LIBRARY).exists() for folder in _library_folders()):
        return None
    try:
        if _CANN_LIBRARY.encode() in _LOADER_CACHE.read_bytes():
            return None
    except OSError:
        pass
    return (
        f"torch_npu {_version('torch_npu')} is installed but CANN is not loadable "
        f"({_CANN_LIBRARY} not found): {_SET_ENV}; without CANN, `import torch` itself fails "
        f"unless that shell has {AUTOLOAD}=0 or torch_npu is uninstalled"
    )


def _library_folders() -> Iterator[Path]:
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if folder:
            yield Path(folder)


def _missing_device() -> str | None:
    if any(_DEVICE_FOLDER.glob(_NODES)):
        return None
    home = os.environ.get("ASCEND_HOME_PATH")
    cann = f"CANN is in {home}" if home else f"ASCEND_HOME_PATH is not set ({_SET_ENV})"
    return (
        f"no NPU: there is no {_DEVICE_FOLDER}/davinci0 or the like, and {cann}. Give a container "
        "its devices; where they are hidden and usable all the same, import torch_npu before sconv"
    )


def _version(name: str) -> str | None:
    match = _VERSION.search(_metadata(name))
    return None if match is None else match[1]


def _metadata(name: str) -> str:
    """Return the headers of an installed distribution, or nothing."""
    try:
        # As text: parsing a whole e-mail message takes longer than all the rest of the probe.
        return (distribution(name).read_text("METADATA") or "").partition("\n\n")[0]
    except PackageNotFoundError:
        return ""
