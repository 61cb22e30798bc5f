"""CLI-3: the time that a check takes grows with its source, and not with the square of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sconv_contract.check import check
from sconv_contract.findings import Report, State
from sconv_contract.rules import RULES
from sconv_contract.source.files import MAX_BYTES
from sconv_contract.target import locate
from sconv_contract.tree.scan import scan_tree

HEAD = "from sconv import hookimpl\nfrom sconv.plugin import TorchBackend\n\n\n"
BACKEND = (
    f"{HEAD}class Npu(TorchBackend):\n    @hookimpl\n    def warmup(self):\n        return 0\n\n"
)
HOOK = "update_mamba_state_after_mtp_verify"


def definitions(count: int) -> str:
    return BACKEND + "".join(f"def f{i}(x):\n    return g(x) + {i}\n\n\n" for i in range(count))


def assignments(count: int) -> str:
    return BACKEND + "".join(f"name_{i} = {i}\n" for i in range(count))


def methods(count: int) -> str:
    return BACKEND + "".join(
        f"    def m{i}(self, x):\n        return x + {i}\n\n" for i in range(count)
    )


def chain(count: int) -> str:
    bases = ["TorchBackend", *(f"C{i}" for i in range(count))]
    made = (f"class C{i}({bases[i]}, Mixin):\n    m{i} = {i}\n\n\n" for i in range(count))
    return f"{HEAD}class Mixin:\n    pass\n\n\n{''.join(made)}"


def redefinitions(count: int) -> str:
    again = "".join(f"if FLAGS[{i}]:\n    limit = {i}\n" for i in range(count))
    return f"{BACKEND}\n\nlimit = 0\n{again}"


def plain_classes(count: int) -> str:
    return BACKEND + "".join(f"\n\nclass C{i}:\n    value = {i}\n" for i in range(count))


def conditional_chain(count: int) -> str:
    bases = ["TorchBackend", *(f"C{i}" for i in range(count))]
    made = (
        f"if FLAG:\n\n    class C{i}({bases[i]}):\n        m{i} = 1\n\n"
        f"else:\n\n    class C{i}({bases[i]}):\n        m{i} = 2\n\n\n"
        for i in range(count)
    )
    return HEAD + "".join(made)


def seconds(call: Callable[[], object]) -> float:
    """Return the processor time of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def clean_check(source: str, folder: Path) -> float:
    """Return the time of a check that finds nothing."""
    folder.mkdir(exist_ok=True)
    (folder / "npu.py").write_text(source)
    target = locate(str(folder))
    reports: list[Report] = []
    taken = seconds(lambda: reports.append(check(target)))
    assert reports[0].clean
    return taken


@pytest.mark.parametrize(
    ("source", "count"),
    [
        (definitions, 1500),
        (assignments, 2000),
        (methods, 1000),
        (chain, 120),
        (redefinitions, 1500),
        (plain_classes, 1500),
    ],
)
def test_cli_3_four_times_the_source_takes_about_four_times_as_long(source, count, tmp_path):
    """Reading core, which every check does, is in both. The machine may be busy: twice, at most."""
    core = clean_check(BACKEND, tmp_path)

    def is_linear() -> bool:
        small, large = (clean_check(source(number), tmp_path) for number in (count, 4 * count))
        return large - core < 8 * max(small - core, 0.1)

    assert is_linear() or is_linear()


def test_cli_3_conditional_bases_are_not_followed_in_every_combination(tmp_path):
    """Each class of the chain doubles them."""
    (tmp_path / "npu.py").write_text(conditional_chain(10))
    report = check(locate(str(tmp_path)))
    assert {found.rule for found in report.findings} == {"SCV206"}
    assert "too many combinations" in report.findings[0].message
    assert report.findings[0].message.startswith("class C5: ")
    (tmp_path / "npu.py").write_text(conditional_chain(4))
    assert check(locate(str(tmp_path))).clean


def test_cli_3_a_chain_of_more_classes_than_python_has_frames_is_followed(tmp_path):
    (tmp_path / "npu.py").write_text(chain(1100))
    report = check(locate(str(tmp_path)))
    assert report.clean
    assert "class npu.C1099" in report.subjects


def test_cli_3_a_file_beyond_the_limit_is_one_finding(tmp_path):
    (tmp_path / "npu.py").write_text(BACKEND)
    (tmp_path / "table.py").write_text("#" * (MAX_BYTES + 1))
    report = check(locate(str(tmp_path)))
    (found,) = report.findings
    assert f"files of more than {MAX_BYTES:,} are not read" in found.message
    assert {report.state(rule) for rule in RULES} == {State.UNVERIFIABLE}


@pytest.mark.parametrize("branches", [400, 900, 4000])
def test_cli_3_code_that_nests_too_deeply_is_a_finding(branches, tmp_path):
    lines = [f"elif x == {i}:\n    y = {i}\n" for i in range(branches)]
    (tmp_path / "npu.py").write_text(f"{BACKEND}\n\nx = 0\n{''.join(lines).removeprefix('el')}")
    report = check(locate(str(tmp_path)))
    assert {found.rule for found in report.findings} <= {"SCV206", "SCV210"}
    assert not report.clean


@pytest.mark.parametrize("alike", [True, False])
def test_cli_3_a_tree_where_every_file_defines_and_calls_the_hook(alike, tmp_path):
    taken = []
    for count in (150, 600):
        folder = tmp_path / str(count)
        folder.mkdir()
        for i in range(count):
            passed = "rows" if alike else f"rows_{i}"
            (folder / f"f{i}.py").write_text(
                f"class N{i}:\n    def {HOOK}(self, steps):\n        return steps\n\n"
                f"    def verify(self, x):\n        x.{HOOK}({passed}=1)\n"
            )
        taken.append(seconds(lambda folder=folder: scan_tree(folder, HOOK)))
    assert taken[1] < 8 * taken[0]
