"""The documentation runs, its links lead somewhere, and its tables have what the code has.

Python blocks of a page share one namespace and run in order. A block with ``>>>`` runs as a
doctest, any other one as a script. A block that cannot run says so: ``python {.no-run}``.
"""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import sconv
import sconv.engine.registry
import sconv.errors
from sconv.hookspecs import MUST_USE, OPTIONAL_HOOKS, DiscoverySpec, StepSpec

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>.*)$")
_HEADING = re.compile(r"^(#+) +(.+?) *$", re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CELL = re.compile(r"^\| *`([^`]+)`", re.MULTILINE)
#: Pages may wrap a long line, and leave out what differs between machines.
_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A fenced block: its info string, its text, and the line of its fence, counted from 1."""

    info: str
    text: str
    line: int

    @property
    def runs(self) -> bool:
        return self.info.split(" ")[0] == "python" and ".no-run" not in self.info


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page; an open fence is an error."""
    found: list[Block] = []
    opened: tuple[str, int] | None = None
    body: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        fence = _FENCE.match(line)
        if opened is None and fence:
            opened, body = (fence["info"].strip(), number), []
        elif opened is not None and fence and not fence["info"]:
            found.append(Block(opened[0], textwrap.dedent("\n".join(body)) + "\n", opened[1]))
            opened = None
        elif opened is not None:
            body.append(line)
    assert opened is None, f"the block that opens in line {opened and opened[1]} is never closed"
    return found


def prose(text: str) -> str:
    """Return a page without its fenced blocks."""
    inside = False
    lines = []
    for line in text.splitlines():
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            lines.append(line)
    return "\n".join(lines)


def run_page(text: str, name: str) -> None:
    """Run the Python blocks of a page in one namespace."""
    namespace: dict[str, Any] = {"__name__": "page"}
    runner = doctest.DocTestRunner(optionflags=_OPTIONS, verbose=False)
    for block in blocks(text):
        if not block.runs:
            continue
        if ">>>" not in block.text:
            # Blank lines in front give a traceback the page's own line numbers.
            exec(compile("\n" * block.line + block.text, name, "exec"), namespace)
            continue
        test = doctest.DocTestParser().get_doctest(block.text, {}, name, name, block.line)
        test.globs = namespace
        report: list[str] = []
        failed = runner.run(test, out=report.append, clear_globs=False).failed
        assert not failed, "".join(report)


def section(text: str, heading: str) -> str:
    """Return the lines between a heading and the next one, whatever its level."""
    parts = re.split(rf"^#+ +{re.escape(heading)} *$", text, flags=re.MULTILINE)
    assert len(parts) == 2, f"{len(parts) - 1} headings {heading!r}, expected one"
    return re.split(r"^#+ ", parts[1], maxsplit=1, flags=re.MULTILINE)[0]


def first_cells(text: str) -> list[str]:
    """Return the code in the first cell of every table row."""
    return _CELL.findall(text)


def slug(heading: str) -> str:
    """Return the anchor that a heading gets on a code host."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _title(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _hooks(spec: type) -> dict[str, list[str]]:
    return {
        name: list(inspect.signature(function).parameters)[1:]
        for name, function in vars(spec).items()
        if hasattr(function, "sconv_spec")
    }


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page does to this process ends with the page."""
    # Empty is unset to sconv; set, so that what a page puts there is taken back.
    monkeypatch.setenv("SCONV_BACKEND", "")
    monkeypatch.setenv("SCONV_CHECK", "")
    monkeypatch.setattr(sconv.engine.registry, "_SPECS", list(sconv.engine.registry._SPECS))


@pytest.mark.parametrize("page", PAGES, ids=_title)
@pytest.mark.usefixtures("quiet")
def test_the_examples_run(page: Path) -> None:
    text = page.read_text()
    runnable = "".join(block.text for block in blocks(text) if block.runs)
    if "sconv_transformers" in runnable:
        pytest.importorskip("sconv_transformers", reason="the page needs sconv-transformers")
    if "hypothesis" in runnable:
        pytest.importorskip("hypothesis", reason="the page needs hypothesis")
    run_page(text, _title(page))


@pytest.mark.parametrize("page", PAGES, ids=_title)
def test_relative_links_resolve(page: Path) -> None:
    dead = []
    for target in _LINK.findall(prose(page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            dead.append(f"{target}: there is no {file.name}")
        elif anchor:
            found = {slug(text) for _, text in _HEADING.findall(prose(file.read_text()))}
            if anchor not in found:
                dead.append(f"{target}: {file.name} has no such heading")
    assert not dead


def test_the_map_leads_to_every_page() -> None:
    index = DOCS / "index.md"
    linked = {
        (DOCS / target.partition("#")[0]).resolve()
        for target in _LINK.findall(prose(index.read_text()))
    }
    assert sorted(set(DOCS.rglob("*.md")) - linked - {index}) == []


@pytest.mark.parametrize("spec", [StepSpec, DiscoverySpec])
def test_hooks_are_described_with_every_parameter(spec: type) -> None:
    text = (DOCS / "reference/hooks.md").read_text()
    for hook, parameters in _hooks(spec).items():
        part = section(text, f"`{hook}`")
        assert first_cells(part) == parameters, hook
        assert ("Optional." in part) == (hook in OPTIONAL_HOOKS), hook
        for name in MUST_USE.get(hook, ()):
            row = next(line for line in part.splitlines() if line.startswith(f"| `{name}`"))
            assert "Must be read" in row


def test_no_hook_is_described_that_does_not_exist() -> None:
    text = prose((DOCS / "reference/hooks.md").read_text())
    named = [heading.strip("`") for _, heading in _HEADING.findall(text) if heading[0] == "`"]
    assert sorted(named) == sorted(_hooks(StepSpec) | _hooks(DiscoverySpec))


def test_the_metadata_table_has_every_field() -> None:
    text = (DOCS / "reference/step-metadata.md").read_text()
    fields = [field.name for field in dataclasses.fields(sconv.ShortConvMetadata)]
    assert first_cells(section(text, "Fields")) == fields


def test_the_spec_table_has_every_argument() -> None:
    text = (DOCS / "reference/state-spec.md").read_text()
    fields = [field.name for field in dataclasses.fields(sconv.StateSpec) if field.init]
    assert first_cells(section(text, "Arguments")) == fields


def test_the_mode_table_has_every_mode() -> None:
    text = (DOCS / "reference/modes.md").read_text()
    assert first_cells(section(text, "The modes")) == [mode.name for mode in sconv.ForwardMode]


def test_the_error_table_has_every_error_and_its_built_in() -> None:
    text = (DOCS / "reference/errors.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", section(text, "Classes"), re.MULTILINE)
    found = {name: re.findall(r"`(\w+)`", bases) for name, bases in rows}
    assert found == {
        name: [base.__name__ for base in getattr(sconv.errors, name).__bases__]
        for name in sconv.errors.__all__
    }


def test_every_environment_variable_is_described() -> None:
    text = (DOCS / "reference/environment.md").read_text()
    sources = [*ROOT.glob("*/src/**/*.py"), *ROOT.glob("*/*/src/**/*.py")]
    used = {
        name
        for source in sources
        for name in re.findall(r"""["'](SCONV_[A-Z_]+)["']""", source.read_text())
    }
    assert {"SCONV_BACKEND", "SCONV_CHECK"} <= used
    assert set(first_cells(text)) == used


def test_every_option_of_generate_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    generate = pytest.importorskip(
        "sconv_transformers.generate", reason="the command comes with sconv-transformers"
    )
    with pytest.raises(SystemExit):
        generate.main(["--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    part = section((DOCS / "reference/cli.md").read_text(), "sconv generate")
    assert "--prompt" in options
    assert {cell.split(" ")[0] for cell in first_cells(part)} == options - {"--help"}


def test_a_wrong_output_on_a_page_is_an_error() -> None:
    page = "```python\nnumber = 1\n```\n\n```python\n>>> number + 1\n{}\n```\n"
    run_page(page.format(2), "page")
    with pytest.raises(AssertionError, match=r"Expected:\s+3\s+Got:\s+2"):
        run_page(page.format(3), "page")


def test_a_script_that_raises_is_an_error_with_the_line_of_the_page() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_page("words\n\n```python\nzero = 0\n1 / zero\n```\n", "page.md")
    last = caught.traceback[-1]
    assert (str(last.path).endswith("page.md"), last.lineno + 1) == (True, 5)


def test_only_marked_blocks_are_left_out() -> None:
    run_page("```python {.no-run}\n1 / 0\n```\n```text\n>>> 1 / 0\n```\n", "page")
    with pytest.raises(AssertionError, match="never closed"):
        run_page("```python\n1 / 0\n", "page")
