"""What sconv reads at discovery. Nothing here imports torch, so listing backends stays quick."""

from __future__ import annotations

from importlib.util import find_spec

from sconv import Available, BackendInfo, Capabilities, Unavailable, hookimpl

__all__ = ["plugin"]


class CpuPlugin:
    """Describes the CPU backend."""

    @hookimpl
    def sconv_backend(self) -> BackendInfo:
        """Describe the backend."""
        return BackendInfo(
            name="cpu",
            device_type="cpu",
            contract=(1, 1),
            factory="sconv_cpu.backend:create",
            probe=_probe,
            capabilities=Capabilities(
                window_axes=("time", "channel"),
                window_layouts=("dense", "inputs", "dedup"),
                graph_capture=False,
                trees=True,
                rollback=True,
                gated_delta=True,
            ),
        )


def _probe() -> Available | Unavailable:
    # Zero is the lowest priority in use: a fallback for where nothing faster runs, never a rival.
    if find_spec("torch") is None:
        return Unavailable("torch is not installed: pip install torch")
    return Available(0)


plugin = CpuPlugin()
