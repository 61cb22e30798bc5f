"""From what the user names to the source and the entry points that are verified."""

from __future__ import annotations

import configparser
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from importlib_metadata import PackageNotFoundError, distribution, distributions

from sconv.discovery.installed import canonical, entries
from sconv.discovery.selection import GROUP
from sconv.messages import did_you_mean

from .source.files import walk
from .source.pyproject import TargetError, read_text, read_toml, table

__all__ = ["EntryPoint", "Target", "TargetError", "locate"]


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """One declared backend.

    Attributes:
        name: The backend's name.
        value: ``"module:attr"``.
        path: The file that declares it.
        line: Where.
    """

    name: str
    value: str
    path: Path
    line: int = 1

    @property
    def package(self) -> str:
        """The top-level package of its module, or "" if its value is no reference.

        It becomes part of a path, so that ``/etc/passwd:plugin`` must not pass.
        """
        module = self.value.partition(":")[0].strip()
        return module.partition(".")[0] if _dotted(module) else ""


@dataclass(frozen=True, slots=True)
class Target:
    """What is verified.

    Attributes:
        name: As the user wrote it.
        base: Folder that reported paths are relative to.
        roots: Folders in which its top-level packages and modules lie.
        packages: Files or folders of those.
        entry_points: The backends that it declares.
        declares: It is a distribution, so that it should declare one.
        distribution: Its name, or "".
        pyproject: Its pyproject.toml, or None.
        unread: What may declare more and is not read (``setup.py``), or None.
    """

    name: str
    base: Path
    roots: Sequence[Path]
    packages: Sequence[Path]
    entry_points: Sequence[EntryPoint]
    declares: bool
    distribution: str = ""
    pyproject: Path | None = None
    unread: Path | None = None


def _dotted(module: str) -> bool:
    return all(part.isidentifier() for part in module.split("."))


def locate(name: str) -> Target:
    """Return the target that a folder, a distribution or an entry point names.

    Raises:
        TargetError: It names none of them, or nothing that has source.
    """
    folder = Path(name)
    # os.path has an answer for any text, also for one that is too long for a path.
    if os.path.isdir(name):
        return _of_folder(name, folder.resolve())
    if folder.suffix == ".py" and os.path.isfile(name):
        path = folder.resolve()
        return Target(name, path.parent, [path.parent], [path], [], declares=False)
    known = [entry for entry in entries(GROUP) if entry.name == name]
    try:
        of = distribution(name)
    except (PackageNotFoundError, ValueError):
        if not known:
            raise TargetError(_unknown(name)) from None
        if len(known) > 1:
            who = ", ".join(entry.distribution for entry in known)
            raise TargetError(
                f"the entry point {name!r} is declared by {who}: name one of these distributions"
            ) from None
        return _of_distribution(name, distribution(known[0].distribution), only=name)
    return _of_distribution(name, of)


def _unknown(name: str) -> str:
    choices = [entry.name for entry in entries(GROUP)]
    installed = [found for found in (one.name for one in distributions()) if found]
    return (
        f"{name!r} is no folder, no installed distribution and no entry point of {GROUP}"
        f"{did_you_mean(name, [*choices, *installed])}; installed backends:"
        f" {', '.join(choices) or 'none'}"
    )


def _of_folder(name: str, folder: Path) -> Target:
    project = next(
        (
            above
            for above in (folder, *folder.parents)
            if (above / "pyproject.toml").is_file() or (above / "setup.cfg").is_file()
        ),
        None,
    )
    if project != folder:
        # A part of a project, or plain source: everything below is read, and nothing is declared.
        root = folder
        while (root / "__init__.py").is_file():
            root = root.parent
        packages = [folder] if root != folder else sorted(_tops(folder))
        if not any(True for package in packages for _ in walk(package)):
            raise TargetError(f"{name} holds no Python file")
        pyproject = None if project is None else project / "pyproject.toml"
        return Target(name, folder, [root], packages, [], declares=False, pyproject=pyproject)
    pyproject = folder / "pyproject.toml"
    declared: list[EntryPoint] = []
    distribution_name = ""
    if pyproject.is_file():
        declared, distribution_name = _from_pyproject(pyproject)
    declared += _from_setup_cfg(folder / "setup.cfg")
    setup = folder / "setup.py"
    roots, packages = _layout(folder, [point.package for point in declared])
    return Target(
        name,
        folder,
        roots,
        packages,
        declared,
        declares=True,
        distribution=distribution_name,
        pyproject=pyproject if pyproject.is_file() else None,
        unread=setup if setup.is_file() and not declared else None,
    )


