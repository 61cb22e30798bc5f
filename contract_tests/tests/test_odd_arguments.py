"""No argument of a command, and nothing that it names, ends in a traceback."""

from __future__ import annotations

import pytest

from sconv.cli.main import main

LONG = "x" * 5_000
DEEP = "x/" * 2_500
ODD = (
    "",
    " ",
    ":",
    "-",
    "..:x",
    "../../etc/passwd:plugin",
    "/etc/passwd:plugin",
    "/dev/null",
    "/dev/null/x",
    "nowhere",
    "nowhere/below",
    "dangling",
    "loop",
    "file",
    "bytes.py",
    "é\u202e",
    "\x1b[31m",
    "\udcff",
    "9" * 5_000,
    "-1",
    "nan",
    LONG,
    DEEP,
    f"{DEEP}y.py",
)
COMMANDS = {
    "no command": [],
    "backends": ["backends"],
    "backends --json": ["backends", "--json"],
    "plan --memory": ["plan", "--layers=2", "--stream=k=8", "--memory"],
    "plan --layers": ["plan", "--memory=1GB", "--stream=k=8", "--layers"],
    "plan --stream": ["plan", "--memory=1GB", "--layers=2", "--stream"],
    "plan --kernel-size": ["plan", "--memory=1GB", "--layers=2", "--stream=k=8", "--kernel-size"],
    "plan --draft-tokens": ["plan", "--memory=1GB", "--layers=2", "--stream=k=8", "--draft-tokens"],
    "plan --draft-topk": ["plan", "--memory=1GB", "--layers=2", "--stream=k=8", "--draft-topk"],
    "plan --snapshots": ["plan", "--memory=1GB", "--layers=2", "--stream=k=8", "--snapshots"],
    "plan --layout": ["plan", "--memory=1GB", "--layers=2", "--stream=k=8", "--layout"],
    "verify": ["verify"],
    "verify --tree": ["verify", "--hook", "short_conv", "--tree"],
    "verify --hook": ["verify", "--tree", "tree", "--hook"],
    "verify --output": ["verify", "tree", "--output"],
    "verify --select": ["verify", "tree", "--select"],
    "verify --search-path": ["verify", "tree", "--search-path"],
    "verify --format": ["verify", "tree", "--format"],
    "verify --explain": ["verify", "--explain"],
    "verify --behaviour": ["verify", "--behaviour"],
    "verify --on-hardware": ["verify", "--on-hardware"],
    "new-plugin": ["new-plugin", "--device", "npu"],
    "new-plugin --device": ["new-plugin", "x", "--output", "made", "--device"],
    "new-plugin --output": ["new-plugin", "x", "--device", "npu", "--output"],
}
VALUES = (
    *("../../etc/passwd:plugin", "/etc/passwd:plugin", "..:x", ":x", "", ":", "a b:c", ".m:p"),
    *("m:", "m:p.__class__", "**:x", "[:x", f"{LONG}:p", f"m.{LONG}:p", f"m:{LONG}", "~:x"),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory of odd files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dangling").symlink_to("/nowhere/x")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("text")
    (tmp_path / "bytes.py").write_bytes(b"\xff\x00")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "m.py").write_text("x = 1\n")
    return tmp_path


def outcome(capsys, arguments: list[str]) -> tuple[int | str | None, str]:
    """Run the command as the shell would see it: its exit code and what it said of errors."""
    try:
        code = main(arguments)
    except SystemExit as exc:
        code = exc.code
    return code, capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_cli_2_an_odd_argument_is_one_line(folder, capsys, command):
    for odd in ODD:
        code, errors = outcome(capsys, [*COMMANDS[command], odd])
        assert code in (0, 1, 2), (odd[:40], code)
        assert "Traceback" not in errors, odd[:40]
        assert "\x1b" not in errors, odd[:40]
        if code == 2:
            # argparse prints the usage before its line.
            said = [line for line in errors.splitlines() if line.startswith("sconv")]
            assert len(said) == 1, (odd[:40], errors)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value[:24])
def test_cli_2_an_odd_entry_point_is_a_finding_or_one_line(folder, capsys, value):
    (folder / "tree" / "pyproject.toml").write_text(
        '[project]\nname = "x"\nversion = "1"\n'
        f'[project.entry-points."sconv.backends"]\nx = {value!r}\n'
    )
    code, errors = outcome(capsys, ["verify", "tree"])
    assert (code, errors) == (1, "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verify", LONG], "is no folder"),
        (["verify", ""], "is no folder"),
        (["new-plugin", "x" * 300, "--device", "npu"], "the name has 300 characters"),
        (["new-plugin", "x", "--device", "npu", "--output", "dangling"], "is there already"),
        (["new-plugin", "x", "--device", "npu", "--output", "file/x"], "cannot be written"),
        (["new-plugin", "x", "--device", "npu", "--output", "/proc/x/y"], "cannot be written"),
    ],
)
def test_cli_2_what_cannot_be_is_said_in_one_line(folder, capsys, arguments, said):
    code, errors = outcome(capsys, arguments)
    assert code == 2
    assert said in errors
    assert errors.count("\n") == 1
