"""Whatever a plugin does when imported or asked, ``sconv backends`` lists it and the others."""

from __future__ import annotations

import json

import pytest

from sconv.cli import main as cli
from sconv.cli import plugin_process
from sconv.cli.plugin_process import PluginProcess
from sconv.discovery.installed import Entry

#: What one plugin does, and what is then said of it.
HARMS = {
    "exits": ("os._exit(0)", "ended its process with exit code 0"),
    "aborts": (
        "(os.write(2, b'x' * 100_000 + b'\\n\\x1b[31mno driver\\n'), os.abort())",
        r"ended its process by SIGABRT: \x1b[31mno driver",
    ),
    "crashes": ("ctypes.string_at(0)", "ended its process by SIGSEGV"),
    "kills": ("os.killpg(0, signal.SIGKILL)", "ended its process by SIGKILL"),
    "interrupts": ("(_ for _ in ()).throw(KeyboardInterrupt())", "KeyboardInterrupt"),
    "escapes": (
        "(_ for _ in ()).throw(OSError('\\x1b]0;owned\\x07 \\u202e\\ud800\\n2'))",
        r"OSError: \x1b]0;owned\x07 \u202e\ud800 2",
    ),
    "forks": ("os.fork()", None),
    "prints": (
        "(os.write(1, b'\\x1b[2J{'), os.write(2, b'\\x1b[2J'), print('\\x1b[2J', flush=True),"
        " os.system('echo loud; echo loud >&2; echo loud >/dev/tty'))",
        None,
    ),
    "closes": ("os.closerange(0, 256)", "ended its process with exit code"),
    "reads": ("sys.stdin.read()", None),
    "stays": ("threading.Thread(target=threading.Event().wait).start()", None),
}
IMPORTS = "import ctypes, os, signal, sys, threading\n"


def _install(site, name: str, statement: str, place: str) -> None:
    head = IMPORTS + (statement if place == "import" else "")
    answer = f"({statement}, Available(2))[1]" if place == "probe" else "Available(2)"
    site.plugin(name, head=head, answer=answer)


def _listed(capfd, *arguments: str) -> tuple[dict[str, dict[str, str]], dict[str, object]]:
    code = cli.main(["backends", "--json", *arguments])
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    report = json.loads(out)
    return {row["name"]: row for row in report["backends"]}, report


@pytest.mark.parametrize("place", ["import", "probe"])
@pytest.mark.parametrize("harm", HARMS)
def test_cli_1_one_plugin_harms_neither_the_list_nor_the_others(site, capfd, harm, place):
    statement, wanted = HARMS[harm]
    site.plugin("a", answer="Available(9)")
    _install(site, "bad", statement, place)
    site.plugin("z", answer="Unavailable('no device')")
    rows, report = _listed(capfd)
    assert [rows[name]["state"] for name in "az"] == ["selected", "unavailable"]
    assert (report["selected"], report["error"]) == ("a", None)
    assert rows["bad"]["distribution"] == "sconv-bad"
    if wanted is None:
        assert rows["bad"]["state"] == "available"
    else:
        assert rows["bad"]["state"] == "broken"
        assert wanted in rows["bad"]["reason"]
    if place == "probe":
        assert cli.main(["backends"]) == 0
        out, err = capfd.readouterr()
        assert (len(out.splitlines()), err) == (4, "")
        assert out.replace("\n", "").isprintable()


def test_cli_1_one_that_hangs_is_named(site, capfd, monkeypatch):
    monkeypatch.setattr(plugin_process, "LIMIT", 3.0)
    site.plugin("a")
    _install(site, "bad", "threading.Event().wait()", "probe")
    site.plugin("z", answer="Available(9)")
    rows, report = _listed(capfd)
    assert report["selected"] == "z"
    assert rows["a"]["state"] == "available"
    assert rows["bad"]["reason"] == "its import or probe gave no answer within 3 s"


def test_cli_1_a_harmful_one_that_is_chosen_is_not_selected(site, capfd, monkeypatch):
    _install(site, "bad", "os._exit(0)", "import")
    site.plugin("z")
    monkeypatch.setenv("SCONV_BACKEND", "bad")
    _, report = _listed(capfd)
    assert report["selected"] is None
    assert report["error"] == (
        "backend 'bad' of sconv-bad 1.0, asked for by SCONV_BACKEND, is broken: its import or probe"
        " ended its process with exit code 0"
    )


def test_cli_1_a_trial_asks_one_plugin_alone(site, capfd):
    _install(site, "bad", "print('{', flush=True); os._exit(3)", "import")
    site.module("kernels", "from sconv.torch_backend.backend import TorchBackend as create")
    site.plugin("z", factory="kernels:create")
    rows, _ = _listed(capfd, "--probe")
    assert rows["z"]["tried"] == {"device": "cpu", "error": None}
    assert rows["bad"]["tried"]["error"] == rows["bad"]["reason"]


def test_cli_1_a_plugin_that_answered_before_does_not_cost_another_its_answer(site):
    site.plugin("bad")
    site.plugin("good", answer="Available(3)")
    good = Entry("good", "sconv_good_plugin:plugin", "sconv-good", "1.0")
    with PluginProcess() as process:
        process.describe(Entry("bad", "sconv_bad_plugin:plugin", "sconv-bad", "1.0"))
        process._child._process.kill()
        assert str(process.describe(good).availability) == "Available(priority=3)"


@pytest.mark.parametrize(
    "fields",
    [
        "capabilities=Capabilities(window_axes=(object(),))",
        "capabilities=Capabilities(kernel_sizes=(2, float('nan')))",
        "contract=(10**5000, 0)",
        "probe=lambda: Available(10**5000)",
        "probe=lambda: type('Odd', (), {'__repr__': lambda self: 1 / 0})()",
        "probe=lambda: Unavailable('\\x1b[2J')",
        "device_type='\\x1b[2J'",
    ],
)
def test_cli_1_odd_answers_are_still_valid_json(site, capfd, fields):
    given = {"contract": "(1, 0)", "device_type": "'cpu'", "probe": "lambda: Available(2)"}
    name, _, value = fields.partition("=")
    options = ", ".join(f"{key}={text}" for key, text in {**given, name: value}.items())
    site.module(
        "odd",
        "from sconv import *\nfrom sconv import hookimpl, Capabilities, Unavailable\n"
        "class Plugin:\n    @hookimpl\n    def sconv_backend(self):\n"
        f"        return BackendInfo('odd', factory='m:f', {options})\nplugin = Plugin()\n",
    )
    site.distribution("sconv-odd", backends={"odd": "odd:plugin"})
    site.plugin("a", answer="Available(9)")
    rows, report = _listed(capfd)
    assert report["selected"] == "a"
    assert "\x1b" not in json.dumps(rows, ensure_ascii=False)


def test_cli_1_escape_sequences_in_metadata_do_not_reach_the_terminal(site, capfd):
    site.distribution("sconv-\x1b[2Jx", "1\x1b[2J", backends={"a\x1b[2J": "nowhere:\x1b[2J"})
    assert cli.main(["backends"]) == 0
    out, _ = capfd.readouterr()
    assert out.replace("\n", "").isprintable()
    assert r"a\x1b[2J" in out
