from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

import sconv
from sconv.discovery.installed import damaged_metadata, entries
from sconv.discovery.selection import resolve_factory, select
from sconv.errors import BackendNotFoundError, BackendUnavailableError, PluginError
from sconv.hookspecs import Available, Broken, Origin, Unavailable


def _only_line(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    (record,) = caplog.records
    assert record.name == "sconv"
    assert "\n" not in record.getMessage()
    return record


def test_backends_come_best_first_with_their_origin(site):
    site.plugin("slow", answer="Available(1)")
    site.plugin("absent", answer="Unavailable('no device')")
    site.plugin("fast", answer="Available(9)")
    site.plugin("bad", head="raise OSError('no driver')")
    infos = sconv.backends()
    assert [info.name for info in infos] == ["fast", "slow", "absent", "bad"]
    assert infos[0].availability == Available(9)
    assert infos[0].origin == Origin("sconv-fast", "1.0", "sconv_fast_plugin:plugin")
    assert infos[2].availability == Unavailable("no device")
    assert infos[3].origin == Origin("sconv-bad", "1.0", "sconv_bad_plugin:plugin")
    assert infos[3].availability == Broken(
        "cannot import 'sconv_bad_plugin:plugin': OSError: no driver"
    )


def test_nothing_installed_says_what_to_install(site):
    assert sconv.backends() == []
    with pytest.raises(BackendNotFoundError, match="pip install sconv-plugin-cpu"):
        select()


def test_auto_takes_the_highest_priority_and_logs_one_line(site, caplog):
    site.plugin("slow", answer="Available(-3)")
    site.plugin("fast", answer="Available(2)")
    with caplog.at_level(logging.INFO, "sconv"):
        assert select().name == "fast"
    record = _only_line(caplog)
    assert record.levelno == logging.INFO
    assert "'fast' of sconv-fast 1.0" in record.getMessage()


def test_auto_mentions_the_unavailable_without_alarm(site, caplog):
    site.plugin("npu", answer="Unavailable('no\\n device')")
    site.plugin("host")
    with caplog.at_level(logging.INFO, "sconv"):
        assert select().name == "host"
    record = _only_line(caplog)
    assert record.levelno == logging.INFO
    assert "npu (sconv-npu 1.0): no device" in record.getMessage()


def test_plug_1_a_broken_plugin_is_a_warning_with_its_cause(site, caplog):
    site.plugin("npu", head="raise ImportError('libfoo.so: cannot open\\nshared object')")
    site.plugin("host")
    with caplog.at_level(logging.INFO, "sconv"):
        assert select().name == "host"
    record = _only_line(caplog)
    assert record.levelno == logging.WARNING
    assert "npu (sconv-npu 1.0)" in record.getMessage()
    assert "ImportError: libfoo.so: cannot open shared object" in record.getMessage()


@pytest.mark.parametrize("by_environment", [False, True])
def test_plug_1_no_fall_back_from_an_explicit_choice(site, monkeypatch, by_environment):
    site.plugin("npu", head="raise ImportError('libfoo.so')")
    site.plugin("host")
    if by_environment:
        monkeypatch.setenv("SCONV_BACKEND", "npu")
    with pytest.raises(PluginError, match=r"'npu' of sconv-npu 1\.0.*ImportError: libfoo\.so") as e:
        select("auto" if by_environment else "npu")
    assert isinstance(e.value.__cause__, ImportError)
    assert ("SCONV_BACKEND" in str(e.value)) is by_environment


def test_nothing_available_lists_every_reason_and_chains_the_first_error(site):
    site.plugin("absent", answer="Unavailable('no device')")
    site.plugin("bad", head="raise OSError('no driver')")
    with pytest.raises(BackendUnavailableError, match=r"no device.*no driver") as caught:
        select()
    assert isinstance(caught.value.__cause__, OSError)


def test_plug_2_a_tie_names_both_distributions(site):
    site.plugin("a", "vendor-a", answer="Available(7)")
    site.plugin("b", "vendor-b", answer="Available(7)")
    site.plugin("host", answer="Available(0)")
    with pytest.raises(PluginError, match=r"vendor-a 1\.0.*vendor-b 1\.0.*same priority"):
        select()
    assert select("b").name == "b"


def test_a_tie_below_the_best_is_no_error(site):
    site.plugin("a", answer="Available(7)")
    site.plugin("b", answer="Available(3)")
    site.plugin("c", answer="Available(3)")
    assert select().name == "a"


@pytest.mark.parametrize(
    "answer", ["True", "None", "Available(True)", "Available(1.5)", "Available", "'yes'"]
)
def test_plug_2_a_probe_that_does_not_answer_is_broken(site, answer):
    site.plugin("npu", answer=answer)
    assert "its probe returned" in site.reason("npu")
    with pytest.raises(PluginError, match=r"Available\(priority\)"):
        select("npu")


def test_a_probe_that_raises_is_broken_and_chained(site):
    site.plugin("npu", answer="1 / 0")
    assert "its probe raised ZeroDivisionError" in site.reason("npu")
    with pytest.raises(PluginError) as caught:
        select("npu")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_probe_is_asked_anew(site):
    site.plugin("npu", head="answers = [Available(1), Unavailable('gone')]", answer="answers.pop()")
    assert [sconv.backends()[0].availability for _ in range(2)] == [
        Unavailable("gone"),
        Available(1),
    ]


def test_plug_2_an_explicit_choice_that_cannot_run_is_an_error(site):
    site.plugin("npu", answer="Unavailable('no device')")
    site.plugin("host")
    with pytest.raises(BackendUnavailableError, match=r"sconv-npu 1\.0.*no device"):
        select("npu")


def test_a_name_goes_before_the_environment(site, monkeypatch):
    site.plugin("a", answer="Available(9)")
    site.plugin("b")
    monkeypatch.setenv("SCONV_BACKEND", "b")
    assert select().name == "b"
    assert select("a").name == "a"


@pytest.mark.parametrize("value", ["", "  ", "auto"])
def test_an_empty_environment_variable_means_auto(site, monkeypatch, value):
    site.plugin("a")
    monkeypatch.setenv("SCONV_BACKEND", value)
    assert select().name == "a"


def test_an_explicit_choice_imports_no_other_plugin(site, monkeypatch):
    other = site.plugin("other")
    mine = site.plugin("mine")
    monkeypatch.setenv("SCONV_BACKEND", "mine")
    assert select().name == "mine"
    assert mine in sys.modules
    assert other not in sys.modules


def test_an_unknown_name_lists_what_is_installed_and_the_nearest(site, monkeypatch):
    site.plugin("hexagon")
    site.plugin("host")
    monkeypatch.setenv("SCONV_BACKEND", "Hexagone")
    with pytest.raises(BackendNotFoundError) as caught:
        select()
    text = str(caught.value)
    assert "'Hexagone', asked for by SCONV_BACKEND, is not installed" in text
    assert "hexagon (sconv-hexagon 1.0), host (sconv-host 1.0)" in text
    assert "did you mean 'hexagon'?" in text


@pytest.mark.parametrize(
    ("name", "package"),
    [("cuda", "sconv-plugin-cuda"), ("ascend", "sconv-plugin-ascend"), ("npu", "-ascend")],
)
def test_a_known_name_says_what_to_install(site, name, package):
    with pytest.raises(BackendNotFoundError, match=f"installed: none.*pip install .*{package}"):
        select(name)


def test_a_device_name_leads_to_the_installed_backend(site):
    site.plugin("ascend", "sconv-plugin-ascend")
    with pytest.raises(BackendNotFoundError, match="did you mean 'ascend'"):
        select("npu")


def test_plug_6_two_metadata_folders_of_one_distribution_count_once(site, tmp_path, monkeypatch):
    module = site.plugin(
        "npu", head="calls = []", answer="calls.append(1) or Available(len(calls))"
    )
    value = {"npu": f"{module}:plugin"}
    site.distribution("Sconv.NPU", backends=value)
    site.distribution("sconv_npu", backends=value, root=tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "elsewhere")])
    (info,) = sconv.backends()
    assert info.availability == Available(1)


