"""Modules by their dotted names: found as the interpreter would, parsed, and never imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import griffe

from .files import SourceError, parse, read
from .scopes import Block
from .symbols import Source

__all__ = ["Modules", "is_opaque"]

#: Packages whose source is never read: large, and known to define no hooks.
_OPAQUE: Final = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "triton", "pluggy"}

_COMPILED: Final = frozenset({".pyd", ".pyx", ".so"})


class Modules:
    """The modules of one target, and of what it builds on as far as needed.

    Attributes:
        roots: Folders in which top-level packages are looked up first.
        unreadable: Files that could not be read, and why.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        """Look top-level packages up in these folders first, then among the installed ones."""
        self.roots = list(roots)
        self.unreadable: dict[Path, SourceError] = {}
        self._sources: dict[str, Source | None] = {}

    def source(self, name: str) -> Source | None:
        """Return a module by its dotted name, or None if there is no source of that name."""
        if name not in self._sources:
            self._sources[name] = None
            path = self._file(name)
            if path is not None:
                self._sources[name] = self._read(name, path)
        return self._sources[name]

    def read_file(self, name: str, path: Path) -> Source | None:
        """Return a file as a module, also where another one answers to its name."""
        return self._read(name, path)

    def compiled(self, name: str) -> bool:
        """Whether a module is there as machine code alone, which nobody can read."""
        parent, _, last = name.rpartition(".")
        if not last.isidentifier():
            return False  # from an entry point: "../../etc/passwd" is not a module's name
        folders = [self._folder(parent)] if parent else self.roots
        return any(
            file.suffix in _COMPILED and file.name.partition(".")[0] == last
            for folder in folders
            if folder is not None
            for file in folder.glob(f"{last}.*")
        )

    def _file(self, name: str) -> Path | None:
        parent, _, last = name.rpartition(".")
        if parent:
            folder = self._folder(parent)
            return None if folder is None else _module_in(folder, last)
        for root in self.roots:
            path = _module_in(root, name)
            if path is not None:
                return path
        if name in _OPAQUE:
            return None
        try:
            spec = find_spec(name)  # a top-level name: nothing is imported
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        if spec.origin and spec.origin.endswith(".py"):
            return Path(spec.origin)
        places = list(spec.submodule_search_locations or ())
        return Path(places[0]) if places else None

    def _folder(self, name: str) -> Path | None:
        path = self._file(name)
        if path is None or path.is_dir():
            return path
        return path.parent if path.name == "__init__.py" else None

    def _read(self, name: str, path: Path) -> Source | None:
        try:
            raw = b"" if path.is_dir() else read(path)
            tree = parse(raw)
            block = Block(tree.body)
        except SourceError as exc:
            self.unreadable[path] = exc
            return None
        except (OSError, RecursionError) as exc:
            self.unreadable[path] = SourceError(f"cannot be read: {exc}")
            return None
        parent, _, last = name.rpartition(".")
        above = self.source(parent) if parent else None
        file: Path | list[Path] = [path] if path.is_dir() else path
        module = griffe.Module(last, filepath=file, parent=above.module if above else None)
        return Source(name, path, tree, module, raw, block)


def is_opaque(path: str) -> bool:
    """Whether a path leads into a package that is not read and is known to define no hooks."""
    return path.partition(".")[0] in _OPAQUE


def _module_in(folder: Path, name: str) -> Path | None:
    package = folder / name
    for path in (package / "__init__.py", folder / f"{name}.py"):
        # os.path has an answer for a name that is too long for a path, too.
        if os.path.isfile(path):
            return path
    return package if os.path.isdir(package) else None
