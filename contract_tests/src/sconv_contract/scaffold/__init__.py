"""Writes a plugin that keeps the contract as it is, from the templates beside this file."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template
from typing import Final

from sconv import CONTRACT_VERSION

__all__ = ["write_plugin"]

_SUFFIX: Final = ".template"


def write_plugin(name: str, device: str, folder: Path) -> list[Path]:
    """Write a plugin and return its files.

    Args:
        name: The backend's name.
        device: torch's name of the device.
        folder: Where to; made if it is not there.
    """
    package = "sconv_" + name.replace("-", "_")
    words = {
        "name": name,
        "device": device,
        "package": package,
        "distribution": f"sconv-plugin-{name}",
        "contract": str(CONTRACT_VERSION),
    }
    written = []
    for relative, text in _templates(files(__package__) / "template", ""):
        path = folder / relative.replace("src/package", f"src/{package}").removesuffix(_SUFFIX)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Template(text).substitute(words), encoding="utf-8")
        written.append(path)
    return sorted(written)


def _templates(folder: Traversable, prefix: str) -> Iterator[tuple[str, str]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _templates(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(_SUFFIX):
            yield f"{prefix}{entry.name}", entry.read_text(encoding="utf-8")
