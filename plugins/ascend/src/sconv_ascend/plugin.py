"""What the entry point ``sconv.backends: ascend`` names. Imports neither torch nor torch_npu."""

from __future__ import annotations

from typing import Final

from sconv import BackendInfo, Capabilities, hookimpl

from .probe import probe

__all__ = ["plugin"]


class AscendPlugin:
    """Describes the backend."""

    @hookimpl
    def sconv_backend(self) -> BackendInfo:
        """See :meth:`sconv.hookspecs.DiscoverySpec.sconv_backend`."""
        return BackendInfo(
            name="ascend",
            device_type="npu",
            contract=(1, 1),
            factory="sconv_ascend.factory:create",
            probe=probe,
            capabilities=Capabilities(
                window_axes=("time", "channel"),
                window_layouts=("dense", "inputs", "dedup"),
                dtypes=("bfloat16", "float16", "float32"),
                kernel_sizes=(2, 8),
                graph_capture=True,
                trees=True,
                rollback=True,
                gated_delta=True,
            ),
        )


plugin: Final = AscendPlugin()
