"""The one place that imports torch_npu; only a process that chose this backend comes here."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import PackageNotFoundError, version

from sconv import BackendUnavailableError
from sconv.plugin import one_line_error

from .probe import AUTOLOAD

__all__ = ["load_torch_npu"]


def load_torch_npu() -> None:
    """Import torch_npu, which makes ``npu`` a device of torch.

    A failed import of torch_npu leaves :data:`~sconv_ascend.probe.AUTOLOAD` set, so that every
    child process would lose its NPUs without a word. The variable is as before when this returns
    or raises.

    Raises:
        BackendUnavailableError: It cannot be imported. The cause is in the same line.
    """
    before = os.environ.get(AUTOLOAD)
    if sys.modules.get("torch_npu", "absent") is None:
        # Hidden from others after it failed; here the cause is wanted.
        sys.modules.pop("torch_npu", None)
    try:
        importlib.import_module("torch_npu")
    except Exception as exc:
        raise BackendUnavailableError(_reason(exc)) from exc
    finally:
        if before is None:
            os.environ.pop(AUTOLOAD, None)
        else:
            os.environ[AUTOLOAD] = before


def _reason(error: Exception) -> str:
    try:
        release = version("torch_npu")
    except PackageNotFoundError:
        return (
            "Ascend backend requested, but torch_npu is not installed: "
            "pip install 'sconv-plugin-ascend[npu]'"
        )
    return (
        f"Ascend backend requested, but torch_npu {release} cannot load CANN: "
        f"{one_line_error(error)}. Run 'source <CANN>/set_env.sh' in the shell that starts Python, "
        "or choose another backend"
    )