def test_the_first_metadata_on_the_path_wins_as_imports_do(site, tmp_path, monkeypatch):
    site.plugin("npu")
    site.distribution("sconv-npu", "0.5", backends={"npu": "old:plugin"}, root=tmp_path / "late")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "late")])
    (entry,) = entries("sconv.backends")
    assert (entry.version, entry.value) == ("1.0", "sconv_npu_plugin:plugin")


def test_plug_7_an_empty_metadata_folder_hides_nothing_and_is_reported(site):
    (site.root / "sconv_npu-0.1.dist-info").mkdir()
    site.plugin("npu")
    assert select("npu").name == "npu"
    (line,) = damaged_metadata()
    assert "sconv_npu-0.1.dist-info" in line
    assert "remove it" in line


def test_plug_7_a_missing_backend_is_an_error_that_shows_the_left_over(site):
    (site.root / "sconv_npu-0.1.dist-info").mkdir()
    with pytest.raises(BackendNotFoundError, match=r"sconv_npu-0\.1\.dist-info"):
        select("npu")


def test_entry_points_that_do_not_parse_hide_nothing_and_are_reported(site):
    broken = site.distribution("sconv-torn")
    broken.joinpath("entry_points.txt").write_bytes(b"[sconv.backends]\nx = \xff\xfe")
    site.plugin("npu")
    assert [info.name for info in sconv.backends()] == ["npu"]
    (line,) = damaged_metadata()
    assert "sconv_torn-1.0.dist-info" in line


