"""Runs every kernel once or twice on small odd shapes, for ``compute-sanitizer``.

    python sanitize.py                      # compiles
    export SCONV_BENCH_SERIAL=1
    compute-sanitizer --tool memcheck python sanitize.py
    compute-sanitizer --tool racecheck python sanitize.py

Torch's caching allocator would hide an access past the end of a tensor in its own block: it is off
(``PYTORCH_NO_CUDA_MEMORY_CACHING=1`` is set below).
"""

from __future__ import annotations

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

from typing import Any

import torch
from check import MODES, Run
from configs import CONFIGS
from harness import compile_all, record


def main() -> None:
    chosen = [CONFIGS[i] for i in (0, 2, 4, 5, 7, 10, 16, 18, 19)]
    runs = [Run(config, 77 + i) for i, config in enumerate(chosen)]
    jobs: dict[Any, Any] = {}
    for run in runs:
        for mode in MODES:
            for full in (True, False, False):
                record(
                    run.backend, lambda run=run, mode=mode, full=full: step(run, mode, full), jobs
                )
    compile_all(jobs)
    for run in runs:
        for mode in MODES:
            step(run, mode, True)
            run.eager(mode)
    torch.cuda.synchronize()
    print("all kernels ran")


def step(run: Run, mode: str, full: bool) -> None:
    case, names = run.draws.case(mode, full=full)
    batch = run.draws.batch(case, names, full=full)
    run.backend.init_forward_metadata(batch)
    inputs = run.inputs(case.num_tokens)
    run.convolve(batch, inputs)
    if mode == "verify":
        run.commit("", case, names, {}, {})


if __name__ == "__main__":
    main()
