"""The entry point: what it says of itself, and why it cannot run where it cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sconv import Available, Unavailable
from sconv_cuda import plugin as module
from sconv_cuda.plugin import plugin, probe


def test_describing_the_backend_imports_neither_torch_nor_triton() -> None:
    code = (
        "import sys; from sconv_cuda.plugin import plugin; info = plugin.sconv_backend();"
        "info.probe(); assert info.contract == (1, 1);"
        "assert not {'torch', 'triton'} & set(sys.modules), 'an accelerator library was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_declared_is_what_there_is() -> None:
    info = plugin.sconv_backend()
    assert (info.name, info.device_type) == ("cuda", "cuda")
    assert info.capabilities.trees
    assert info.capabilities.rollback
    assert info.capabilities.graph_capture
    assert info.capabilities.window_layouts[0] == "inputs"


def test_without_triton_the_probe_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    answer = probe()
    assert isinstance(answer, Unavailable)
    assert "triton is not installed" in answer.reason


def test_hidden_devices_are_named_as_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_missing_triton", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    answer = probe()
    assert isinstance(answer, Unavailable)
    assert "CUDA_VISIBLE_DEVICES='' hides" in answer.reason


def test_without_a_device_node_the_probe_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_missing_triton", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(module, "_NODES", ("no such device",))
    answer = probe()
    assert isinstance(answer, Unavailable)
    assert "no NVIDIA device" in answer.reason


def test_without_a_driver_the_probe_repeats_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_missing_triton", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(module, "_NODES", ("null",))
    monkeypatch.setattr(module, "_DRIVER", "libno-such-driver.so.1")
    answer = probe()
    assert isinstance(answer, Unavailable)
    assert "libno-such-driver.so.1" in answer.reason


def test_a_torch_without_cuda_is_told_apart_from_a_missing_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_missing_triton", lambda: None)
    monkeypatch.setattr(module, "_missing_gpu", lambda: None)

    class Found:
        origin = str(tmp_path / "torch" / "__init__.py")

    monkeypatch.setattr(module, "find_spec", lambda name: Found)
    answer = probe()
    assert isinstance(answer, Unavailable)
    assert "built without CUDA" in answer.reason
    library = tmp_path / "torch" / "lib" / "libtorch_cuda.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert probe() == Available(module.PRIORITY)
