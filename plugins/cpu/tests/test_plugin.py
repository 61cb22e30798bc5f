from __future__ import annotations

import subprocess
import sys

import sconv
from sconv.discovery.load_check import check_discovery, check_implementation
from sconv.discovery.selection import resolve_factory, select
from sconv_cpu.plugin import plugin


def test_it_is_installed_and_a_fall_back():
    info = select("cpu")
    assert str(info.origin).startswith("sconv-plugin-cpu ")
    assert info.device_type == "cpu"
    assert info.availability == sconv.Available(0)
    assert info.contract <= sconv.CONTRACT_VERSION


def test_the_plugin_and_what_its_factory_makes_keep_the_contract():
    check_discovery(plugin)
    info = select("cpu")
    spec = sconv.StateSpec(
        num_layers=1, streams=[sconv.Stream("k", 3)], kernel_size=4, num_slots=2, max_requests=2
    )
    implementation = resolve_factory(info)(spec=spec, device="cpu", pool=None)
    check_implementation(implementation, info)


def test_a_missing_torch_is_a_reason_and_no_error(monkeypatch):
    monkeypatch.setattr("sconv_cpu.plugin.find_spec", lambda name: None)
    info = plugin.sconv_backend()
    assert info.probe() == sconv.Unavailable("torch is not installed: pip install torch")


def test_describing_it_imports_no_torch():
    code = (
        "import sys; from sconv_cpu.plugin import plugin;"
        "print(plugin.sconv_backend().probe(), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "Available(priority=0) False\n"
