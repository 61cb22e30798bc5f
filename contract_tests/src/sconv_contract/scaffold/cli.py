"""``sconv new-plugin NAME --device TYPE``."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from sconv.cli.terminal import CommandParser
from sconv.discovery.name_conflicts import OWNERS, RESERVED
from sconv.plugin import one_line_error

from . import write_plugin

__all__ = ["new_plugin"]

_NAME: Final = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")

#: A file system's names have 255 bytes, and the plugin's is part of longer ones.
_LONGEST: Final = 64


def new_plugin(argv: Sequence[str]) -> int:
    """Run ``sconv new-plugin``: 0 written, 2 refused."""
    parser = CommandParser(
        prog="sconv new-plugin",
        description="Write a plugin package. It installs, is found, and passes sconv verify and the"
        " behaviour suite at once, on the host; its README lists what to replace.",
    )
    parser.add_argument("name", help="the backend's name, such as npu")
    parser.add_argument("--device", required=True, help="torch's name of the device, such as npu")
    parser.add_argument("--output", metavar="DIR", help="default: ./sconv-plugin-NAME")
    options = parser.parse_args(argv)
    folder = Path(options.output or f"sconv-plugin-{options.name}")
    problem = _problem(options.name, options.device, folder)
    if problem is not None:
        print(f"sconv new-plugin: {problem}", file=sys.stderr)
        return 2
    try:
        written = write_plugin(options.name, options.device, folder)
    except OSError as exc:
        print(f"sconv new-plugin: it cannot be written: {one_line_error(exc)}", file=sys.stderr)
        return 2
    for path in written:
        print(path)
    print(f"\nnext: cd {folder} && pip install -e '.[test]' && sconv verify . && less README.md")
    return 0


def _problem(name: str, device: str, folder: Path) -> str | None:
    if name[:1].isdigit():
        return (
            f"the name {name!r} starts with a digit: it becomes a module, so start it with a letter"
        )
    if len(name) > _LONGEST:
        return f"the name has {len(name)} characters: give one of {_LONGEST} at most"
    if not _NAME.fullmatch(name):
        return f"the name {name!r} is not made of lower-case letters, digits and single dashes"
    if name in RESERVED:
        return f"the name {name!r} is reserved"
    if name in OWNERS:
        return f"the name {name!r} belongs to {OWNERS[name]}"
    if not device.isidentifier():
        return f"{device!r} is no torch device type: give its name alone, such as npu"
    # A dangling link is there, too.
    if os.path.lexists(folder) and (not os.path.isdir(folder) or any(folder.iterdir())):
        return f"{folder} is there already: remove it, or give another --output"
    return None
