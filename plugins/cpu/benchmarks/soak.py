"""Many steps in one process: memory, objects, file descriptors and time per step must stay flat.

    python plugins/cpu/benchmarks/soak.py --steps 100000

Each step is a decode, or a verify with its commit, of requests that come and go. Prints a line as
each tenth of the run ends, and leaves with 1 if the last tenths differ from the early ones.

Resident memory alone says little of a short run: the allocator's heap takes some thousand steps to
reach its size. The blocks that Python has handed out are counted, and do not wait for that.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from sconv import Backend, ForwardBatch, StateSpec, Stream, load_backend

#: Growth that is not flat any more: KiB of resident memory and Python's blocks over a run, and time
#: per step. One object for every eighth of 100,000 steps is found.
MEMORY_KIB = 8 * 1024
BLOCKS = 10_000
SLOWER = 1.5
DRAFTS = 3


@dataclass(frozen=True)
class Reading:
    """One part of the run.

    Attributes:
        steps: Steps until its end.
        memory: Resident memory at its end, KiB.
        blocks: Blocks of memory that Python's objects take at its end, after a collection.
        descriptors: Open files at its end.
        microseconds: Median time of a step.
    """

    steps: int
    memory: int
    blocks: int
    descriptors: int
    microseconds: float

    def __str__(self) -> str:
        return (
            f"{self.steps:>8} steps  {self.memory:>9} KiB  {self.blocks:>8} blocks"
            f"  {self.descriptors:>3} files  {self.microseconds:8.1f} us"
        )


def soak(
    steps: int,
    *,
    parts: int = 10,
    seed: int = 0,
    report: Callable[[Reading], None] = lambda reading: None,
) -> list[Reading]:
    """Run that many steps and return a reading of each part; each is also reported as it ends."""
    spec = StateSpec(
        num_layers=1,
        streams=[Stream("k", 64), Stream("v", 48)],
        kernel_size=4,
        num_slots=16,
        max_requests=8,
        dtype=torch.bfloat16,
        max_draft_tokens=DRAFTS,
    )
    backend = load_backend("cpu", spec=spec)
    rng = random.Random(seed)
    weights = {stream.name: torch.ones(stream.dim, 4, dtype=spec.dtype) for stream in spec.streams}
    inputs = {
        stream.name: torch.ones(8 * DRAFTS, stream.dim, dtype=spec.dtype) for stream in spec.streams
    }
    readings, taken = [], []
    for number in range(1, steps + 1):
        start = time.perf_counter()
        _step(backend, rng, weights, inputs)
        taken.append(time.perf_counter() - start)
        if number % (steps // parts) == 0:
            gc.collect()
            blocks = sys.getallocatedblocks()
            middle = median(taken) * 1e6
            taken.clear()
            readings.append(Reading(number, _resident(), blocks, _descriptors(), middle))
            report(readings[-1])
    return readings


def problems(readings: list[Reading]) -> list[str]:
    """Return what is not flat, from the second reading on: the first pays for what is kept."""
    early, last = readings[1], readings[-1]
    found = []
    if last.memory - early.memory > MEMORY_KIB:
        found.append(f"memory grew by {last.memory - early.memory} KiB")
    if last.blocks - early.blocks > BLOCKS:
        found.append(f"Python's objects take {last.blocks - early.blocks} more blocks")
    if last.descriptors > early.descriptors:
        found.append(f"{last.descriptors - early.descriptors} more files are open")
    fastest = min(one.microseconds for one in readings)
    if min(one.microseconds for one in readings[-3:]) > SLOWER * fastest:
        found.append(f"a step takes {last.microseconds:.0f} us, and {fastest:.0f} before")
    return found


def _step(
    backend: Backend,
    rng: random.Random,
    weights: dict[str, torch.Tensor],
    inputs: dict[str, torch.Tensor],
) -> None:
    rows = rng.randint(1, 8)
    slots = backend.pool.alloc(rows)
    verify = rng.random() < 0.5
    if verify:
        lengths = torch.full((rows,), 4, dtype=torch.int64)
        batch = ForwardBatch.target_verify(None, lengths, DRAFTS, slots=slots)
    else:
        batch = ForwardBatch.decode(slots=slots)
    tokens = rows * (DRAFTS if verify else 1)
    backend.init_forward_metadata(batch)
    for layer in range(backend.spec.num_layers):
        for stream, weight in weights.items():
            backend.short_conv(
                inputs[stream][:tokens], weight, layer_id=layer, stream=stream, forward_batch=batch
            )
    if verify:
        kept = torch.tensor([rng.randrange(-1, DRAFTS) for _ in range(rows)])
        backend.update_mamba_state_after_mtp_verify(kept, req_pool_indices=slots)
    backend.pool.free(slots)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def main() -> int:
    """Run the soak from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    readings = soak(parser.parse_args().steps, report=lambda reading: print(reading, flush=True))
    found = problems(readings)
    print("\n".join(found) or "flat")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
