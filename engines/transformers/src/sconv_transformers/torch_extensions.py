"""Keeps transformers from importing a device extension that cannot be loaded here."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from importlib.util import find_spec
from typing import Final

__all__ = ["hide_broken_extensions"]

#: What transformers imports wherever it is installed, whatever device is used.
_EXTENSIONS: Final = ("torch_npu",)

_AUTOLOAD: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"

_log: Final = logging.getLogger("sconv")


def hide_broken_extensions() -> None:
    """Make an installed extension that cannot be imported look like one that is not installed.

    transformers imports torch_npu with its models, and fails with it, where torch_npu is installed
    without CANN's libraries, even for a model on the CPU. Call this before transformers is
    imported. An extension that can be imported is left alone.
    """
    for name in _EXTENSIONS:
        if name in sys.modules or find_spec(name) is None:
            continue
        # torch first: it imports extensions by itself, and its failure is another matter.
        importlib.import_module("torch")
        # A failed import of torch_npu sets the variable, and child processes would inherit it.
        before = os.environ.get(_AUTOLOAD)
        try:
            importlib.import_module(name)
        except Exception as exc:
            # What ``import`` and ``find_spec`` take for "there is no such module".
            sys.modules[name] = None  # type: ignore[assignment]
            _log.info("%s is hidden from transformers, as it cannot be imported: %s", name, exc)
        finally:
            if before is None:
                os.environ.pop(_AUTOLOAD, None)
            else:
                os.environ[_AUTOLOAD] = before
