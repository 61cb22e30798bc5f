"""Whole engine trees: every definition of a hook against every call of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from sconv_contract.findings import State
from sconv_contract.target import TargetError
from sconv_contract.tree.scan import scan_tree

HOOK = "update_mamba_state_after_mtp_verify"
CALL = f"""
class Worker:
    def verify(self, backend, steps, tracks, track_steps, rows):
        backend.{HOOK}(
            last_correct_step_indices=steps,
            mamba_track_indices=tracks,
            mamba_steps_to_track=track_steps,
            req_pool_indices=rows,
        )
"""
GOOD = (
    "self, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, req_pool_indices"
)
NARROW = "self, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track"
KEEP = "return last_correct_step_indices"
BODY = "return last_correct_step_indices, req_pool_indices"


def method(parameters: str = GOOD, body: str = BODY, before: str = "", head: str = "def") -> str:
    return f"class Npu:\n    {before}{head} {HOOK}({parameters}):\n        {body}\n"


#: The signature mutants of HOOK-3: the file, and the rule that reports it (None = it passes).
MUTANTS = {
    "good": (method(), None),
    "narrow": (method(NARROW, KEEP), "SCV101"),
    "extra_required": (method(GOOD + ", stage"), "SCV102"),
    "positional_only": (method(GOOD + ", /"), "SCV104"),
    "kwargs_to_a_narrow_inner": (
        f"class Npu:\n    def {HOOK}(self, **kwargs):\n        return self._commit(**kwargs)\n\n"
        f"    def _commit({NARROW}):\n        {KEEP}\n",
        "SCV101",
    ),
    "no_self": (method(GOOD.removeprefix("self, ")), "SCV108"),
    "async_def": (method(head="async def"), "SCV107"),
    "yields": (method(body="yield last_correct_step_indices, req_pool_indices"), "SCV107"),
    "property": (method("self", "return 1", before="@property\n    "), "SCV108"),
    "narrow_lambda": (
        f"class Npu:\n    {HOOK} = lambda {NARROW}: last_correct_step_indices\n",
        "SCV101",
    ),
    "alias_to_narrow": (
        f"def commit({NARROW}):\n    {KEEP}\n\n\nclass Npu:\n    {HOOK} = commit\n",
        "SCV101",
    ),
    "set_after_the_class": (
        f"class Npu: ...\n\n\nsetattr(Npu, '{HOOK}', lambda {NARROW}: last_correct_step_indices)\n",
        "SCV206",
    ),
    "one_of_two_branches": (
        "import sys\n\n\nclass Npu:\n    if sys.platform == 'npu':\n"
        f"        def {HOOK}({NARROW}):\n            {KEEP}\n"
        f"    else:\n        def {HOOK}({GOOD}):\n            {BODY}\n",
        "SCV101",
    ),
    "last_is_narrow": (method() + f"\n    def {HOOK}({NARROW}):\n        {KEEP}\n", "SCV101"),
    "only_the_dead_one_is_narrow": (
        method(NARROW, KEEP) + f"\n    def {HOOK}({GOOD}):\n        {BODY}\n",
        None,
    ),
    "set_in_a_tuple": (
        f"class Npu: ...\n\n\nNpu.ready, Npu.{HOOK} = 1, lambda {NARROW}: None\n",
        "SCV206",
    ),
    "deleted_after_the_class": (method() + f"\n\ndel Npu.{HOOK}\n", "SCV206"),
    "declared_for_type_checkers": (method() + f"\n\nnpu = Npu()\nnpu.{HOOK}: object\n", None),
    "keyword_never_looked_up": (
        method("self, **kwargs", "return kwargs['last_correct_step_indices']"),
        "SCV106",
    ),
    "keywords_looked_up": (
        method(
            "self, **kwargs",
            "return kwargs['last_correct_step_indices'], kwargs.get('req_pool_indices')",
        ),
        None,
    ),
    "only_declared": (method(body="..."), None),
    "abstract": (
        "import abc\n\n\n" + method(body="pass", before="@abc.abstractmethod\n    "),
        None,
    ),
    "only_raises": (method(body="raise NotImplementedError"), None),
    "does_nothing": (method(body="pass"), "SCV106"),
    "never_reads": (method(body="del req_pool_indices"), "SCV106"),
    "syntax_error": (method() + "\n    def broken(self:\n", "SCV210"),
    "byte_order_mark": ("\ufeff" + method(), None),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_hook_3_signature_mutants(name, tmp_path):
    text, rule = MUTANTS[name]
    # The folder of the hardware, without __init__.py: the place that sweeps leave out.
    folder = tmp_path / "hardware_backend" / "npu"
    folder.mkdir(parents=True)
    (folder / "backend.py").write_text(text, encoding="utf-8")
    (tmp_path / "worker.py").write_text(CALL)
    report = scan_tree(tmp_path, HOOK)
    assert {one.rule for one in report.findings} == ({rule} if rule else set())
    assert report.clean is (rule is None)


@pytest.mark.parametrize(
    "text",
    [
        f"class Npu:\n    def setup(self):\n        def {HOOK}({GOOD}):\n            {BODY}\n",
        f"def {HOOK}({GOOD}):\n    {BODY}\n",
        f"class Npu:\n    def {HOOK[:-1]}({GOOD}):\n        {BODY}\n",
    ],
    ids=["only_a_nested_function", "only_at_module_level", "misspelt"],
)
def test_hook_3_no_definition_is_a_failure(text, tmp_path):
    (tmp_path / "backend.py").write_text(text)
    (tmp_path / "worker.py").write_text(CALL)
    with pytest.raises(TargetError, match="defines a method"):
        scan_tree(tmp_path, HOOK)


def test_a_finding_names_the_definition_and_the_call(tmp_path):
    (tmp_path / "npu.py").write_text(method(NARROW, KEEP))
    (tmp_path / "worker.py").write_text(CALL)
    (found,) = scan_tree(tmp_path, HOOK).findings
    assert found.path == str(tmp_path / "npu.py")
    assert found.line == 2
    assert f"Npu.{HOOK} lacks the parameter 'req_pool_indices'" in found.message
    assert f"{tmp_path / 'worker.py'}:4" in found.message


def _calling(arguments: str, before: str = "pass") -> str:
    return f"def go(b, x, others):\n    {before}\n    b.{HOOK}({arguments})\n"


@pytest.mark.parametrize(
    ("call", "refused"),
    [
        (_calling("1, 2, 3, 4"), False),
        (_calling("1, 2, 3, 4, 5"), True),
        (_calling("1, 2, 3"), True),
        (_calling("1, 2, 3, req_pool_indices=4"), False),
        (_calling("1, 2, 3, 4, req_pool_indices=4"), True),
        (_calling("1, 2, 3, **others"), False),
        (_calling("1, 2, 3, **{'req_pool_indices': 4}"), False),
        (_calling("1, 2, 3, **{'rows': 4}"), True),
        (_calling("1, 2, 3, **more", "more = dict(req_pool_indices=4)"), False),
        (_calling("1, 2, 3, **more", "more = dict(rows=4)"), True),
        (_calling("1, 2, 3, **more", "more = {}; more['req_pool_indices'] = 4"), False),
        (_calling("1, 2, 3, **more", "more = {}; more['rows'] = 4"), True),
        (_calling("1, 2, 3, **more", "more = {}; more.update({'rows': 4})"), True),
        (_calling("1, 2, 3, **more", "more = {}; more.setdefault('rows', 4)"), True),
        (_calling("1, 2, 3, **more", "more = {}; more |= {'rows': 4}"), True),
        (_calling("1, 2, 3, **more", "more = {'req_pool_indices': 4} | {'rows': 4}"), True),
        (_calling("1, 2, 3, **more", "more = {'rows': 4}; del more['rows']"), True),
        (_calling("1, 2, 3, 4, **more", "more = {'rows': 4}; del more['rows']"), False),
        (_calling("1, 2, 3, 4, **more", "more = {'rows': 4}; more.pop('rows')"), False),
        (_calling("1, 2, 3, 4, **more", "more = {x: 4}"), False),
        (_calling("1, 2, 3, **{**others, 'rows': 4}"), True),
        (_calling("1, 2, 3, **({'rows': 4} if x else {'req_pool_indices': 4})"), True),
        (_calling("1, 2, 3, **(more := {'rows': 4})"), True),
        (_calling("1, 2, 3, **MORE") + "\n\nMORE = {'rows': 4}\n", True),
        (_calling("1, 2, 3, **more", "more = others.copy()"), False),
        (_calling("1, 2, 3, **more", "more = {}\n    if x:\n        more['rows'] = 4"), True),
        (_calling("*others"), False),
        (f"def go(b):\n    commit = b.{HOOK}\n    commit(1, 2, 3, rows=4)\n", True),
        (f"def go(b):\n    commit = b.{HOOK}\n    commit(1, 2, 3, 4)\n", False),
        (
            f"import functools\n\n\ndef go(b):\n    return functools.partial(b.{HOOK}, rows=4)\n",
            True,
        ),
        (f"import functools\n\n\ndef go(b):\n    return functools.partial(b.{HOOK}, 1)\n", False),
        (f"class Sub:\n    def go(self):\n        Npu.{HOOK}(self, 1, 2, 3, 4)\n", False),
        (f"class Sub:\n    def go(self):\n        Npu.{HOOK}(self, 1, 2, 3)\n", True),
        (f"def go(b):\n    getattr(b, '{HOOK}')(1, 2, 3)\n", True),
    ],
)
def test_calls_are_read_through_dictionaries(call, refused, tmp_path):
    (tmp_path / "npu.py").write_text(method())
    (tmp_path / "worker.py").write_text(call)
    assert scan_tree(tmp_path, HOOK).clean is not refused


def test_forwarding_wrappers_pass(tmp_path):
    """A wrapper that hands everything to another object's hook takes every call."""
    (tmp_path / "wrapper.py").write_text(
        f"class Wrapper:\n    def {HOOK}(self, *args, **kwargs):\n"
        f"        return self.inner.{HOOK}(*args, **kwargs)\n"
    )
    (tmp_path / "npu.py").write_text(method())
    (tmp_path / "worker.py").write_text(CALL)
    assert scan_tree(tmp_path, HOOK).clean


