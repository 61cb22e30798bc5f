from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys

import pytest

from sconv.cli import backends as listing
from sconv.cli import main as cli

#: The promise is 0.3 s; a slow machine may take twice as long.
SECONDS = 0.6


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_backends_table(site, capsys, monkeypatch):
    monkeypatch.setattr(listing, "_DEVICES", {})
    site.plugin("cpu", "sconv-plugin-cpu", answer="Available(0)")
    site.plugin("fast", answer="Available(20)", device="npu")
    site.plugin("idle", answer="Unavailable('no device')")
    site.plugin("old", contract=(0, 4))
    site.plugin("torn", head="raise OSError('no driver')")
    code, out, err = run(capsys, "backends")
    assert (code, err) == (0, "")
    # fmt: off
    assert out.splitlines() == [
        "NAME  DISTRIBUTION      VERSION  CONTRACT  DEVICE  STATE",
        "fast  sconv-fast        1.0      1.0       npu     selected (priority 20)",
        "cpu   sconv-plugin-cpu  1.0      1.0       cpu     available (priority 0)",
        "idle  sconv-idle        1.0      1.0       cpu     unavailable: no device",
        "old   sconv-old         1.0      0.4       cpu     broken: it keeps contract 0.4 and"
        " sconv-core has 1.1: upgrade the plugin",
        "torn  sconv-torn        1.0      -         -       broken: cannot import"
        " 'sconv_torn_plugin:plugin': OSError: no driver",
    ]
    # fmt: on


def test_backends_json_says_the_same(site, capsys, monkeypatch):
    monkeypatch.setattr(listing, "_DEVICES", {})
    site.plugin("fast", answer="Available(20)", device="npu")
    site.plugin("torn", head="raise OSError('no driver')")
    code, out, _ = run(capsys, "backends", "--json")
    report = json.loads(out)
    fast, torn = report["backends"]
    capabilities = fast.pop("capabilities")
    assert code == 0
    assert capabilities["window_axes"] == ["time", "channel"]
    assert fast == {
        "name": "fast",
        "distribution": "sconv-fast",
        "version": "1.0",
        "contract": "1.0",
        "device": "npu",
        "state": "selected",
        "priority": 20,
        "reason": None,
    }
    assert (torn["state"], torn["contract"], torn["capabilities"]) == ("broken", None, None)
    assert torn["reason"].endswith("OSError: no driver")
    assert (report["selected"], report["error"], report["notes"]) == ("fast", None, [])


def test_a_backend_that_could_not_be_built_is_not_selected(site, capsys):
    site.plugin("cpu", "sconv-plugin-cpu", answer="Available(0)")
    site.plugin("fast", answer="Available(20)", factory="fast_kernels")
    report = json.loads(run(capsys, "backends", "--json")[1])
    states = {row["name"]: (row["state"], row["reason"]) for row in report["backends"]}
    assert states == {
        "cpu": ("selected", None),
        "fast": ("broken", "BackendInfo.factory is 'fast_kernels', not a string 'module:attr'"),
    }


def test_the_environments_choice_is_the_selected_one(site, capsys, monkeypatch):
    site.plugin("a", answer="Available(9)")
    site.plugin("b")
    monkeypatch.setenv("SCONV_BACKEND", "b")
    assert json.loads(run(capsys, "backends", "--json")[1])["selected"] == "b"
    monkeypatch.setenv("SCONV_BACKEND", "c")
    report = json.loads(run(capsys, "backends", "--json")[1])
    assert report["selected"] is None
    assert "'c', asked for by SCONV_BACKEND, is not installed" in report["error"]


def test_plug_13_only_the_rightful_owner_of_a_name_is_the_selected_one(site, capsys):
    site.plugin("cpu", "sconv-plugin-cpu")
    site.plugin("cpu", "sconv-z")
    report = json.loads(run(capsys, "backends", "--json")[1])
    states = {row["distribution"]: row["state"] for row in report["backends"]}
    assert states == {"sconv-plugin-cpu": "selected", "sconv-z": "broken"}


def test_a_tie_is_shown_and_nothing_is_selected(site, capsys):
    site.plugin("a")
    site.plugin("b")
    _, out, _ = run(capsys, "backends")
    assert "selected (" not in out
    assert out.splitlines()[3].startswith("none selected: backend 'a' of sconv-a 1.0 and backend")


