"""Walking folders and reading Python files as the interpreter would, importing nothing."""

from __future__ import annotations

import ast
import io
import os
import re
import tokenize
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

__all__ = ["MAX_BYTES", "Mentions", "SourceError", "decode", "parse", "read", "walk"]

#: Folders that hold no source of the project itself. Hardware folders are never left out.
_SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages"})

#: Larger files are generated ones; parsing one takes memory by the gigabyte.
MAX_BYTES: Final = 5_000_000

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


def read(path: Path) -> bytes:
    """Return a file's bytes.

    Raises:
        OSError: It cannot be read.
        SourceError: It is larger than what is checked.
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        text = f"has {size:,} bytes, and files of more than {MAX_BYTES:,} are not read"
        raise SourceError(text, is_too_large=True)
    return path.read_bytes()


class Mentions:
    """The lines of a file on which some of a few words stand.

    A file is large and what is looked for is rare, so that most of a tree need not be visited.
    """

    def __init__(self, raw: bytes, words: Iterable[str]) -> None:
        """Look for the words in a file's bytes."""
        wanted = re.compile(b"|".join(re.escape(word.encode()) for word in words))
        lines = enumerate(raw.splitlines(), 1)
        self._lines = [number for number, line in lines if wanted.search(line)]

    def in_span(self, node: ast.AST) -> bool:
        """Whether a node spans one of the lines, or has no place of its own."""
        first = getattr(node, "lineno", None)
        if first is None:
            return True
        for decorator in getattr(node, "decorator_list", ()):
            first = min(first, decorator.lineno)
        place = bisect_left(self._lines, first)
        last = getattr(node, "end_lineno", None) or first
        return place < len(self._lines) and self._lines[place] <= last


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
