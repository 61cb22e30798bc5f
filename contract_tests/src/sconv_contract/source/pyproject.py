"""Reading a vendor's pyproject.toml: what it declares, and what is no table where one belongs."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from sconv import SconvError

__all__ = ["TargetError", "read_text", "read_toml", "table"]


class TargetError(SconvError):
    """There is nothing to verify, or it cannot be read."""


def read_text(path: Path) -> str:
    """Return a file's text.

    Raises:
        TargetError: It cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise TargetError(f"{path} cannot be read: {exc}") from exc


def read_toml(path: Path) -> dict[str, Any]:
    """Return a TOML file's content.

    Raises:
        TargetError: It cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as exc:
        raise TargetError(f"{path}: {exc}") from exc


def table(path: Path, data: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Return the table under these keys, empty if it is not there.

    Raises:
        TargetError: Something else is there.
    """
    for number, key in enumerate(keys, 1):
        data = data.get(key, {})
        if not isinstance(data, dict):
            raise TargetError(f"{path}: {'.'.join(keys[:number])} is {data!r}, not a table")
    return data
