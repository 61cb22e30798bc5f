"""``torch.npu.NPUGraph`` and ``torch.npu.graph``."""

from __future__ import annotations

import itertools
from typing import Any, Final

from torch import Tensor

from . import streams
from .audit import count
from .capture import Capture
from .errors import SimulationError, StaleAddress
from .memory import memory, on_device
from .state import thread

__all__ = ["NPUGraph", "graph", "graph_pool_handle", "is_current_stream_capturing"]

_pools: Final = itertools.count(1)


class NPUGraph:
    """A graph: its capture notes operators and executes none, a replay executes them.

    A replay uses the addresses of the capture and the numbers that the host had then.
    """

    def __init__(self) -> None:
        self._capture: Capture | None = None
        self._open = False
        self._pool = (0, next(_pools))

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Begin a capture on the current stream.

        Raises:
            SimulationError: It has one, another is in progress, or the stream is the default one.
        """
        if self._capture is not None:
            raise SimulationError("this graph was captured before: make another, or reset it")
        if thread.capture is not None:
            raise SimulationError("a capture is in progress in this thread")
        if streams.on_default_stream():
            raise SimulationError(
                "the default stream cannot be captured: use torch.npu.graph(), or a stream of yours"
            )
        self._pool = self._pool if pool is None else pool
        self._capture = thread.capture = Capture(thread.device)
        self._open = True

    def capture_end(self) -> None:
        """End the capture.

        Raises:
            SimulationError: There is none, or it failed.
        """
        if not self._open or self._capture is None:
            raise SimulationError("capture_end without capture_begin")
        thread.capture, self._open = None, False
        if self._capture.failed is not None:
            raise SimulationError(f"the capture failed: {self._capture.failed}")

    def replay(self) -> None:
        """Execute what was captured.

        Raises:
            StaleAddress: Memory of a caller that it uses was freed.
            SimulationError: There is no capture, or it failed.
        """
        self._captured().replay()
        count("replay")

    def reset(self) -> None:
        """Let go of the capture and its memory."""
        self._capture = None

    def pool(self) -> Any:
        """Return the handle of its memory pool."""
        return self._pool

    def update(self, cpu_update_input: Any = None) -> None:
        """Not simulated: what the host computed is baked in."""
        raise SimulationError("NPUGraph.update is not simulated")

    def assert_bound(self, **buffers: Tensor) -> None:
        """Check that buffers are still those of the capture.

        A buffer that was allocated anew while the old one stays alive is one that a replay no
        longer sees, and nothing else tells.

        Raises:
            StaleAddress: No operator of the graph uses one of them.
        """
        captured = self._captured()
        for name, tensor in buffers.items():
            if not on_device(tensor):
                raise StaleAddress(f"{name} is a tensor of {tensor.device}")
            if not captured.uses(tensor):
                raise StaleAddress(
                    f"{name} lies in {memory.find(tensor)}, which no operator of the graph reads or"
                    " writes: copy_ into the buffer of the capture instead of making another"
                )

    def _captured(self) -> Capture:
        if self._capture is None or self._open:
            raise SimulationError("this graph has no capture yet")
        if self._capture.failed is not None:
            raise SimulationError(f"its capture failed: {self._capture.failed}")
        return self._capture


class graph:  # noqa: N801 - torch.npu.graph
    """``torch.npu.graph``: captures the body of a ``with``, on a stream of its own."""

    def __init__(
        self,
        npu_graph: NPUGraph,
        pool: Any = None,
        stream: streams.Stream | None = None,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> None:
        self._graph, self._pool = npu_graph, pool
        self._stream = streams.Stream() if stream is None else stream
        self._mode = capture_error_mode
        self._entered: Any = None

    def __enter__(self) -> None:
        streams.synchronize()
        memory.sweep()
        self._entered = streams.stream(self._stream)
        self._entered.__enter__()
        try:
            self._graph.capture_begin(self._pool, capture_error_mode=self._mode)
        except BaseException:
            self._entered.__exit__(None, None, None)
            raise

    def __exit__(self, kind: Any, value: BaseException | None, traceback: Any) -> None:
        capture = thread.capture
        try:
            if value is not None and capture is not None:
                capture.fail(f"{type(value).__name__}: {value}")
            self._graph.capture_end()
        except SimulationError:
            # The body's exception says more than that its capture failed.
            if value is None:
                raise
        finally:
            self._entered.__exit__(None, None, None)


def graph_pool_handle() -> Any:
    """Return a handle of a new memory pool."""
    return (0, next(_pools))


def is_current_stream_capturing() -> bool:
    """Whether the thread is capturing."""
    return thread.capture is not None
