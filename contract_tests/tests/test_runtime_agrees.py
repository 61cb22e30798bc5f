"""The check at load and the static check say the same of every plugin of the corpus."""

from __future__ import annotations

import itertools
import sys
import tomllib

import pytest

from sconv import SconvError
from sconv.discovery.selection import resolve_factory, select
from sconv.plugin import check_implementation

_numbers = itertools.count()


@pytest.fixture
def install(monkeypatch):
    """Makes a plugin of the corpus an installed distribution of this process."""

    def install(folder):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        # Core remembers what a version of a plugin said of itself.
        version = f"0.{next(_numbers)}"
        metadata = folder / f"sconv_npu-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Name: {project['name']}\nVersion: {version}\n")
        points = project.get("entry-points", {}).get("sconv.backends", {})
        lines = [f"{name} = {value}" for name, value in points.items()]
        (metadata / "entry_points.txt").write_text("\n".join(["[sconv.backends]", *lines]))
        monkeypatch.syspath_prepend(str(folder))

    yield install
    for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
        del sys.modules[name]


OWN = {"sconv_npu", "npu_common"}


def _refusal(folder) -> str | None:
    """Load a plugin as an engine does, short of building the state; return why it is refused."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    names = list(project.get("entry-points", {}).get("sconv.backends", {"npu": ""}))
    try:
        info = select(names[0])
        factory = resolve_factory(info)
        implementation = factory(spec=None, device=None, pool=None)
        check_implementation(implementation, info)
    except (SconvError, TypeError) as exc:
        return str(exc)
    return None


def test_what_the_static_check_finds_is_refused_at_load(loadable_broken_case, tmp_path, install):
    case = loadable_broken_case
    install(case.unpack(tmp_path))
    refusal = _refusal(tmp_path)
    assert (refusal is not None) is (case.runtime == "refused"), refusal


def test_what_the_static_check_passes_is_accepted_at_load(loadable_good_case, tmp_path, install):
    install(loadable_good_case.unpack(tmp_path))
    assert _refusal(tmp_path) is None


def test_the_few_disagreements_are_known(corpus):
    """What loads although the static check reports it: what source does not show, and what a value
    is asked for, which bytecode tells too little of; private modules, as long as they are there."""
    broken, _ = corpus
    accepted = {case.name: case.rule for case in broken if case.runtime == "accepted"}
    assert accepted == {
        "asked_for_its_length": "SCV106",
        "asked_for_its_shape": "SCV106",
        "asked_if_it_is_none": "SCV106",
        "class_that_is_computed": "SCV206",
        "factory_that_looks_a_class_up": "SCV206",
        "factory_that_a_module_computes": "SCV206",
        "plugin_that_a_module_computes": "SCV206",
        "private_import": "SCV214",
        "private_module_by_its_path": "SCV214",
    }
