"""What the scripts share: a backend without discovery, compilation in parallel, the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

import sconv
from sconv.discovery.load_check import bind
from sconv.discovery.observers import Observers
from sconv_cuda.backend import CudaBackend, create
from sconv_cuda.launch import Compiled, Kernel, Launcher, _dtypes
from sconv_cuda.plugin import plugin

#: ``cpu`` runs through Triton's interpreter, to check the scripts themselves without a GPU.
DEVICE = os.environ.get("SCONV_BENCH_DEVICE", "cuda")


def build(spec: sconv.StateSpec, pool: sconv.ConvStatePool | None = None) -> sconv.Backend:
    """Build a backend as ``load_backend`` does, without packages that a GPU box may lack."""
    info = plugin.sconv_backend()
    implementation = create(spec=spec, device=torch.device(DEVICE), pool=pool)
    hooks, manager = bind(implementation, info)
    return sconv.Backend(
        info=info,
        spec=spec,
        device=implementation.pool.device,
        implementation=implementation,
        hooks=hooks,
        observers=Observers(manager),
    )


class Recorder(Launcher):
    """Compiles and launches nothing; remembers what would have to be compiled."""

    def __init__(self, device: torch.device, jobs: dict[Any, Any]) -> None:
        super().__init__(device)
        self.jobs = jobs

    def compile(
        self,
        kernel: Kernel,
        arguments: Sequence[Any],
        constants: tuple[Any, ...],
        *,
        warps: int,
        aligned: bool,
        registers: int = 0,
    ) -> Compiled:
        key = (kernel, warps, aligned, registers, constants, _dtypes(arguments))
        options = self.options(warps, registers)
        self.jobs.setdefault(key, (kernel, arguments, constants, aligned, options))
        return Compiled(None, None, None, constants)

    def launch(
        self, compiled: Compiled, grid: tuple[int, int, int], arguments: Sequence[Any]
    ) -> None:
        pass


def record(backend: sconv.Backend, run: Callable[[], Any], jobs: dict[Any, Any]) -> None:
    """Collect the compilations that ``run`` needs."""
    implementation: CudaBackend = backend._impl
    convolutions = implementation._convolutions
    holders = (convolutions, implementation._metadata, implementation._commits)
    real = convolutions.launcher
    for holder in holders:
        holder.launcher = Recorder(implementation.device, jobs)
    try:
        run()
    finally:
        for holder in holders:
            holder.launcher = real
        convolutions._compiled.clear()
        convolutions._step = None
        implementation._metadata.forget()
        implementation._commits.forget()


def compile_all(jobs: dict[Any, Any]) -> float:
    """Compile into Triton's disk cache in forked processes; return the seconds that it took.

    The children name their target and touch no CUDA.
    """
    begin = time.perf_counter()
    if os.environ.get("SCONV_BENCH_SERIAL"):
        # Under compute-sanitizer, which does not follow forks: the calls compile what they need.
        return 0.0
    todo, workers = list(jobs.values()), min(os.cpu_count() or 1, len(jobs)) or 1
    target = GPUTarget("cuda", 10 * torch.cuda.get_device_capability()[0], 32)
    children = []
    for worker in range(workers):
        pid = os.fork()
        if pid == 0:
            code = 0
            try:
                for kernel, arguments, constants, aligned, options in todo[worker::workers]:
                    source = kernel.source(arguments, constants, aligned=aligned)
                    triton.compile(source, target=target, options=options)
            except BaseException as exc:
                print("compile failed:", kernel.name, constants, repr(exc)[:2000], flush=True)
                code = 1
            os._exit(code)
        children.append(pid)
    failed = sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in children)
    if failed:
        sys.exit(f"{failed} compilations failed")
    return time.perf_counter() - begin


def machine() -> dict[str, str]:
    """Name the card and the versions."""
    query = "--query-gpu=name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    if DEVICE == "cpu":
        command = ["true"]
    smi = subprocess.run(command, capture_output=True, text=True, check=False)
    return {
        "card": torch.cuda.get_device_name() if DEVICE == "cuda" else "none",
        "nvidia-smi": smi.stdout.strip(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
    }