def test_only_the_headers_of_metadata_count(site):
    folder = site.distribution("sconv-torn", backends={"torn": "torn:plugin"})
    folder.joinpath("METADATA").write_text("Name: sconv-torn\n\nVersion: 1.0 was fine.\n")
    assert sconv.backends() == []
    (line,) = damaged_metadata()
    assert "sconv_torn-1.0.dist-info names no distribution" in line


@pytest.mark.parametrize("reverse", [False, True])
def test_plug_8_one_name_from_two_distributions(site, tmp_path, monkeypatch, reverse):
    modules = [site.plugin("hexagon", "sconv-x"), site.plugin("hexagon", "sconv-y")]
    other = tmp_path / "other"
    other.mkdir()
    (site.root / "sconv_y-1.0.dist-info").rename(other / "sconv_y-1.0.dist-info")
    path = [str(site.root), str(other)]
    monkeypatch.setattr(sys, "path", [*(path[::-1] if reverse else path), *sys.path[1:]])
    with pytest.raises(PluginError) as caught:
        select("hexagon")
    wanted = (
        "the name 'hexagon' is claimed by"
        " sconv-x 1.0 (sconv_x_plugin:plugin) and sconv-y 1.0 (sconv_y_plugin:plugin):"
        " choose 'sconv-x:hexagon' or 'sconv-y:hexagon', or uninstall one of them"
        " (pip uninstall sconv-x or sconv-y)"
    )
    assert str(caught.value) == f"backend 'hexagon', asked for by name: {wanted}"
    assert [info.availability for info in sconv.backends()] == [Broken(wanted)] * 2
    assert not set(modules) & set(sys.modules)
    chosen = select("sconv-y:hexagon")
    assert str(chosen.origin) == "sconv-y 1.0"


def test_one_distribution_that_declares_a_name_twice(site):
    site.module("m", "")
    folder = site.distribution("sconv-x", backends={"x": "m:a"})
    folder.joinpath("entry_points.txt").write_text("[sconv.backends]\nx = m:a\nx = m:b\n")
    for name in ("x", "sconv-x:x"):
        with pytest.raises(PluginError, match="sconv-x declares the name 'x' twice"):
            select(name)


