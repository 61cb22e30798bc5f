"""Ties each test of the suite to the rule that it asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from ..rules.behaviour import BEHAVIOUR

__all__ = ["keeps", "rule_of"]

#: A pytest marker would have to be registered by every vendor who is strict about markers.
_ATTRIBUTE: Final = "sconv_rule"

_Test = TypeVar("_Test", bound=Callable[..., Any])


def keeps(rule: str) -> Callable[[_Test], _Test]:
    """Mark a test of the suite with the rule that it belongs to."""
    assert rule in BEHAVIOUR, rule

    def mark(test: _Test) -> _Test:
        setattr(test, _ATTRIBUTE, rule)
        return test

    return mark


def rule_of(test: Callable[..., Any]) -> str:
    """Return the rule that a test belongs to, or "" if it is none of the suite's."""
    return str(getattr(test, _ATTRIBUTE, ""))
