"""Walking, decoding, and which definitions of a block count."""

from __future__ import annotations

import ast

import pytest

from sconv.hookspecs import StepSpec
from sconv_contract.source.files import SourceError, decode, parse, walk
from sconv_contract.source.hook_specs import DISCOVERY, IN_GRAPH, STEP, tensor_fields
from sconv_contract.source.scopes import live


def test_a_link_that_leads_back_ends(tmp_path):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "one.py").write_text("")
    (inner / "back").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "again").symlink_to(inner, target_is_directory=True)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert [path.name for path in walk(tmp_path)] == ["one.py"]


def test_no_folder_of_hardware_is_left_out(tmp_path):
    for name in ("hardware_backend", "npu", "tests", "vendor", "build"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "backend.py").write_text("")
    assert len(list(walk(tmp_path))) == 5


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"x = 1\n", "x = 1\n"),
        (b"\xef\xbb\xbfx = 1\n", "x = 1\n"),
        (b"# coding: latin-1\nx = '\xe9'\n", "# coding: latin-1\nx = 'é'\n"),
        ("# -*- coding: utf-8 -*-\nx = 'é'\n".encode(), "# -*- coding: utf-8 -*-\nx = 'é'\n"),
        (b"\xef\xbb\xbf# coding: utf-8\nx = 1\n", "# coding: utf-8\nx = 1\n"),
        (b"x = 1\r\n", "x = 1\r\n"),
    ],
)
def test_files_are_decoded_as_python_does(raw, text):
    assert decode(raw) == text
    assert isinstance(parse(raw), ast.Module)


@pytest.mark.parametrize(
    "raw", [b"\xff\xfe", b"# coding: nonsense\n", b"x = (\n", b"x = 1\x00\n", b"def f(:\n"]
)
def test_what_cannot_be_read_is_an_error(raw):
    with pytest.raises(SourceError):
        parse(raw)


@pytest.mark.parametrize(
    ("body", "values", "certain"),
    [
        ("x = 1; x = 2", [2], True),
        ("if a: x = 1\nelse: x = 2", [1, 2], True),
        ("if a: x = 1", [1], False),
        ("x = 0\nif a: x = 1", [1, 0], True),
        ("try: x = 1\nexcept E: x = 2", [1, 2], True),
        ("try: x = 1\nexcept E: raise", [1], True),
        ("try: pass\nexcept E: x = 2", [2], False),
        ("x = 0\ntry: x = 1\nfinally: x = 3", [3], True),
        ("with a: x = 1", [1], True),
        ("for a in b: x = 1", [1], False),
        ("while a: x = 1\nelse: x = 2", [2], True),
        ("match a:\n case 1: x = 1", [1], False),
        ("if TYPE_CHECKING: x = 1\nelse: x = 2", [2], True),
        ("x = 1; del x", None, None),
        ("def f():\n x = 1", None, None),
        ("x: int", None, None),
        ("x: int = 1", [1], True),
        ("y, (x, z) = 1, (2, 3)", None, True),
    ],
)
def test_which_definitions_count(body, values, certain):
    found = live(ast.parse(body).body).get("x")
    if certain is None:
        assert found is None
        return
    assert found is not None
    assert found.certain is certain
    if values is not None:
        assert [ast.literal_eval(one.value) for one in found.definitions] == values


def test_the_in_graph_hooks_are_those_that_the_specs_say():
    documented = {
        name
        for name in STEP
        if "In graph." in (getattr(StepSpec, name).__doc__ or "")
        or "In or out of graph." in (getattr(StepSpec, name).__doc__ or "")
    }
    # A pure read is recorded too: it does nothing.
    assert documented | {"conv_state_metadata"} == IN_GRAPH


def test_the_tables_come_from_core():
    assert STEP["init_graph_state"].parameters == ("max_bs", "max_num_tokens")
    assert STEP["warmup"].required is False
    assert DISCOVERY["sconv_backend"].parameters == ()
    assert {"seq_lens", "slots", "extend_seq_lens"} <= tensor_fields("ForwardBatch")
    assert "forward_mode" not in tensor_fields("ForwardBatch")
    assert {"cache_indices", "cu", "track_conv_indices"} <= tensor_fields("ShortConvMetadata")
