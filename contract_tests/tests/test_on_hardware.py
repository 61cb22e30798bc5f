"""``sconv verify --on-hardware``: the recipe, and what happens where the device is not."""

from __future__ import annotations

import re
import subprocess
import types
from pathlib import Path

import pytest
import torch

from sconv import Available, BackendInfo, Capabilities
from sconv.cli.main import main
from sconv_contract import cli
from sconv_contract.behaviour import hardware
from sconv_contract.findings import Report
from sconv_contract.simulated_npu.state import settings


def verify(*arguments: str) -> int:
    return main(["verify", *arguments])


def info(device: str) -> BackendInfo:
    return BackendInfo("made", device, (1, 0), "a:b", lambda: Available(1), Capabilities())


@pytest.fixture
def made(monkeypatch):
    """A backend for npu that says it can run here."""
    monkeypatch.setattr(hardware, "backends", lambda: [info("npu")])
    monkeypatch.setattr(hardware, "selected", lambda name: info("npu"))
    monkeypatch.setattr(cli, "locate", lambda name: types.SimpleNamespace(pyproject=None))


def test_the_recipe_can_be_read_without_a_backend(capsys):
    assert verify("--on-hardware", "--print") == 0
    text = capsys.readouterr().out
    assert "TORCH_NPU_FALLBACK_CPU_DISABLE=1 sconv verify --behaviour NAME" in text
    assert "torch.npu.NPUGraph" in text
    assert "torch.cuda.CUDAGraph" in text
    assert text.count("set_sync_debug_mode") == 2
    assert verify("--on-hardware") == 2
    assert "name a backend" in capsys.readouterr().err


def test_it_is_printed_for_a_device_that_is_not_here(made, capsys):
    assert verify("--on-hardware", "--print", "made") == 0
    text = capsys.readouterr().out
    assert text.startswith("made on npu hardware:\n  1. TORCH_NPU_FALLBACK_CPU_DISABLE=1: ")


def test_a_device_without_a_recipe_of_its_own_has_the_one_of_all():
    (sync, graphs, suite) = list(hardware.recipe_for("xpu").lines("x"))[1:4]
    assert "torch.xpu.set_sync_debug_mode" in sync
    assert "torch.xpu.XPUGraph" in graphs
    assert "behaviour suite" in suite


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="the hardware is here")
def test_hardware_that_is_not_here_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert verify("--on-hardware", "cuda") == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("cuda on cuda hardware:")
    assert printed.err.count("\n") == 1
    assert "cannot run here: no NVIDIA device" in printed.err


def test_a_backend_that_nobody_has_is_one_line(capsys):
    assert verify("--on-hardware", "nobody") == 2
    assert "'nobody', asked for by name, is not installed" in capsys.readouterr().err


def test_the_host_is_no_hardware_to_prove(capsys):
    assert verify("--on-hardware", "cpu") == 2
    assert "sconv verify --behaviour cpu checks as it is" in capsys.readouterr().err


def test_print_goes_with_on_hardware(capsys):
    with pytest.raises(SystemExit) as stopped:
        verify("--print", "cpu")
    assert stopped.value.code == 2


def test_it_starts_a_process_under_the_variables(made, monkeypatch):
    started = []

    def run(command, *, env, check):
        started.append((command, env))
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(hardware.subprocess, "run", run)
    assert verify("--on-hardware", "made", "--select", "SCV402") == 1
    ((command, env),) = started
    assert command[1:] == ["-m", "sconv", "verify", "--on-hardware", "made", "--select", "SCV402"]
    assert env["TORCH_NPU_FALLBACK_CPU_DISABLE"] == "1"


@pytest.fixture
def under_the_variables(made, monkeypatch):
    monkeypatch.setenv("TORCH_NPU_FALLBACK_CPU_DISABLE", "1")
    asked = {}

    def run_behaviour(name, *, subjects, **rest):
        asked["subjects"] = subjects
        return Report(target=name, rules=["SCV402"], findings=[], subjects=list(subjects))

    monkeypatch.setattr(cli, "run_behaviour", run_behaviour)
    return asked


def device(count: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        is_available=lambda: count > 0,
        device_count=lambda: count,
        get_device_name=lambda index: "Product 1",
    )


def test_it_says_on_what_it_ran(under_the_variables, monkeypatch, capsys):
    monkeypatch.setattr(torch, "get_device_module", lambda type_: device(4))
    assert verify("--on-hardware", "made") == 0
    text = capsys.readouterr().out
    assert "checked on hardware: 4 x Product 1; torch 2." in text
    assert "simulated" not in text


def test_a_driver_without_devices_is_no_hardware(under_the_variables, monkeypatch, capsys):
    monkeypatch.setattr(torch, "get_device_module", lambda type_: device(0))
    assert verify("--on-hardware", "made") == 2
    assert "torch finds no npu device on this machine" in capsys.readouterr().err
    monkeypatch.undo()


def test_a_torch_without_the_device_is_no_hardware(under_the_variables, capsys):
    assert verify("--on-hardware", "made") == 2
    assert "torch has no npu device" in capsys.readouterr().err
    assert not under_the_variables


def test_a_simulated_device_is_no_hardware(under_the_variables, monkeypatch, capsys):
    monkeypatch.setattr(settings, "devices", 2)
    assert verify("--on-hardware", "made") == 2
    assert "this process has a simulated npu" in capsys.readouterr().err
    assert not under_the_variables


def test_the_page_of_commands_has_every_option_and_recipe(capsys):
    page = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text()
    section = page.split("\n## sconv verify\n")[1].split("\n## ")[0]
    described = re.findall(r"^\| `(--[a-z-]+)", section, re.MULTILINE)
    with pytest.raises(SystemExit):
        verify("--help")
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert set(described) == options
    for device in ("npu", "cuda"):
        recipe = hardware.recipe_for(device)
        row = next(line for line in section.splitlines() if line.startswith(f"| `{device}`"))
        for key, value in recipe.environment.items():
            assert f"{key}={value}" in row
