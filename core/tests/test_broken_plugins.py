"""A plugin that cannot be imported, described or made breaks itself alone, and says why."""

from __future__ import annotations

import pytest

import sconv
from sconv.discovery.moved import MOVED
from sconv.discovery.selection import resolve_factory, select
from sconv.errors import BackendUnavailableError, PluginError
from sconv.hookspecs import Available, BackendInfo


def _method(head: str, mark: str = "@hookimpl") -> str:
    return f"class Plugin:\n    {mark}\n    {head}: ...\nplugin = Plugin()"


def test_plug_10_an_attribute_that_does_not_exist(site):
    site.module("skewed", "plugins = None")
    site.distribution("sconv-npu", backends={"npu": "skewed:plugin"})
    assert site.reason("npu") == (
        "cannot import 'skewed:plugin': AttributeError: module 'skewed' has no attribute 'plugin'"
        " (did you mean 'plugins'?)"
    )


def test_plug_10_the_environment_keeps_a_broken_plugin_from_being_imported(alone):
    alone.plugin("npu", head="print('imported')\nraise SystemExit(3)")
    alone.plugin("host")
    code = "import sconv.discovery.selection as d; print(d.select().name)"
    assert alone.python("-c", "import sconv").stdout == ""
    assert alone.python("-c", code).stdout == "imported\nhost\n"
    assert alone.python("-c", code, environment={"SCONV_BACKEND": "host"}).stdout == "host\n"


def test_plug_11_one_that_raises_half_way_leaves_the_others_alone(site):
    site.plugin("a", answer="Available(3)")
    site.plugin("b", contract="(1, 0)", answer="Available(2)")
    site.module(
        "sconv_b_plugin",
        "import sconv\n"
        "class Plugin:\n"
        "    @sconv.hookimpl\n"
        "    def sconv_backend(self):\n"
        "        raise RuntimeError('half way') from OSError('no driver')\n"
        "plugin = Plugin()\n",
    )
    site.plugin("c", answer="Available(1)")
    assert [info.name for info in sconv.backends()] == ["a", "c", "b"]
    assert site.reason("b").startswith(
        "sconv_backend() raised RuntimeError: half way (caused by OSError: no driver)"
    )
    with pytest.raises(PluginError, match="half way") as caught:
        select("b")
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert select().name == "a"


@pytest.mark.parametrize("raised", ["SystemExit(0)", "RecursionError()", "MemoryError()"])
def test_what_an_import_raises_is_caught(site, raised):
    site.plugin("npu", head=f"raise {raised}")
    assert raised.split("(")[0] in site.reason("npu")


def test_an_interrupt_is_not_swallowed(site):
    site.plugin("npu", head="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        sconv.backends()


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("plugin = None", "sconv_backend' is not implemented"),
        ("import sys\nplugin = sys", "is a module"),
        ("plugin = type('Plugin', (), {})", "is a class"),
        (_method("def sconv_backend(self)", mark=""), "is not marked"),
        (_method("def sconv_backen(self)"), "did you mean 'sconv_backend'"),
        (_method("def sconv_backend(self, x)"), "'x' is unknown"),
        (_method("async def sconv_backend(self)"), "is async"),
        (_method("def sconv_backend(self)"), "returned None"),
    ],
)
def test_an_object_that_is_no_plugin(site, source, wanted):
    site.module("odd", f"from sconv import hookimpl\n{source}\n")
    site.distribution("sconv-npu", backends={"npu": "odd:plugin"})
    text = site.reason("npu")
    assert wanted in text
    assert "\n" not in text


@pytest.mark.parametrize("value", ["odd", "odd:", "odd plugin:x", "9:plugin", "odd.missing:plugin"])
def test_an_entry_point_that_leads_nowhere(site, value):
    site.module("odd", "")
    site.distribution("sconv-npu", backends={"npu": value})
    assert value in site.reason("npu")


def test_extras_in_an_entry_point_are_no_part_of_the_reference(site):
    module = site.plugin("npu")
    folder = site.root / "sconv_npu-1.0.dist-info"
    folder.joinpath("entry_points.txt").write_text(f"[sconv.backends]\nnpu = {module}:plugin [x]\n")
    assert sconv.backends()[0].availability == Available(1)


def test_a_name_that_is_not_the_entry_points(site):
    site.plugin("npu", calls_itself="ascend")
    assert "calls itself 'ascend' and its entry point 'npu'" in site.reason("npu")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("contract", "1"),
        ("contract", (1,)),
        ("contract", (1, True)),
        ("contract", [1, 0]),
        ("factory", None),
        ("factory", "npu_kernels"),
        ("factory", "npu_kernels:"),
        ("factory", "npu kernels:create"),
        ("device", ""),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(site, field, value):
    site.plugin("npu", **{field: value})
    shown = {"device": "device_type"}.get(field, field)
    assert f"BackendInfo.{shown} is {value!r}" in site.reason("npu")


