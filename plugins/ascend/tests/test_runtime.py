"""The one import of torch_npu: what it leaves behind, and what it says when it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sconv import BackendUnavailableError
from sconv_ascend import runtime
from sconv_ascend.probe import AUTOLOAD
from sconv_ascend.runtime import load_torch_npu

#: What torch_npu 2.13.0 does where CANN is not: fail, with the variable set for the process.
BROKEN = f"""\
import os
os.environ[{AUTOLOAD!r}] = "0"
raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")
"""


def put(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str) -> None:
    (folder / "torch_npu.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)


@pytest.mark.parametrize("before", [None, "1", "0"])
def test_a_failed_import_leaves_the_environment_as_it_was(
    before: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put(monkeypatch, tmp_path, BROKEN)
    monkeypatch.setattr(runtime, "version", lambda name: "2.13.0")
    monkeypatch.delenv(AUTOLOAD, raising=False)
    if before is not None:
        monkeypatch.setenv(AUTOLOAD, before)
    for _ in range(2):
        with pytest.raises(BackendUnavailableError) as caught:
            load_torch_npu()
        assert os.environ.get(AUTOLOAD) == before
    assert str(caught.value) == (
        "Ascend backend requested, but torch_npu 2.13.0 cannot load CANN: ImportError: libhccl.so: "
        "cannot open shared object file: No such file or directory. Run 'source <CANN>/set_env.sh' "
        "in the shell that starts Python, or choose another backend"
    )
    assert isinstance(caught.value.__cause__, ImportError)


def test_a_successful_import_leaves_the_environment_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put(monkeypatch, tmp_path, f"import os; os.environ[{AUTOLOAD!r}] = '0'\n")
    monkeypatch.delenv(AUTOLOAD, raising=False)
    load_torch_npu()
    monkeypatch.delitem(sys.modules, "torch_npu")
    assert AUTOLOAD not in os.environ


def test_a_torch_npu_that_was_hidden_still_tells_its_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """sconv-transformers hides a torch_npu that fails from transformers."""
    put(monkeypatch, tmp_path, BROKEN)
    monkeypatch.setattr(runtime, "version", lambda name: "2.13.0")
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(BackendUnavailableError, match="cannot load CANN: ImportError: libhccl"):
        load_torch_npu()


def test_a_missing_torch_npu_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torch_npu'] = None\n"
        "import sconv_ascend.runtime as runtime\n"
        "def version(name): raise runtime.PackageNotFoundError(name)\n"
        "runtime.version = version\n"
        "try:\n    runtime.load_torch_npu()\nexcept Exception as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == (
        "Ascend backend requested, but torch_npu is not installed: "
        "pip install 'sconv-plugin-ascend[npu]'\n"
    )
