"""Source that makes tensors says of what dtype and where: the process's defaults decide nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    ROOT / "core" / "src",
    *(ROOT / "plugins" / name / "src" for name in ("cpu", "cuda", "ascend")),
    # The suite runs under other settings as well.
    ROOT / "contract_tests" / "src" / "sconv_contract" / "behaviour",
]

#: What torch makes a tensor with, of the default dtype or on the default device if none is given.
MAKERS = {
    *(
        "arange",
        "as_tensor",
        "asarray",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "linspace",
        "logspace",
        "ones",
        "rand",
    ),
    *("randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "zeros"),
}

pytestmark = pytest.mark.skipif(not (ROOT / "plugins").exists(), reason="core is alone here")


def unnamed(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line of each call that leaves dtype or device to the process, and which."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        of = node.func.value
        if not (isinstance(of, ast.Name) and of.id == "torch" and node.func.attr in MAKERS):
            continue
        given = {keyword.arg for keyword in node.keywords}
        missing = {"dtype", "device"} - given
        if missing:
            yield node.lineno, f"torch.{node.func.attr} without {' and '.join(sorted(missing))}"


def test_amb_1_and_2_every_tensor_is_made_of_a_stated_dtype_on_a_stated_device():
    files = [file for folder in SOURCES for file in sorted(folder.rglob("*.py"))]
    assert len(files) > 80
    found = [
        f"{file.relative_to(ROOT)}:{line}: {what}"
        for file in files
        for line, what in unnamed(file.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("torch.empty(3, dtype=torch.int64)", 1),
        ("torch.arange(3)", 1),
        ("torch.ones(3, dtype=d, device=e)", 0),
        ("torch.arange(3, dtype=d, out=x)", 1),
        ("x.new_empty(3)", 0),
    ],
)
def test_amb_1_and_2_the_search_finds_what_it_is_for(source, count):
    assert len(list(unnamed(source))) == count
