"""Starts the tests of the folder ``simulated``, each file group in a process with an npu device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "simulated"
GROUPS = {
    "behaviour": ["test_behaviour.py"],
    "backend": [
        "test_device.py",
        "test_equals_cpu.py",
        "test_faults_npu.py",
        "test_gated_delta.py",
        "test_graphs.py",
        "test_operators.py",
        "test_schedules.py",
    ],
}


@pytest.mark.parametrize(
    ("group", "at_least"),
    [pytest.param("behaviour", 60, marks=pytest.mark.slow), ("backend", 70)],
)
def test_on_a_simulated_device(group: str, at_least: int) -> None:
    pytest.importorskip("sconv_contract", reason="the device comes with sconv-contract")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sconv_contract.simulated_npu", "--"),
            # Workers of pytest-xdist would be processes without the device.
            *("pytest", "-q", "-n", "0", "-m", "", "-p", "no:cacheprovider"),
            *(str(FOLDER / file) for file in GROUPS[group]),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=900,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-8000:]
    (passed,) = re.findall(r"^(\d+) passed in ", done.stdout, re.MULTILINE)
    assert int(passed) >= at_least


def test_every_file_of_the_folder_belongs_to_a_group() -> None:
    files = sorted(file for group in GROUPS.values() for file in group)
    assert files == sorted(file.name for file in FOLDER.glob("test_*.py"))