def test_no_backend_at_all(site, capsys, monkeypatch):
    monkeypatch.setattr(listing, "_DEVICES", {})
    assert run(capsys, "backends") == (
        0,
        "none selected: no backend is installed: pip install sconv-plugin-cpu"
        " (or sconv-plugin-cuda)\n",
        "",
    )


@pytest.mark.parametrize(
    ("device", "name"), [("/dev/nvidia0", "cuda"), ("/dev/davinci0", "ascend")]
)
def test_a_device_without_its_plugin_is_pointed_out(site, capsys, monkeypatch, device, name):
    monkeypatch.setattr(os.path, "exists", lambda path: path == device)
    _, out, _ = run(capsys, "backends")
    hint = f"note: {device} is here and no {name!r} backend is: pip install sconv-plugin-{name}"
    assert hint in out.splitlines()
    site.plugin(name, f"sconv-plugin-{name}", head="raise OSError")
    assert hint not in run(capsys, "backends")[1].splitlines()


def test_plug_7_left_over_metadata_is_listed(site, capsys):
    (site.root / "sconv_npu-0.1.dist-info").mkdir()
    _, out, _ = run(capsys, "backends")
    assert f"note: {site.root}/sconv_npu-0.1.dist-info names no distribution: remove it" in out


def test_a_command_of_another_distribution_gets_the_rest_of_the_line(site, capsys):
    site.module("gen", "def main(argv):\n    print(argv)\n    return 7")
    site.distribution("sconv-transformers", commands={"generate": "gen:main"})
    code, out, err = run(capsys, "generate", "--help", "-x", "--json", "y")
    assert (code, out, err) == (7, "['--help', '-x', '--json', 'y']\n", "")


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("generate", "sconv-transformers"),
        ("verify", "sconv-contract"),
        ("new-plugin", "sconv-contract"),
    ],
)
def test_a_known_command_that_is_missing_says_what_to_install(site, capsys, name, package):
    assert run(capsys, name, "--prompt", "x") == (
        2,
        "",
        f"sconv: {name!r} comes with {package}: pip install {package}\n",
    )


def test_an_unknown_command_gets_the_nearest(site, capsys):
    site.distribution("sconv-extra", commands={"measure": "nowhere:main"})
    code, _, err = run(capsys, "mesure")
    assert code == 2
    assert err == "sconv: no command 'mesure' (did you mean 'measure'?); sconv --help lists them\n"


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("raise OSError('no\\n driver')", "cannot import 'gen:main': OSError: no driver"),
        ("", "cannot import 'gen:main': AttributeError: module 'gen' has no attribute 'main'"),
        ("main = 3", "3 is no function"),
    ],
)
def test_a_broken_command_is_one_line(site, capsys, source, wanted):
    site.module("gen", source)
    site.distribution("sconv-transformers", commands={"generate": "gen:main"})
    code, out, err = run(capsys, "generate")
    assert (code, out) == (1, "")
    assert err == f"sconv: the command 'generate' of sconv-transformers 1.0 is broken: {wanted}\n"


def test_a_command_claimed_twice(site, capsys):
    for name in ("sconv-x", "sconv-y"):
        site.distribution(name, commands={"measure": f"{name[-1]}:main"})
    code, _, err = run(capsys, "measure")
    assert code == 1
    assert (
        err
        == "sconv: the command 'measure' is claimed by sconv-x 1.0 and sconv-y 1.0: uninstall one\n"
    )


def test_cores_own_command_cannot_be_taken(site, capsys):
    site.distribution("sconv-x", commands={"backends": "nowhere:main"})
    code, out, _ = run(capsys, "backends", "--json")
    assert code == 0
    assert json.loads(out)["backends"] == []
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "sconv-x" not in capsys.readouterr().out


def test_an_error_of_this_project_ends_a_command_in_one_line(site, capsys):
    site.module("gen", "import sconv\ndef main(argv): raise sconv.SlotError('slot 3 is free')")
    site.distribution("sconv-transformers", commands={"generate": "gen:main"})
    assert run(capsys, "generate") == (1, "", "sconv: slot 3 is free\n")


