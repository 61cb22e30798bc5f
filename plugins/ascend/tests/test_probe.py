"""What the probe says of a machine, from metadata and files alone."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from sconv import Available, Unavailable
from sconv_ascend import probe as module
from sconv_ascend.probe import PRIORITY, probe

#: Makes a distribution known, or with None hides it.
Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """A machine with the distributions that a test names, and neither CANN nor a device."""
    known: dict[str, str | None] = {"torch_npu": None, "torch": None}
    real = module.distribution
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(module, "_DEVICE_FOLDER", tmp_path / "dev")
    monkeypatch.setattr(module, "_LOADER_CACHE", tmp_path / "ld.so.cache")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)

    def distribution(name: str) -> object:
        if known.get(name) is None:
            raise module.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(module, "distribution", distribution)

    def write(name: str, release: str, *requirements: str) -> None:
        folder = tmp_path / f"{name}-{release}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {release}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
        known[name] = release

    return write


def matching(install: Install) -> None:
    install("torch_npu", "2.13.0", "torch==2.13.0.*", "numpy", "pyyaml")
    install("torch", "2.13.0+cpu")


def reason() -> str:
    answer = probe()
    assert isinstance(answer, Unavailable)
    assert "\n" not in answer.reason
    return answer.reason


def test_without_torch_npu_it_says_what_to_install(install: Install) -> None:
    install("torch", "2.13.0")
    assert reason() == "torch_npu is not installed: pip install 'sconv-plugin-ascend[npu]'"


def test_without_torch_it_says_so(install: Install) -> None:
    install("torch_npu", "2.13.0", "torch==2.13.0.*")
    assert reason() == "torch is not installed: pip install torch"


@pytest.mark.parametrize("wanted", ["torch==2.13.0.*", "torch==2.13.0", "torch (==2.13.0)"])
@pytest.mark.parametrize("release", ["2.12.1", "2.13.1+cpu", "2.1.3", "2.13.10"])
def test_another_torch_than_it_is_made_for(install: Install, wanted: str, release: str) -> None:
    install("torch_npu", "2.13.0", "numpy", wanted)
    install("torch", release)
    assert reason() == (
        f"torch_npu 2.13.0 is made for torch 2.13.0, and torch {release} is installed: "
        f"pip install 'torch==2.13.0.*' or the torch_npu for torch {release}"
    )


@pytest.mark.parametrize("wanted", ["torch>=2.6", "torch", "torchvision==1.0", None])
def test_a_torch_that_is_not_pinned_is_not_compared(install: Install, wanted: str | None) -> None:
    install("torch_npu", "2.13.0", *([wanted] if wanted else []))
    install("torch", "2.12.0")
    assert "CANN is not loadable" in reason()


def test_without_cann_it_says_what_to_source_and_what_to_set(install: Install) -> None:
    matching(install)
    assert reason() == (
        "torch_npu 2.13.0 is installed but CANN is not loadable (libhccl.so not found): run "
        "'source <CANN>/set_env.sh' in the shell that starts Python; without CANN, `import torch` "
        "itself fails unless that shell has TORCH_DEVICE_BACKEND_AUTOLOAD=0 or torch_npu is "
        "uninstalled"
    )


def put_cann(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "cann" / "lib64"
    folder.mkdir(parents=True)
    (folder / "libhccl.so").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere::{folder}")


def test_without_a_device_it_says_where_it_looked(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    matching(install)
    put_cann(monkeypatch, tmp_path)
    assert f"no NPU: there is no {tmp_path}/dev/davinci0 or the like" in reason()
    assert "ASCEND_HOME_PATH is not set" in reason()
    monkeypatch.setenv("ASCEND_HOME_PATH", "/opt/cann")
    assert "and CANN is in /opt/cann" in reason()
    # The manager's node is on every machine with a driver and is no device.
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "davinci_manager").touch()
    assert "no NPU" in reason()


def test_with_all_of_it_the_backend_is_available(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    matching(install)
    put_cann(monkeypatch, tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "davinci3").touch()
    assert probe() == Available(PRIORITY)


def test_cann_may_be_where_the_loader_looks_by_itself(install: Install, tmp_path: Path) -> None:
    matching(install)
    (tmp_path / "ld.so.cache").write_bytes(b"\0libhccl.so\0/usr/lib64/libhccl.so\0")
    assert "no NPU" in reason()


class Npu(types.ModuleType):
    """What ``torch.npu`` is asked for."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        super().__init__("npu")
        self.count, self.error = count, error

    def is_available(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.count > 0

    def device_count(self) -> int:
        return self.count


def imported(monkeypatch: pytest.MonkeyPatch, npu: Npu | None) -> None:
    torch_npu, torch = types.ModuleType("torch_npu"), types.ModuleType("torch")
    torch_npu.__version__ = "2.13.0"  # type: ignore[attr-defined]
    if npu is not None:
        torch.npu = npu  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu)
    monkeypatch.setitem(sys.modules, "torch", torch)


def test_an_imported_torch_npu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where no device file is: a container may hide them."""
    imported(monkeypatch, Npu(2))
    assert probe() == Available(PRIORITY)


def test_an_imported_torch_npu_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    imported(monkeypatch, Npu(0))
    assert reason() == "torch_npu 2.13.0 finds no device"
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
    assert reason() == "torch_npu 2.13.0 finds no device (ASCEND_RT_VISIBLE_DEVICES='')"
    imported(monkeypatch, None)
    assert reason().startswith("torch_npu 2.13.0 finds no device")


def test_a_driver_that_raises_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    imported(monkeypatch, Npu(1, RuntimeError("aclInit failed,\nerror code 507008")))
    assert reason() == (
        "torch_npu 2.13.0 cannot ask for devices: RuntimeError: aclInit failed, error code 507008"
    )


def test_probing_imports_neither_torch_nor_torch_npu(tmp_path: Path) -> None:
    """Also where both are installed; and it leaves the environment as it is."""
    for name in ("torch", "torch_npu"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')\n")
        folder = tmp_path / f"{name}-2.13.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.13.0\n")
    code = (
        f"import sys, os; sys.path.insert(0, {str(tmp_path)!r}); before = dict(os.environ);"
        "from sconv_ascend.plugin import plugin; print(plugin.sconv_backend().probe().reason[:29]);"
        "assert not {'torch', 'torch_npu', 'numpy'} & set(sys.modules);"
        "assert dict(os.environ) == before"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("torch_npu 2.13.0 is installed\n", "")
