"""The entry point: what it says of itself, and how asking for it fails where it cannot run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sconv
from sconv import BackendUnavailableError
from sconv.discovery.load_check import check_discovery
from sconv.discovery.selection import select
from sconv_ascend.backend import AscendBackend
from sconv_ascend.plugin import plugin

NO_NPU = pytest.mark.skipif(
    any(Path("/dev").glob("davinci[0-9]*")), reason="this machine has an NPU"
)


def test_it_describes_itself() -> None:
    check_discovery(plugin)
    info = plugin.sconv_backend()
    assert (info.name, info.device_type) == ("ascend", "npu")
    assert info.contract <= sconv.CONTRACT_VERSION
    can = info.capabilities
    assert can.graph_capture
    assert can.trees
    assert can.rollback
    assert can.window_layouts[0] == "dense"
    assert can.window_layouts == AscendBackend.window_layouts


@NO_NPU
def test_asking_for_it_by_name_fails_in_one_line() -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        select("ascend")
    text = str(caught.value)
    assert text.startswith("backend 'ascend' of sconv-plugin-ascend ")
    assert "asked for by name, cannot run here: " in text
    assert "\n" not in text


@NO_NPU
def test_an_engine_that_asks_for_it_fails_in_one_line() -> None:
    pytest.importorskip("sconv_transformers", reason="the command comes with sconv-transformers")
    command = [sys.executable, "-m", "sconv", "generate", "--prompt", "x", "--backend", "ascend"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1
    assert "cannot run here: torch_npu " in lines[0]


def test_the_device_is_another_name_for_it() -> None:
    """People type the device's name; the answer names the backend."""
    with pytest.raises(sconv.BackendNotFoundError, match="'ascend'"):
        select("npu")


def test_listing_it_imports_no_torch() -> None:
    code = (
        "import sys, sconv.cli.main; sconv.cli.main.main(['backends']);"
        "print(sorted({'torch', 'torch_npu', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    table, _, modules = done.stdout.rstrip("\n").rpartition("\n")
    assert modules == "[]"
    assert "ascend  sconv-plugin-ascend" in table
