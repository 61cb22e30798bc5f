"""The simulated device from outside: its table, its process, what it refuses, its command."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import types
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch

from sconv import Available, BackendInfo
from sconv.cli.main import main
from sconv_contract import cli, simulated_npu
from sconv_contract.behaviour import simulated
from sconv_contract.behaviour.command import place_of
from sconv_contract.findings import Report
from sconv_contract.simulated_npu import SimulationError, child, for_suite, installing
from sconv_contract.simulated_npu.__main__ import main as start
from sconv_contract.simulated_npu.requirements import PRIVATE_NAMES
from sconv_contract.simulated_npu.state import settings
from sconv_contract.simulated_npu.table import TORCH_NPU, table

HERE = Path(__file__).parent
SCRIPT = HERE.parent / "scripts" / "npu_operators.py"
DATA = HERE.parent / "src" / "sconv_contract" / "simulated_npu" / "data"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("npu_operators", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_child(*python: str, timeout: int = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        child.command_of(python),
        env=child.environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_the_device_itself():
    """Its tests need a process of their own; one that imports torch once is enough for all."""
    done = in_child("pytest", "-q", "-p", "no:cacheprovider", str(HERE / "simulated_npu"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_its_tests_are_skipped_in_any_other_process():
    assert child.VARIABLE not in os.environ
    assert not hasattr(torch, "npu")


def test_the_table_says_what_the_wheel_says():
    """Counted in the dispatcher of the real library, built without CANN, the numbers are these."""
    known = table()
    assert (len(known.direct), len(known.cpu_fallback)) == (1077, 391)
    assert not known.direct & known.cpu_fallback
    assert {"index_select", "index_copy_", "where.self", "searchsorted.Tensor"} <= known.direct
    assert {"nonzero_static", "_assert_async", "searchsorted.Scalar_out"} <= known.cpu_fallback
    neither = known.direct | known.cpu_fallback
    assert not {"slice.Tensor", "narrow", "add.Tensor_nobody"} & neither


def test_the_script_reads_every_form_of_an_entry(script):
    pytest.importorskip("yaml")
    text = (
        "supported:\n- view\n- func: clone\n  op_api: true\n"
        "- func: index_copy_(Tensor(a!) self, int dim) -> Tensor(a!)\n"
        "custom:\n- func: npu_fusion(Tensor x) -> Tensor\n"
        "symint:\n- nobody_has_this.out\n"
    )
    made = script.table("1.2.3", [text, "supported:\n- where.self\n"])
    assert made["direct"] == ["clone", "index_copy_", "view", "where.self"]
    assert (made["torch_npu"], made["torch"]) == ("1.2.3", torch.__version__.partition("+")[0])
    assert "index_select" in made["cpu_fallback"]
    assert "slice.Tensor" not in made["cpu_fallback"]


def test_the_table_is_what_the_script_makes(script):
    try:
        installed = distribution("torch_npu").version
    except PackageNotFoundError:
        pytest.skip("torch_npu, whose files the table is made from, is not installed")
    if installed != TORCH_NPU:
        pytest.skip(f"the table is of torch_npu {TORCH_NPU}, and {installed} is installed")
    pytest.importorskip("yaml")
    kept = (DATA / f"torch_npu-{TORCH_NPU}.json").read_text()
    assert script.text_of(script.from_installation()) == kept


def test_every_private_name_of_torch_is_known():
    """install() looks for them, and a canary among the device's tests does."""
    used = set()
    for path in DATA.parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and "torch._" in f"{node.module}":
                used |= {f"{node.module}.{one.name}" for one in node.names}
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                used |= {name for name in [ast.unparse(node)] if name.startswith("torch.")}
    used.remove("torch.__version__")
    unknown = [
        name
        for name in sorted(used)
        if not any(f"{known}.".startswith(f"{name}.") for known in PRIVATE_NAMES)
    ]
    assert not unknown
    assert "torch._C._from_dlpack" in used