def _layout(folder: Path, names: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Return import roots and packages: src/ if there is one, else wherever the packages lie."""
    roots = [root for root in (folder / "src", folder / "python", folder) if root.is_dir()]
    packages: list[Path] = []
    for name in dict.fromkeys(filter(None, names)):
        place = next((found for root in roots if (found := _package(root, name))), None)
        if place is None:
            place = next((path for path in _search(folder, name)), None)
            if place is not None:
                roots.insert(0, place.parent)
        if place is not None:
            packages.append(place)
    if not packages:
        packages = sorted(_tops(roots[0]))
    return roots, packages


def _package(root: Path, name: str) -> Path | None:
    if os.path.isdir(root / name):
        return root / name
    module = root / f"{name}.py"
    return module if os.path.isfile(module) else None


def _search(folder: Path, name: str) -> Iterator[Path]:
    """Look for a package in a project of unusual layout."""
    for file in walk(folder):
        if file.name == "__init__.py" and file.parent.name == name:
            yield file.parent
        elif file.name == f"{name}.py":
            yield file


def _tops(root: Path) -> Iterator[Path]:
    for path in root.iterdir():
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        if path.suffix == ".py" or (path.is_dir() and next(walk(path), None)):
            yield path


def _from_pyproject(path: Path) -> tuple[list[EntryPoint], str]:
    data, text = read_toml(path), read_text(path)
    project, poetry = table(path, data, "project"), table(path, data, "tool", "poetry")
    points = table(path, project, "entry-points", GROUP) | table(path, poetry, "plugins", GROUP)
    name = project.get("name") or poetry.get("name") or ""
    return [
        EntryPoint(key, str(value), path, _line(text, key, str(value)))
        for key, value in points.items()
    ], str(name)


def _from_setup_cfg(path: Path) -> list[EntryPoint]:
    if not path.is_file():
        return []
    text = read_text(path)
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text)
    except configparser.Error as exc:
        raise TargetError(f"{path}: {exc}") from exc
    lines = parser.get("options.entry_points", GROUP, fallback="").splitlines()
    pairs = [line.partition("=") for line in lines if "=" in line]
    return [
        EntryPoint(key.strip(), value.strip(), path, _line(text, key.strip(), value.strip()))
        for key, _, value in pairs
    ]


def _line(text: str, key: str, value: str) -> int:
    for number, line in enumerate(text.splitlines(), 1):
        if key in line and value in line:
            return number
    return 1


def _of_distribution(name: str, of: Any, only: str | None = None) -> Target:
    found = [
        entry
        for entry in entries(GROUP)
        if canonical(entry.distribution) == canonical(of.name) and only in (None, entry.name)
    ]
    folder = _editable(of)
    if folder is not None and (folder / "pyproject.toml").is_file():
        target = _of_folder(name, folder)
        kept = [point for point in target.entry_points if only in (None, point.name)]
        return Target(
            name,
            folder,
            target.roots,
            target.packages,
            kept,
            declares=True,
            distribution=of.name,
            pyproject=target.pyproject,
            unread=target.unread,
        )
    declared = Path(str(of.locate_file("entry_points.txt")))
    metadata = getattr(of, "_path", None)
    if metadata is not None:
        declared = Path(str(metadata)) / "entry_points.txt"
    points = [EntryPoint(entry.name, entry.value, declared) for entry in found]
    packages = []
    for package in dict.fromkeys(point.package for point in points):
        place = _installed(package)
        if place is not None:
            packages.append(place)
    base = Path(str(of.locate_file("")))
    if points and not packages:
        raise TargetError(f"{of.name} has no Python source here")
    return Target(name, base, [base], packages, points, declares=True, distribution=of.name)


def _editable(of: Any) -> Path | None:
    origin = getattr(of, "origin", None)
    url = getattr(origin, "url", "") or ""
    if not getattr(getattr(origin, "dir_info", None), "editable", False):
        return None
    # Not url2pathname: it is in urllib.request, whose import costs a tenth of the whole check.
    path = Path(unquote(urlparse(url).path))
    return path if path.is_dir() else None


def _installed(package: str) -> Path | None:
    try:
        spec = find_spec(package)  # a top-level name: nothing is imported
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.origin else None
