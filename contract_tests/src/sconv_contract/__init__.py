"""Checks that an sconv plugin keeps the contract; ``sconv verify`` is the command.

:class:`BackendContract` is the behaviour suite, a class to subclass in a test file. It needs
pytest, hypothesis and torch; the rest of this package needs none of them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .behaviour.suite import BackendContract

__all__ = ["BackendContract"]

_ASSERTING: Final = ("description", "graphs", "modes", "rulings")


def __getattr__(name: str) -> Any:
    if name != "BackendContract":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest

    # So that a failing assertion of the suite shows its values; too late for what is imported.
    asserting = (f"{__name__}.behaviour.{part}" for part in _ASSERTING)
    pytest.register_assert_rewrite(*(module for module in asserting if module not in sys.modules))
    from .behaviour.suite import BackendContract

    return BackendContract
