"""Microseconds a call under graph replay, over inputs that rotate through more than the cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

#: Bytes that the calls of a graph touch at least, where their number allows it: five times the L2.
ROTATED = 256e6
MOST_CALLS = 512


def sets_for(bytes_per_call: float) -> int:
    """How many sets of inputs a case rotates through."""
    return int(min(MOST_CALLS, max(2, -(-ROTATED // bytes_per_call))))


def graph_us(calls: Sequence[Callable[[], Any]], *, replays: int = 9) -> float:
    """Median over replays of one graph that holds up to 512 calls; at least 1 ms of work."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    count = len(calls)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for call in calls[: min(count, 4)]:
        call()
    end.record()
    torch.cuda.synchronize()
    rough = begin.elapsed_time(end) / min(count, 4)
    total = count * max(1, min(MOST_CALLS // count, int(4.0 / max(rough * count, 1e-3)) + 1))
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for i in range(total):
            result = calls[i % count]()
            if i < count:
                # So that outputs lie in as many places as inputs.
                kept.append(result)
    times = []
    for i in range(replays + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end) * 1e3 / total)
    return statistics.median(times)


def copy_us(bytes_per_call: float, sets: int | None = None) -> float:
    """The same for a device-to-device copy that reads and writes as many bytes together.

    The faster of the driver's copy and a kernel that reads and writes each element once.
    """
    count = sets_for(bytes_per_call) if sets is None else sets
    size = int(bytes_per_call // 4 // 8 * 8)
    sources = torch.randn(count, size, device="cuda", dtype=torch.bfloat16)
    targets = torch.empty_like(sources)

    def copy(i: int) -> Callable[[], Any]:
        return lambda: targets[i].copy_(sources[i])

    def negate(i: int) -> Callable[[], Any]:
        return lambda: torch.neg(sources[i], out=targets[i])

    return min(graph_us([way(i) for i in range(count)]) for way in (copy, negate))


def host_us(call: Callable[[], Any], *, calls: int = 200, rounds: int = 7) -> float:
    """Median microseconds that the host spends on an eager call, while the device keeps up."""
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - begin) * 1e6 / calls)
    torch.cuda.synchronize()
    return statistics.median(found)
