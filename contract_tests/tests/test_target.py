"""What cannot be checked says so and exits with 2, whatever is wrong with the project."""

from __future__ import annotations

import os

import pytest

from sconv.cli.main import main


@pytest.fixture
def plugin(corpus, tmp_path):
    """A plugin that keeps the contract."""
    (case,) = [case for case in corpus[1] if case.name == "plain"]
    return case.unpack(tmp_path / "plugin")


def verify(*arguments: object) -> int:
    return main(["verify", *map(str, arguments)])


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"\xff\xfe", "cannot be read"),
        (b"[project\n", "pyproject.toml: "),
        (b"project = 3\n", "project is 3, not a table"),
        (b'[project]\nentry-points = "no"\n', "entry-points is 'no', not a table"),
        (
            b'[project.entry-points]\n"sconv.backends" = ["a:b"]\n',
            "entry-points.sconv.backends is ['a:b'], not a table",
        ),
        (b"[tool]\npoetry = 1\n", "tool.poetry is 1, not a table"),
        (b"[tool.sconv]\ncontract = 3\n", "tool.sconv.contract is 3, not a table"),
    ],
)
def test_a_project_file_that_cannot_be_read(plugin, raw, says, capsys):
    (plugin / "pyproject.toml").write_bytes(raw)
    assert verify(plugin) == 2
    assert says in capsys.readouterr().err


def test_a_report_that_cannot_be_written(plugin, tmp_path, capsys):
    assert verify(plugin, "--output", tmp_path / "nowhere" / "report.json") == 2
    assert "the report cannot be written" in capsys.readouterr().err


def test_a_fault_of_the_checker_is_no_finding(plugin, monkeypatch, capsys):
    """Python's exit code for it would be 1, which says that the plugin is broken."""

    def fails(*args, **options):
        raise ZeroDivisionError

    monkeypatch.setattr("sconv_contract.cli.check", fails)
    assert verify(plugin) == 2
    text = capsys.readouterr().err
    assert "ZeroDivisionError" in text
    assert "a fault of sconv-contract" in text


@pytest.mark.parametrize(
    "arguments",
    [["--behaviour", "cpu"], ["--tree", ".", "--hook", "warmup"], ["--no-such-option"]],
)
def test_one_thing_is_verified_at_a_time(plugin, arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        verify(plugin, *arguments)
    assert stopped.value.code == 2
    assert "usage: " in capsys.readouterr().err


def test_links_and_pipes_among_the_source_end(plugin):
    """Links that lead to themselves, to a folder above, and nowhere; and what is no file."""
    package = plugin / "sconv_npu"
    (package / "itself.py").symlink_to("itself.py")
    (package / "itself").symlink_to("itself")
    (package / "above").symlink_to(plugin, target_is_directory=True)
    (package / "nowhere.py").symlink_to(plugin / "nothing.py")
    os.mkfifo(package / "pipe.py")
    assert verify(plugin, "--strict") == 0


@pytest.mark.parametrize("module", ["plugin", "backend"])
def test_a_compiled_module_is_unverifiable(plugin, module, capsys):
    (plugin / "sconv_npu" / f"{module}.py").rename(
        plugin / "sconv_npu" / f"{module}.cpython-311-x86_64-linux-gnu.so"
    )
    assert verify(plugin) == 1
    text = capsys.readouterr().out
    assert f"the module 'sconv_npu.{module}' is compiled, and its source is not here" in text
    assert "unverifiable: SCV211" in text if module == "plugin" else "unverifiable: SCV101" in text
    assert "broken" not in text.partition("rules:")[2].partition("\n")[2]


def test_what_a_factory_makes_is_unverifiable_as_a_whole(plugin, capsys):
    """A class that nobody sees keeps no rule, those on recorded code included."""
    backend = plugin / "sconv_npu" / "backend.py"
    text = backend.read_text()
    assert "    return Npu()\n" in text
    backend.write_text(text.replace("    return Npu()\n", "    return KINDS[device]()\n"))
    assert verify(plugin) == 1
    said = capsys.readouterr().out
    for rule in ("SCV101", "SCV106", "SCV202", "SCV207", "SCV301", "SCV304"):
        assert f"unverifiable: {rule} " in said