@pytest.mark.parametrize("name", ["", "auto", "none"])
def test_plug_13_a_reserved_name_is_refused_unseen(site, name):
    module = site.plugin(name, "sconv-x")
    assert f"the name {name!r} is reserved" in site.reason(name)
    assert module not in sys.modules
    site.plugin("host")
    assert select().name == "host"
    with pytest.raises(PluginError, match="is reserved"):
        select(f"sconv-x:{name}")


@pytest.mark.parametrize("name", ["cpu", "cuda", "ascend"])
def test_plug_13_a_core_name_belongs_to_its_distribution(site, name):
    module = site.plugin(name, "sconv-z", answer="Available(99)")
    assert f"belongs to sconv-plugin-{name}" in site.reason(name)
    with pytest.raises(PluginError, match=f"belongs to sconv-plugin-{name}: sconv-z"):
        select(name)
    assert module not in sys.modules
    site.plugin(name, f"sconv-plugin-{name}")
    assert str(select(name).origin) == f"sconv-plugin-{name} 1.0"
    assert str(select().origin) == f"sconv-plugin-{name} 1.0"
    assert str(select(f"sconv-z:{name}").origin) == "sconv-z 1.0"


def test_plug_14_plugins_keep_to_their_own_modules(site):
    for name in ("a", "b"):
        site.module(f"plug_{name}.kernels", f"def create(): return {name!r}")
        site.plugin(name, factory=f"plug_{name}.kernels:create")
    path = list(sys.path)
    made = [resolve_factory(select(name))() for name in ("a", "b")]
    assert made == ["a", "b"]
    assert sys.path == path


def test_plug_14_one_module_name_in_two_distributions_is_refused(site):
    site.module("kernels", "raise AssertionError('imported')")
    site.distribution("sconv-a", backends={"a": "kernels:plugin"})
    site.distribution("sconv-b", backends={"b": "kernels:other"})
    for name in ("a", "b"):
        assert (
            site.reason(name)
            == "the module 'kernels' is claimed by sconv-a and sconv-b: uninstall one"
        )
        with pytest.raises(PluginError, match="claimed by sconv-a and sconv-b"):
            select(name)


_CHILD = """
import multiprocessing, os, pathlib, sys
import sconv

def look(queue, depth, method):
    queue.put([info.name for info in sconv.backends()] + [info.name for info in sconv.backends()])
    if depth:
        context = multiprocessing.get_context(method)
        child = context.Process(target=look, args=(queue, depth - 1, method))
        child.start()
        child.join()
        assert child.exitcode == 0

if __name__ == "__main__":
    method = sys.argv[1]
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    look(queue, 2, method)
    print([queue.get(timeout=30) for _ in range(3)])
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_plug_3_and_4_children_see_what_their_parent_sees_once_each(alone, tmp_path, method):
    record = tmp_path / "pids"
    alone.plugin("npu")
    alone.module(
        "sconv_npu_plugin",
        "import os, sconv\n"
        "class Plugin:\n"
        "    @sconv.hookimpl\n"
        "    def sconv_backend(self):\n"
        f"        with open({str(record)!r}, 'a') as file:\n"
        "            print(os.getpid(), file=file)\n"
        "        return sconv.BackendInfo(name='npu', device_type='cpu', contract=(1, 0),\n"
        "            factory='nowhere:create', probe=lambda: sconv.Available(1))\n"
        "plugin = Plugin()\n",
    )
    script = tmp_path / "look.py"
    script.write_text(_CHILD)
    done = alone.python(str(script), method)
    assert done.stdout == f"{[['npu', 'npu']] * 3}\n"
    pids = Path(record).read_text().split()
    assert len(pids) == len(set(pids)) == 3
