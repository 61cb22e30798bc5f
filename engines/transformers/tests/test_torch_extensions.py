"""torch_npu without CANN: transformers would import it, and fail, for a model on the CPU too."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from sconv_transformers.torch_extensions import hide_broken_extensions

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str) -> None:
    (folder / "torch_npu.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    # Undone at the end, whatever the test leaves there.
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    del sys.modules["torch_npu"]


@pytest.mark.parametrize("before", [None, "0", "1"])
@pytest.mark.parametrize("error", ["ImportError('libhccl.so')", "OSError('libhccl.so')"])
def test_what_cannot_be_imported_is_as_good_as_absent(
    error: str, before: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, f"import os; os.environ[{AUTOLOAD!r}] = '0'; raise {error}\n")
    monkeypatch.delenv(AUTOLOAD, raising=False)
    if before is not None:
        monkeypatch.setenv(AUTOLOAD, before)
    for _ in range(2):
        hide_broken_extensions()
        assert find_spec("torch_npu") is None
        assert os.environ.get(AUTOLOAD) == before
    with pytest.raises(ModuleNotFoundError):
        import torch_npu  # noqa: F401


def test_what_can_be_imported_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, "__version__ = '2.13.0'\n")
    hide_broken_extensions()
    assert sys.modules["torch_npu"].__version__ == "2.13.0"


@pytest.mark.skipif(
    "torch_npu" in sys.modules or find_spec("torch_npu") is not None,
    reason="torch_npu is installed here",
)
def test_what_is_not_installed_is_not_hidden() -> None:
    hide_broken_extensions()
    assert "torch_npu" not in sys.modules
