"""What must hold before any test of the workspace imports anything."""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidia0").exists():
    # Triton takes this up when it is imported, and the first to import it may be transformers, long
    # before the tests of the CUDA backend are collected.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# One thread in each process: as many processes as cores run, and each test is many small steps.
os.environ.setdefault("OMP_NUM_THREADS", "1")
