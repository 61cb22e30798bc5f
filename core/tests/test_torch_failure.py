"""A torch that a device extension keeps from starting: one line, with the cause and what to do."""

from __future__ import annotations

import pytest

import sconv.discovery.torch_failure
from sconv.discovery.torch_failure import torch_failure

#: What torch 2.13 does with an extension that cannot be loaded, once and from then on.
TORCH = """\
import os, sys
if hasattr(sys, "torch_has_failed"):
    raise RuntimeError(
        "Only a single TORCH_LIBRARY can be used to register the namespace triton; please put all"
    )
if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
    sys.torch_has_failed = True
    try:
        raise ImportError("libhccl.so: cannot open shared object file:\\n No such file")
    except ImportError as exc:
        raise RuntimeError(
            "Failed to load the backend extension: torch_npu. You can disable extension"
            " auto-loading with TORCH_DEVICE_BACKEND_AUTOLOAD=0."
        ) from exc
"""

LINE = (
    "PyTorch could not start because the installed torch_npu 2.13.0 failed to load (libhccl.so: "
    "cannot open shared object file: No such file). This happens before sconv runs: start Python "
    "with TORCH_DEVICE_BACKEND_AUTOLOAD=0, or load CANN's set_env.sh, or uninstall torch_npu. Then "
    "restart Python: torch cannot be imported again in this process"
)
AGAIN = (
    "PyTorch failed to start earlier, and torch cannot be imported again in this process: restart "
    "Python"
)
SUSPECT = (
    "PyTorch failed to start earlier, most likely because the installed torch_npu 2.13.0 failed to "
    "load; the first error says why: start Python with TORCH_DEVICE_BACKEND_AUTOLOAD=0, or load "
    "CANN's set_env.sh, or uninstall torch_npu. Then restart Python: torch cannot be imported "
    "again in this process"
)


@pytest.fixture
def broken(alone):
    alone.module("torch", TORCH)
    alone.distribution("torch_npu", "2.13.0")
    return alone


def test_a_name_that_needs_torch_says_why_there_is_none(broken):
    code = (
        "import sconv\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        sconv.load_backend\n"
        "    except sconv.TorchUnavailableError as error:\n"
        "        print(error.name, error, type(error.__cause__).__name__)\n"
    )
    done = broken.python("-c", code)
    assert done.stdout == f"torch {LINE} RuntimeError\n" * 2


def test_a_failure_that_the_caller_met_first(broken):
    code = (
        "import sconv\n"
        "try:\n"
        "    import torch\n"
        "except RuntimeError:\n"
        "    pass\n"
        "try:\n"
        "    sconv.StateSpec\n"
        "except sconv.SconvError as error:\n"
        "    print(error)\n"
    )
    assert broken.python("-c", code).stdout == f"{AGAIN}\n"
    folder = broken.root / "torch_npu-2.13.0.dist-info"
    folder.joinpath("entry_points.txt").write_text(
        "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"
    )
    assert broken.python("-c", code).stdout == f"{SUSPECT}\n"


@pytest.mark.parametrize(("backend", "variable"), [("ascend", ""), (None, " ascend ")])
def test_what_the_backend_asked_for_needs_is_named_first(backend, variable, monkeypatch):
    monkeypatch.setenv("SCONV_BACKEND", variable)
    monkeypatch.setattr(sconv.discovery.torch_failure, "_seen", {})
    error = RuntimeError("Failed to load the backend extension: torch_npu. You can disable")
    text = torch_failure(error, backend=backend)
    assert text is not None
    assert (
        "before sconv runs: load CANN's set_env.sh, which the backend 'ascend' needs; for another "
        "backend, start Python with TORCH_DEVICE_BACKEND_AUTOLOAD=0, or uninstall torch_npu. Then"
    ) in text
    other = torch_failure(error, backend="cpu")
    assert other is not None
    assert "before sconv runs: start Python with TORCH_DEVICE_BACKEND_AUTOLOAD=0, or load" in other


def test_a_command_that_takes_a_name_of_sconv_ends_in_one_line(broken):
    broken.distribution("sconv-other", commands={"other": "other:main"})
    broken.module("other", "import sconv\ndef main(argv):\n    sconv.StateSpec\n")
    assert broken.python("-m", "sconv", "other", code=2).stderr == f"sconv: {LINE}\n"


def test_a_command_ends_in_one_line(broken):
    done = broken.python("-m", "sconv", "plan", "--memory", "1GiB", code=2)
    assert (done.stdout, done.stderr) == ("", f"sconv: {LINE}\n")


def test_a_command_of_another_distribution_ends_in_one_line(broken):
    broken.distribution("sconv-other", commands={"other": "other:main"})
    broken.module("other", "def main(argv):\n    import torch\n")
    assert broken.python("-m", "sconv", "other", code=2).stderr == f"sconv: {LINE}\n"


def test_listing_backends_does_not_meet_it(broken):
    broken.plugin("fine", answer="Available(3)")
    assert "fine" in broken.python("-m", "sconv", "backends").stdout


def test_another_runtime_error_is_not_taken_for_it(alone):
    alone.module("torch", "raise RuntimeError('torn')")
    assert (
        "RuntimeError: torn" in alone.python("-c", "import sconv; sconv.StateSpec", code=1).stderr
    )
    alone.distribution("sconv-other", commands={"other": "other:main"})
    alone.module("other", "def main(argv):\n    raise RuntimeError('mine')\n")
    done = alone.python("-m", "sconv", "other", code=1)
    assert "RuntimeError: mine" in done.stderr


def test_an_extension_without_metadata_and_without_a_cause(monkeypatch):
    monkeypatch.setattr(sconv.discovery.torch_failure, "_seen", {})
    monkeypatch.delenv("SCONV_BACKEND", raising=False)
    error = RuntimeError("Failed to load the backend extension: torch_ext. You can disable")
    text = torch_failure(error)
    assert text is not None
    assert "the installed torch_ext failed to load. This happens" in text
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0, or uninstall torch_ext. Then" in text
    assert torch_failure(ValueError(str(error))) is None
