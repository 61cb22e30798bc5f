"""Hugging Face models whose convolution state lives in an sconv pool.

:func:`attach` works on an unmodified model; ``model.generate`` then behaves as before. Importing
this package needs neither torch nor transformers, so that ``sconv generate --help`` is quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attachment import Attachment, attach
    from .runner import Counters

__all__ = ["Attachment", "Counters", "attach"]

_HOMES = {"Attachment": "attachment", "attach": "attachment", "Counters": "runner"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from .extensions import hide_broken_extensions

    hide_broken_extensions()
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
