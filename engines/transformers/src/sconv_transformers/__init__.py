"""Hugging Face models whose convolution state is in an sconv pool.

:func:`attach` works on an unmodified model; ``model.generate`` then behaves as before. Importing
this package needs neither torch nor transformers, so that ``sconv generate --help`` is quick; it
registers the model families that it serves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .families import register_families

if TYPE_CHECKING:
    from .attachment import Attachment, attach, detach
    from .step_runner import Counters

    __version__: str

__all__ = ["Attachment", "Counters", "__version__", "attach", "detach"]

_HOMES = {
    "Attachment": "attachment",
    "Counters": "step_runner",
    "attach": "attachment",
    "detach": "attachment",
}

register_families()


def __getattr__(name: str) -> Any:
    value: Any
    if name == "__version__":
        from importlib.metadata import version

        value = version("sconv-transformers")
    elif name in _HOMES:
        from importlib import import_module

        from .torch_extensions import hide_broken_extensions

        hide_broken_extensions()
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