@pytest.mark.parametrize(
    ("contract", "upgrade"),
    [((2, 0), "sconv-core"), ((1, 2), "sconv-core"), ((0, 9), "the plugin")],
)
def test_another_contract_is_refused_with_both_numbers(site, contract, upgrade):
    site.plugin("npu", contract=contract)
    dotted = ".".join(map(str, contract))
    wanted = f"it keeps contract {dotted} and sconv-core has 1.1: upgrade {upgrade}"
    assert site.reason("npu") == wanted
    assert sconv.backends()[0].contract == contract
    with pytest.raises(PluginError, match=wanted):
        select("npu")


def test_an_older_minor_contract_is_fine(site, monkeypatch):
    monkeypatch.setattr("sconv.discovery.selection.CONTRACT_VERSION", (1, 3))
    site.plugin("npu", contract=(1, 2))
    assert select("npu").contract == (1, 2)


def test_hook_8_a_description_for_another_release_names_the_contract(site):
    site.module(
        "newer",
        "import sconv\n"
        "class Plugin:\n"
        "    @sconv.hookimpl\n"
        "    def sconv_backend(self):\n"
        "        return sconv.BackendInfo(name='npu', colour='red')\n"
        "plugin = Plugin()\n",
    )
    site.distribution("sconv-npu", backends={"npu": "newer:plugin"})
    assert "unexpected keyword argument 'colour'" in site.reason("npu")
    assert "sconv-core has contract 1.1" in site.reason("npu")


def test_cap_1_a_capability_that_nothing_obeys_is_refused(site):
    """A backend that declared its windows at the front was given the end of the slot."""
    site.module(
        "older",
        "from sconv import Available, BackendInfo, Capabilities, hookimpl\n"
        "class Plugin:\n"
        "    @hookimpl\n"
        "    def sconv_backend(self):\n"
        "        return BackendInfo('npu', 'npu', (1, 0), 'm:f', lambda: Available(1),\n"
        "                           Capabilities(window_at_end=False))\n"
        "plugin = Plugin()\n",
    )
    site.distribution("sconv-npu", backends={"npu": "older:plugin"})
    assert "unexpected keyword argument 'window_at_end'" in site.reason("npu")
    assert "sconv-core has contract 1.1" in site.reason("npu")


def test_dev_2_a_missing_compiled_module_breaks_only_its_own_backend(site):
    site.module("npu_kernels", "import npu_compiled_C\ndef create(): ...")
    site.module("host_kernels", "def create(): return 'made'")
    site.plugin("npu", answer="Available(9)", factory="npu_kernels:create")
    site.plugin("host", factory="host_kernels:create")
    assert resolve_factory(select("host"))() == "made"
    with pytest.raises(PluginError) as caught:
        resolve_factory(select("npu"))
    assert str(caught.value) == (
        "backend 'npu' of sconv-npu 1.0: its factory fails: cannot import 'npu_kernels:create':"
        " ModuleNotFoundError: No module named 'npu_compiled_C'"
    )
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_factory_that_finds_out_that_it_cannot_run_says_so_once(site):
    site.module(
        "late_kernels",
        "from sconv import BackendUnavailableError\n"
        "raise BackendUnavailableError('no driver: run X') from OSError('libdriver.so')\n",
    )
    site.plugin("late", factory="late_kernels:create")
    with pytest.raises(BackendUnavailableError) as caught:
        resolve_factory(select("late"))
    assert str(caught.value) == (
        "backend 'late' of sconv-late 1.0 cannot run here: no driver: run X"
    )
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("factory", "wanted"),
    [
        ("host_kernels", "is 'host_kernels', not a string 'module:attr'"),
        ("host_kernels:creat", "did you mean 'create'"),
        ("host_kernels:number", "is 3, not a callable"),
    ],
)
def test_a_factory_that_is_none(site, factory, wanted):
    site.module("host_kernels", "number = 3\ndef create(): ...")
    site.plugin("host", factory=factory)
    with pytest.raises(PluginError, match=r"'host' of sconv-host 1\.0") as caught:
        resolve_factory(select("host"))
    assert wanted in str(caught.value)
    assert factory in str(caught.value)


def test_a_description_without_an_origin_has_a_name():
    info = BackendInfo("mine", "cpu", (1, 0), "nowhere:create", lambda: Available(1))
    with pytest.raises(PluginError, match="backend 'mine' of no distribution"):
        resolve_factory(info)


@pytest.mark.parametrize("module", sorted(MOVED))
def test_an_import_of_what_is_private_now_says_what_to_write(site, module):
    site.plugin("npu", head=f"import {module}")
    assert site.reason("npu").endswith(f"is private now, write: {MOVED[module]}")


@pytest.mark.parametrize("instead", sorted(set(MOVED.values())))
def test_what_to_write_instead_of_a_private_module_works(instead):
    exec(instead.partition(" (")[0], {})
