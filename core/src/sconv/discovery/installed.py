"""What the installed distributions offer, read from their metadata without importing anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Any, Final, Protocol

from importlib_metadata import distributions

from ..errors import PluginError
from ..messages import did_you_mean, one_line_error
from .moved import moved_hint

__all__ = [
    "Entry",
    "canonical",
    "damaged_metadata",
    "entries",
    "import_attribute",
    "is_reference",
]

_SEPARATORS: Final = re.compile(r"[-_.]+")
_NAME: Final = re.compile(r"^Name:[ \t]*(\S+)", re.MULTILINE)
_VERSION: Final = re.compile(r"^Version:[ \t]*(\S+)", re.MULTILINE)
_REFERENCE: Final = re.compile(r"([\w.]+)\s*:\s*([\w.]+)\s*(\[.*\])?")


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry point and the distribution that declares it.

    Attributes:
        name: Left of the equals sign.
        value: Right of it, ``"module:attr"``.
        distribution: The distribution's name as it spells it.
        version: That distribution's version.
    """

    name: str
    value: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


class _Metadata(Protocol):
    """What is used of a distribution; the class itself differs between finders and releases."""

    @property
    def entry_points(self) -> Iterable[Any]: ...

    def read_text(self, filename: str) -> str | None: ...


def entries(group: str) -> list[Entry]:
    """Return the entry points of a group, in an order that does not depend on ``sys.path``.

    Two metadata folders of one distribution (an editable install beside a wheel, an egg-info in the
    working directory) count once: the first on ``sys.path`` that has metadata, as imports go.
    """
    found: dict[str, list[Entry]] = {}
    for distribution in distributions():
        points = _entry_points(distribution, group)
        identity = _identity(distribution) if points else None
        if identity is not None:
            name, version = identity
            of_this = [Entry(point.name, point.value, name, version) for point in points]
            found.setdefault(canonical(name), of_this)
    return sorted(
        dict.fromkeys(entry for of_one in found.values() for entry in of_one),
        key=lambda entry: (entry.name, canonical(entry.distribution), entry.value),
    )


def damaged_metadata() -> list[str]:
    """Return a line for each distribution whose metadata hides what it offers.

    A broken uninstall leaves a folder without metadata behind, which can hide the valid one from
    other tools and which nothing else reports.
    """
    return sorted(_damages())


def canonical(distribution: str) -> str:
    """Return a normalised name: ``Sconv.NPU`` and ``sconv_npu`` are both ``sconv-npu``."""
    return _SEPARATORS.sub("-", distribution).lower()


def is_reference(value: object) -> bool:
    """Whether a value is a string of the form ``"module:attr"``."""
    return isinstance(value, str) and _REFERENCE.fullmatch(value.strip()) is not None


def import_attribute(reference: str) -> object:
    """Import ``"module:attr"``.

    Raises:
        PluginError: It cannot be; the text is one line that quotes the reference and the cause.
    """
    match = _REFERENCE.fullmatch(reference.strip())
    if match is None:
        raise PluginError(f"{reference!r} is not of the form 'module:attr'")
    module_name, path = match[1], match[2]
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as exc:
        cause = one_line_error(exc) + moved_hint(exc)
        raise PluginError(f"cannot import {reference!r}: {cause}") from exc
    try:
        found: object = reduce(getattr, path.split("."), module)
    except AttributeError as exc:
        hint = did_you_mean(path, vars(module))
        raise PluginError(f"cannot import {reference!r}: {one_line_error(exc)}{hint}") from exc
    return found


def _entry_points(distribution: _Metadata, group: str) -> list[Any]:
    try:
        return [point for point in distribution.entry_points if point.group == group]
    except (OSError, TypeError, ValueError):
        # A file that does not parse must not hide other distributions; damaged_metadata has it.
        return []


def _identity(distribution: _Metadata) -> tuple[str, str] | None:
    # Two searches: parsing a whole e-mail message for each distribution costs ten times that.
    headers = _headers(distribution)
    name = _NAME.search(headers)
    version = _VERSION.search(headers)
    return (name[1], version[1]) if name and version else None


def _headers(distribution: _Metadata) -> str:
    # The empty name is for a legacy egg-info that is a file itself.
    for file in ("METADATA", "PKG-INFO", ""):
        try:
            text = distribution.read_text(file)
        except (OSError, ValueError):
            continue
        if text:
            return text.partition("\n\n")[0]
    return ""


def _damages() -> Iterator[str]:
    for distribution in distributions():
        # Only a folder's path says which of two to remove, and there is no public name for it.
        where = getattr(distribution, "_path", distribution)
        if _identity(distribution) is None:
            yield f"{where} names no distribution: remove it, or reinstall what it belongs to"
        try:
            list(distribution.entry_points)
        except (OSError, TypeError, ValueError) as exc:
            yield f"{where}: its entry points cannot be read: {one_line_error(exc)}"
