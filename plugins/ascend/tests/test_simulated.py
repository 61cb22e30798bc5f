"""Starts the tests of the folder ``simulated``, each file group in a process with an npu device.

Two processes at once: the behaviour suite takes as long as all the others.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "simulated"
GROUPS = {
    "behaviour": ["test_behaviour.py"],
    "backend": [
        "test_device.py",
        "test_equals_cpu.py",
        "test_faults_npu.py",
        "test_graphs.py",
        "test_operators.py",
        "test_schedules.py",
    ],
}


@pytest.fixture(scope="module")
def running() -> Iterator[dict[str, subprocess.Popen[str]]]:
    pytest.importorskip("sconv_contract", reason="the device comes with sconv-contract")
    # One thread each: a simulated operator is too small to share, and there are two processes.
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    # Workers of pytest-xdist would be processes without the device.
    pytest_here = ["pytest", "-q", "-n", "0"]
    command = [sys.executable, "-m", "sconv_contract.simulated_npu", "--", *pytest_here]
    started = {
        group: subprocess.Popen(
            [*command, "-p", "no:cacheprovider", *(str(FOLDER / file) for file in files)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=variables,
        )
        for group, files in GROUPS.items()
    }
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("group", "at_least"), [("behaviour", 60), ("backend", 70)])
def test_on_a_simulated_device(
    running: dict[str, subprocess.Popen[str]], group: str, at_least: int
) -> None:
    output, _ = running[group].communicate(timeout=600)
    assert running[group].returncode == 0, output[-8000:]
    (passed,) = re.findall(r"^(\d+) passed in ", output, re.MULTILINE)
    assert int(passed) >= at_least


def test_every_file_of_the_folder_belongs_to_a_group() -> None:
    files = sorted(file for group in GROUPS.values() for file in group)
    assert files == sorted(file.name for file in FOLDER.glob("test_*.py"))
