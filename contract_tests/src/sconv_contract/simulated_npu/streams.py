"""Streams and events of ``torch.npu``. Everything is done at once, so they order nothing."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from .audit import count_sync
from .state import thread

__all__ = [
    "Event",
    "Stream",
    "current_stream",
    "default_stream",
    "on_default_stream",
    "set_stream",
    "stream",
    "synchronize",
]

_numbers: Final = itertools.count(1)


class _Current(threading.local):
    """The current stream of each device in a thread, where it is not the default one."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}


_current: Final = _Current()


class Stream:
    """``torch.npu.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = torch.device("npu", index_of(device))
        self.priority = priority
        self.stream_id = kwargs.get("stream_id", next(_numbers))

    @property
    def device_index(self) -> int:
        """Of its device."""
        return int(self.device.index)

    def synchronize(self) -> None:
        """Wait for it.

        Raises:
            HostSync: In a capture or a region of a graph.
        """
        _wait("Stream.synchronize")

    def query(self) -> bool:
        """Whether it is done."""
        return True

    def wait_stream(self, other: Stream) -> None:
        """Order it after another."""

    def wait_event(self, event: Event) -> None:
        """Order it after an event."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event in it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.stream_id, self.device) == (
            other.stream_id,
            other.device,
        )

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device))

    def __repr__(self) -> str:
        return f"torch.npu.Stream(device={self.device}, stream={self.stream_id:#x})"


class Event:
    """``torch.npu.Event``."""

    def __init__(self, enable_timing: bool = False, **kwargs: Any) -> None:
        self._timed = enable_timing
        self._at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Record it."""
        self._at = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait for it."""

    def query(self) -> bool:
        """Whether it has happened."""
        return True

    def elapsed_time(self, other: Event) -> float:
        """Return the milliseconds until another event; of this process, not of any device."""
        if not (self._timed and other._timed):
            raise RuntimeError("both events need enable_timing=True")
        return 1000 * (other._at - self._at)

    def synchronize(self) -> None:
        """Wait for it.

        Raises:
            HostSync: In a capture or a region of a graph.
        """
        _wait("Event.synchronize")


def default_stream(device: Any = None) -> Stream:
    """Return the stream that a device starts with."""
    return Stream(device=device, stream_id=0)


def current_stream(device: Any = None) -> Stream:
    """Return the stream that the thread uses."""
    return _current.streams.get(index_of(device)) or default_stream(device)


def set_stream(stream: Stream) -> None:
    """Use a stream in this thread."""
    _current.streams[stream.device_index] = stream
    thread.device = stream.device_index


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Use a stream, and its device, in the body."""
    if stream is None:
        yield
        return
    device, before = thread.device, current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)
        thread.device = device


def on_default_stream() -> bool:
    """Whether the thread's current stream is the one that cannot be captured."""
    return current_stream() == default_stream()


def synchronize(device: Any = None) -> None:
    """Wait for a device.

    Raises:
        HostSync: In a capture or a region of a graph.
    """
    _wait("synchronize")


def index_of(device: Any) -> int:
    """Return the index that a device, a number, a name or None stands for."""
    if device is None:
        return thread.device
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return thread.device if index is None else int(index)


def _wait(what: str) -> None:
    # The debug mode of torch.npu is about waits that nobody asked for.
    if thread.capture is not None or thread.regions:
        count_sync(f"torch.npu {what}")
