from __future__ import annotations

import ast
from pathlib import Path

import pytest

import sconv
import sconv.plugin

NEEDS_TORCH = [
    "StateSpec",
    "Stream",
    "ForwardBatch",
    "ForwardMode",
    "ConvStatePool",
    "ExportedState",
    "Backend",
]
NEEDS_TORCH += ["GatedDelta", "ShortConvMetadata", "load_backend", "nn", "reference"]
NEEDS_TORCH += [
    "choose_device",
    "plan",
    "Plan",
    "LayoutPlan",
    "CapturedStep",
    "capture",
    "has_graphs",
]
NEEDS_TORCH += ["FullAttentionBackend", "HybridBackend", "wrap_for_draft_extend", "WindowLayout"]
NEEDS_TORCH += ["align_track_seqlens", "crossing_steps", "decode_track_mask", "verify_step_indices"]


def test_importing_sconv_imports_next_to_nothing(alone):
    code = (
        "import sys; before = set(sys.modules); import sconv; new = set(sys.modules) - before;"
        "print(sorted({name.partition('.')[0] for name in new"
        " if name.partition('.')[0] not in sys.stdlib_module_names}))"
    )
    assert alone.python("-c", code).stdout == "['sconv']\n"


def test_what_describes_a_plugin_needs_no_torch(alone):
    names = sorted(set(sconv.__all__) - set(NEEDS_TORCH))
    code = f"import sconv; [getattr(sconv, name) for name in {names}]; print(sconv.__version__)"
    assert alone.python("-c", code).stdout == "0.0.1\n"


@pytest.mark.parametrize("name", NEEDS_TORCH)
def test_a_missing_torch_says_which_plugin_brings_it(alone, name):
    code = (
        "import sconv\n"
        "try:\n"
        f"    sconv.{name}\n"
        "except ImportError as error:\n"
        "    print(type(error.__cause__).__name__, error.name, error)\n"
    )
    assert alone.python("-c", code).stdout == (
        f"ModuleNotFoundError torch sconv.{name} needs torch, which arrives with a plugin:"
        " pip install sconv-plugin-cpu (or sconv-plugin-cuda)\n"
    )


def test_another_missing_module_is_not_blamed_on_torch(alone):
    alone.module("torch", "import torch_is_torn")
    code = "import sconv; sconv.StateSpec"
    done = alone.python("-c", code, code=1)
    assert "No module named 'torch_is_torn'" in done.stderr
    assert "needs torch" not in done.stderr


@pytest.mark.parametrize("door", [sconv, sconv.plugin])
def test_every_public_name_is_there_and_remembered(door):
    for name in door.__all__:
        value = getattr(door, name)
        assert vars(door)[name] is value
        assert name in dir(door)


@pytest.mark.parametrize("door", [sconv, sconv.plugin])
def test_type_checkers_and_python_find_a_public_name_in_the_same_module(door):
    tree = ast.parse(Path(door.__file__).read_text())
    (typed,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    declared = {
        alias.name: node.module or ""
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    modules = getattr(door, "_MODULES", {})
    lazy = {name: module.rpartition(".")[0] for name, module in modules.items()}
    lazy |= {name: module for module, names in door._HOMES.items() for name in names}
    assert declared == lazy
    assert set(door.__all__) - {"__version__"} == set(lazy)
    assert len(door.__all__) == len(set(door.__all__))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'sconv' has no attribute 'StateSpecs'"):
        sconv.StateSpecs  # noqa: B018
    assert not hasattr(sconv, "_nothing")


def test_plug_10_importing_sconv_looks_at_no_plugin(alone):
    alone.plugin("npu", head="raise SystemExit('imported')")
    assert alone.python("-c", "import sconv; sconv.hookimpl; sconv.BackendInfo").stdout == ""
