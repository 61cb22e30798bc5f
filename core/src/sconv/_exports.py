"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    door: str,
    homes: Mapping[str, Sequence[str]],
    modules: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a module whose names are defined elsewhere.

    Args:
        door: Name of the module.
        homes: Names by the module of this package that defines them.
        modules: Names that are modules themselves, by the module of this package that each is.

    Raises:
        TorchUnavailableError: By ``__getattr__``: the name needs torch, and torch is not there.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name in modules:
            value = _import(f"{__package__}.{modules[name]}", wanted=f"{door}.{name}")
        elif name in home_of:
            module = _import(f"{__package__}.{home_of[name]}", wanted=f"{door}.{name}")
            value = getattr(module, name)
        else:
            raise AttributeError(f"module {door!r} has no attribute {name!r}")
        setattr(sys.modules[door], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[door]), *home_of, *modules})

    return get, names


def _import(module: str, *, wanted: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] != "torch":
            raise
        from .errors import TorchUnavailableError

        raise TorchUnavailableError(
            f"{wanted} needs torch, which arrives with a plugin: "
            "pip install sconv-plugin-cpu (or sconv-plugin-cuda)",
            name="torch",
        ) from exc
    except RuntimeError as exc:
        from .discovery.torch_failure import torch_failure
        from .errors import TorchUnavailableError

        reason = torch_failure(exc)
        if reason is None:
            raise
        raise TorchUnavailableError(reason, name="torch") from exc