def test_another_torch_is_refused_by_what_it_lacks(monkeypatch):
    """Also by what the device's modules import: they are not imported before."""
    for name in [name for name in sys.modules if name.startswith("sconv_contract.simulated_npu.")]:
        if not name.endswith((".errors", ".installing", ".requirements", ".state", ".table")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    monkeypatch.delattr(torch._C, "_from_dlpack")
    monkeypatch.delattr(torch._C, "DispatchKeySet")
    with pytest.raises(SimulationError) as caught:
        simulated_npu.install()
    assert str(caught.value) == (
        "the simulated npu is made for torch 2.13.0, and this is torch 2.99.0+cpu, which lacks"
        " torch._C.DispatchKeySet, torch._C._from_dlpack: install torch==2.13.0 to use it"
    )


@pytest.mark.skipif(
    torch.__version__.partition("+")[0] != "2.13.0",
    reason="another torch is refused before these are asked",
)
def test_a_process_with_another_device_is_refused(monkeypatch):
    with pytest.raises(SimulationError, match="at least 1"):
        simulated_npu.install(0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(SimulationError, match="CUDA is in use"):
        simulated_npu.install()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    with pytest.raises(SimulationError, match="TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
        simulated_npu.install()
    monkeypatch.delitem(sys.modules, "torch_npu")
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "xyz")
    with pytest.raises(SimulationError, match="taken by 'xyz'"):
        simulated_npu.install()
    assert not settings.devices


def test_nothing_of_it_can_be_used_without_it():
    with pytest.raises(SimulationError, match="install"):
        simulated_npu.custom_op("npu::update(Tensor x) -> Tensor", lambda x: x)
    with pytest.raises(SimulationError, match="this is on cpu"):
        simulated_npu.ledger(torch.ones(1))
    with pytest.raises(AttributeError, match="has no attribute 'regions'"):
        _ = simulated_npu.regions


def test_the_command_hands_on_what_its_process_needs_and_its_exit_code(tmp_path):
    file = tmp_path / "asks.py"
    file.write_text(
        "import os, sys\n"
        "import torch\n"
        "assert os.environ['SCONV_SIM_NPU'] == '1'\n"
        "assert os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] == '0'\n"
        "assert sys.argv[1:] == ['--one', 'two'] and torch.npu.device_count() == 3\n"
        "raise SystemExit(7)\n"
    )
    assert start(["--devices", "3", "--", "python", str(file), "--one", "two"]) == 7


def test_a_pointer_that_the_host_follows_ends_the_process():
    """On the device it is an address of another memory; here it must not seem to work."""
    code = (
        "import ctypes, torch; x = torch.ones(3, device='npu'); print('made', flush=True);"
        "ctypes.string_at(x.data_ptr(), 4); print('read')"
    )
    done = in_child("-c", code)
    assert done.returncode < 0
    assert done.stdout == "made\n"


def test_a_command_must_be_named(capsys):
    with pytest.raises(SystemExit) as stopped:
        start(["--"])
    assert stopped.value.code == 2
    assert "name a command" in capsys.readouterr().err


def test_a_device_that_cannot_be_had_is_one_line(monkeypatch, capsys):
    def refuse(count):
        raise SimulationError("made for another torch")

    monkeypatch.setattr(installing, "install", refuse)
    with pytest.raises(SystemExit) as stopped:
        child._main("2", "-c", "pass")
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "sconv_contract.simulated_npu: made for another torch\n"


def verify(*arguments: str) -> int:
    return main(["verify", *arguments])


def test_verify_starts_a_process_with_the_device(monkeypatch):
    started = []
    monkeypatch.setattr(for_suite, "run", lambda python: started.append(python) or 5)
    asked = ["--behaviour", "cpu", "--simulated", "npu", "--select", "SCV402"]
    assert verify(*asked) == 5
    assert started == [["-m", "sconv", "verify", *asked]]


def test_verify_refuses_a_backend_of_another_device(monkeypatch, capsys):
    monkeypatch.setattr(settings, "devices", 2)
    assert verify("--behaviour", "cpu", "--simulated", "npu") == 2
    assert "is for 'cpu'; --simulated npu checks backends for 'npu'" in capsys.readouterr().err


def test_a_finding_is_where_the_plugin_asked_and_not_in_the_device():
    with pytest.raises(SimulationError) as caught:
        simulated_npu.ledger(torch.ones(1))
    assert Path(caught.traceback[-1].path).name == "memory.py"
    assert Path(place_of(caught).path) == Path(__file__)
    with pytest.raises(IndexError) as caught:
        [].pop()
    assert place_of(caught).lineno == caught.traceback[-1].lineno


@pytest.mark.parametrize(
    "asked", [["--simulated", "npu"], ["--behaviour", "x", "--simulated", "npu", "--on-hardware"]]
)
def test_simulated_goes_with_behaviour(asked, capsys):
    with pytest.raises(SystemExit) as stopped:
        verify(*asked)
    assert stopped.value.code == 2
    assert "--simulated goes with --behaviour" in capsys.readouterr().err


def test_the_summary_says_that_it_was_a_simulated_device(monkeypatch, capsys):
    """The suite itself runs there in the tests of a backend for npu."""
    made = BackendInfo("made", "npu", (1, 0), "a:b", lambda: Available(1))

    def run_behaviour(name, *, subjects, **rest):
        return Report(target=name, rules=["SCV402"], findings=[], subjects=list(subjects))

    monkeypatch.setattr(settings, "devices", 2)
    monkeypatch.setattr(simulated, "selected", lambda name: made)
    monkeypatch.setattr(cli, "locate", lambda name: types.SimpleNamespace(pyproject=None))
    monkeypatch.setattr(cli, "run_behaviour", run_behaviour)
    assert verify("--behaviour", "made", "--simulated", "npu") == 0
    text = capsys.readouterr().out
    assert "checked on a simulated device with the operators of torch_npu 2.13.0" in text
    assert "hardware" not in text