def test_a_forward_that_cannot_be_followed_is_unverifiable(tmp_path):
    (tmp_path / "wrapper.py").write_text(
        f"class Wrapper:\n    def {HOOK}(self, **kwargs):\n        return self.inner(**kwargs)\n"
    )
    (tmp_path / "worker.py").write_text(CALL)
    report = scan_tree(tmp_path, HOOK)
    assert report.state("SCV101") is State.UNVERIFIABLE
    assert not report.clean


#: The command, and on the other stream what it took. What the kernel reports of a child counts the
#: process that it was forked from, which runs tests and is large; the mark of its image does not.
_MEASURED: Final = """
import json, re, resource, sys
from pathlib import Path
from typing import Final
from sconv.cli.main import main
code = main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
status = Path("/proc/self/status")
peak = used.ru_maxrss
if status.exists():
    peak = re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1]
json.dump({"seconds": used.ru_utime + used.ru_stime, "mib": int(peak) / 1024}, sys.stderr)
raise SystemExit(code)
"""


def test_four_thousand_files_take_seconds(tmp_path):
    """The speed that is promised, on files as long as an engine's."""
    filler = "".join(f"def f{n}(x):\n    return x * {n} + {n}\n\n\n" for n in range(400))
    for number in range(4000):
        folder = tmp_path / f"part{number // 100}"
        folder.mkdir(exist_ok=True)
        text = filler
        if number % 100 == 0:
            text += method(NARROW if number == 3000 else GOOD, KEEP if number == 3000 else BODY)
        if number % 100 == 1:
            text += CALL
        (folder / f"file{number}.py").write_text(text)
    command = ["verify", "--tree", str(tmp_path), "--hook", HOOK, "--format", "json"]
    process = subprocess.run([sys.executable, "-c", _MEASURED, *command], capture_output=True)
    report, used = json.loads(process.stdout), json.loads(process.stderr)
    assert report["subjects"] == [
        f"40 definitions of {HOOK} in 40 classes",
        "40 calls of it, in 4000 files",
    ]
    assert [Path(one["path"]).name for one in report["findings"]] == ["file3000.py"]
    assert used["seconds"] < 5
    assert used["mib"] < 500
