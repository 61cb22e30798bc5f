"""What the entry point ``sconv.backends: cuda`` names. Imports neither torch nor triton."""

from __future__ import annotations

import os
from ctypes import CDLL
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from sconv import Available, BackendInfo, Capabilities, Unavailable, hookimpl

__all__ = ["plugin", "probe"]

#: Above every backend of a slower device.
PRIORITY: Final = 100

_DRIVER: Final = "libcuda.so.1"

#: Device nodes of a GPU: plain Linux, Windows' subsystem for Linux, and Tegra.
_NODES: Final = ("nvidia[0-9]*", "dxg", "nvhost-gpu")


def probe() -> Available | Unavailable:
    """Say whether NVIDIA GPUs can be used here, or what is missing.

    Looks at files and at the driver alone, so that ``sconv backends`` stays quick. The interpreter
    of Triton (``TRITON_INTERPRET=1``) needs no GPU, but it is for tests and never chosen by itself.
    """
    reason = _missing_triton() or _missing_gpu() or _missing_cuda_in_torch()
    return Available(PRIORITY) if reason is None else Unavailable(reason)


def _missing_triton() -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed (it has wheels for Linux alone): pip install triton"
    return None


def _missing_gpu() -> str | None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every NVIDIA device"
    # Not cuInit: a process that called it cannot hand CUDA to the workers that it forks.
    if not any(node for pattern in _NODES for node in Path("/dev").glob(pattern)):
        return "no NVIDIA device: there is no /dev/nvidia0 or the like"
    try:
        CDLL(_DRIVER)
    except OSError as exc:
        return f"no NVIDIA driver: {exc}"
    return None


def _missing_cuda_in_torch() -> str | None:
    found = find_spec("torch")
    if found is None or found.origin is None:
        return "torch is not installed: pip install torch"
    # A build without CUDA has no such library; importing torch to ask it would take seconds.
    libraries = Path(found.origin).parent / "lib"
    if not (libraries / "libtorch_cuda.so").exists():
        return f"torch in {Path(found.origin).parent} was built without CUDA: install a CUDA build"
    return None


class CudaPlugin:
    """Describes the backend."""

    @hookimpl
    def sconv_backend(self) -> BackendInfo:
        """See :meth:`sconv.hookspecs.DiscoverySpec.sconv_backend`."""
        return BackendInfo(
            name="cuda",
            device_type="cuda",
            contract=(1, 1),
            factory="sconv_cuda.backend:create",
            probe=probe,
            capabilities=Capabilities(
                window_axes=("time", "channel"),
                window_layouts=("inputs", "dense", "dedup"),
                dtypes=("bfloat16", "float16", "float32"),
                kernel_sizes=(2, 8),
                graph_capture=True,
                trees=True,
                rollback=True,
                gated_delta=True,
            ),
        )


plugin: Final = CudaPlugin()
