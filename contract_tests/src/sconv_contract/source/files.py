"""Walking folders and reading Python files as the interpreter would, importing nothing."""

from __future__ import annotations

import ast
import io
import os
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["SourceError", "decode", "parse", "walk"]

#: Folders that hold no source of the project itself. Hardware folders are never left out.
_SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages"})

_BOM: Final = b"\xef\xbb\xbf"


class SourceError(Exception):
    """A file that cannot be read or parsed.

    Attributes:
        line: Where, counted from 1.
        is_too_large: It was not tried, for its size.
    """

    def __init__(self, message: str, line: int = 1, *, is_too_large: bool = False) -> None:
        super().__init__(message)
        self.line, self.is_too_large = line, is_too_large


def walk(root: Path) -> Iterator[Path]:
    """Yield every Python file under a folder once, in a fixed order.

    Links to folders are followed; one that leads back to where the walk has been ends there.
    """
    if root.is_file():
        yield root
        return
    seen: set[tuple[int, int]] = set()
    pending = [str(root)]
    while pending:
        folder = pending.pop()
        try:
            status = os.stat(folder)
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        below = []
        for entry in entries:
            name = entry.name
            if _is_folder(entry):
                if not name.startswith(".") and name not in _SKIPPED:
                    below.append(entry.path)
            elif name.endswith((".py", ".pyi")) and os.path.isfile(entry.path):
                yield Path(entry.path)
        pending.extend(reversed(below))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


def decode(raw: bytes) -> str:
    """Decode a source file by its byte-order mark or its coding comment, else as UTF-8.

    Raises:
        SourceError: The encoding is unknown, or the bytes are not in it.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = raw.removeprefix(_BOM).decode(encoding.removesuffix("-sig"))
    except (SyntaxError, UnicodeDecodeError, LookupError) as exc:
        raise SourceError(f"cannot be decoded: {exc}") from exc
    return text


def parse(raw: bytes) -> ast.Module:
    """Parse a source file.

    Raises:
        SourceError: It does not parse with this Python.
    """
    text = decode(raw)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a vendor's odd escapes are not ours to report
            return ast.parse(text)
    except SyntaxError as exc:
        raise SourceError(f"does not parse: {exc.msg}", exc.lineno or 1) from exc
    except (ValueError, RecursionError, MemoryError) as exc:
        raise SourceError(f"does not parse: {exc or type(exc).__name__}") from exc