def test_help_lists_all_commands_and_imports_none(site, capsys):
    site.module("gen", "raise AssertionError('imported')")
    site.distribution("sconv-transformers", commands={"generate": "gen:main"})
    site.distribution("sconv-extra", commands={"measure": "gen:main"})
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("commands:") + 1 :] == [
        "  backends      list the installed backends (sconv-core)",
        "  generate      generate text with a Hugging Face model (sconv-transformers)",
        "  measure       (sconv-extra)",
        "  new-plugin    start a plugin for new hardware"
        " (not installed: pip install sconv-contract)",
        "  plan          say how many requests fit in a memory (sconv-core)",
        "  verify        check that a plugin keeps the contract"
        " (not installed: pip install sconv-contract)",
    ]
    assert run(capsys)[0] == 2


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_listing_is_quick_and_imports_no_torch(alone):
    alone.module("torch", "raise AssertionError('torch was imported')")
    alone.plugin("cpu", "sconv-plugin-cpu", answer="Available(0)")
    for arguments in (["backends"], ["backends", "--json"]):
        taken = []
        for _ in range(3):
            # Processor time: what else the machine does in the meantime is not ours.
            start = _children_seconds()
            done = alone.python("-m", "sconv", *arguments)
            taken.append(_children_seconds() - start)
        assert "sconv-plugin-cpu" in done.stdout
        assert min(taken) < SECONDS
    code = (
        "import sys; from sconv.cli.main import main; main(['backends']);"
        "print({'torch', 'triton', 'torch_npu', 'numpy'} & set(sys.modules))"
    )
    assert alone.python("-c", code).stdout.endswith("set()\n")


def test_version(alone):
    assert alone.python("-m", "sconv", "--version").stdout == "sconv 0.0.1\n"


def _started(alone, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-S", "-B", "-m", "sconv", *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(alone.root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("body", ["print('text')", "while True: print('text')"])
def test_a_broken_pipe_is_quiet(alone, body):
    alone.module("gen", f"def main(argv):\n    input()\n    {body}\n    return 0")
    alone.distribution("sconv-extra", commands={"measure": "gen:main"})
    with _started(alone, "measure") as process:
        process.stdout.close()
        process.stdin.write(b"go\n")
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def _command(alone, body: str) -> None:
    alone.module("gen", f"import sys\ndef main(argv):\n    {body}\n    return 0")
    alone.distribution("sconv-extra", commands={"measure": "gen:main"})


def _shell(alone, line: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of shell in which $SCONV is the command."""
    python = f"{sys.executable} -S -B -m sconv"
    return subprocess.run(
        ["/bin/sh", "-c", line],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(alone.root),
            "SCONV": python,
            **environment,
        },
        capture_output=True,
        check=False,
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no full device")
@pytest.mark.parametrize(
    ("command", "unbuffered"),
    # Unbuffered, argparse keeps to itself that its help cannot be written.
    [("backends", ""), ("--help", ""), ("measure", ""), ("measure", "1")],
)
def test_a_full_disk_is_one_line(alone, command, unbuffered):
    _command(alone, "sys.stdout.write('text')")
    done = _shell(alone, f"$SCONV {command} >/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (
        1,
        b"sconv: OSError: [Errno 28] No space left on device\n",
    )


def test_a_closed_output_is_one_line(alone):
    _command(alone, "sys.stdout.write('text')")
    done = _shell(alone, "$SCONV measure >&-")
    assert done.returncode == 1
    assert done.stderr.startswith(b"sconv: standard output is closed")
    assert done.stderr.count(b"\n") == 1


def test_closed_errors_are_no_error(alone):
    _command(alone, "sys.stderr.write('text')")
    assert _shell(alone, "$SCONV measure 2>&-").returncode == 0


@pytest.mark.parametrize("errors", ["ascii", "ascii:strict", "latin-1"])
def test_what_a_terminal_has_no_letter_for_is_escaped(alone, errors):
    _command(alone, r"print('caf\xe9 \u20ac')")
    done = _shell(alone, "$SCONV measure", PYTHONIOENCODING=errors)
    letter = b"\xe9" if errors == "latin-1" else rb"\xe9"
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"caf" + letter + rb" \u20ac" + b"\n"


def test_an_error_of_the_system_ends_a_command_in_one_line(site, capsys):
    site.module("gen", "def main(argv): open('/no/such/file')")
    site.distribution("sconv-transformers", commands={"generate": "gen:main"})
    code, out, err = run(capsys, "generate")
    assert (code, out) == (1, "")
    assert err == (
        "sconv: FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'\n"
    )


def test_an_interrupt_ends_with_130(alone):
    alone.module(
        "gen",
        "import signal\n"
        "def main(argv):\n"
        # A job in the background of a shell inherits an ignored interrupt.
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "    signal.alarm(60)\n"
        "    print('ready', flush=True)\n"
        "    signal.pause()",
    )
    alone.distribution("sconv-extra", commands={"measure": "gen:main"})
    with _started(alone, "measure") as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b""
    assert process.returncode == 130
