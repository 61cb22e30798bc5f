"""SCV206: what the source does not show. Any rule may meet it, and leaves questions open then."""

from __future__ import annotations

from typing import Any, Final

from ..findings import Finding, Where
from .rule import Rule
from .subjects import ClassSubject, Implementation, Recording, Run

__all__ = ["CLASS", "Unverifiable", "question"]

#: What stays unanswered about a class that cannot be followed, recorded code included.
CLASS: Final = (Implementation, ClassSubject, Recording)


class Unverifiable(Rule[Any]):
    """Everything that decides whether the contract is kept can be read from the source.

    A base class, a decorator or a name that cannot be followed may break any rule; what cannot be
    seen is not counted as kept.
    """

    id = "SCV206"
    name = "unverifiable"
    example = 'setattr(Npu, "warmup", build())'
    fix = (
        "Define it with def in a class that can be seen, or install the package that it comes from."
    )
    is_question = True


_TEXT: Final = Unverifiable()


def question(
    run: Run, where: Where, message: str, *scopes: type[Any], fix: str = "", hook: str = ""
) -> Finding:
    """Return a finding that leaves the rules about such subjects open."""
    return _TEXT.found(where, message, fix=fix, hook=hook, leaves_open=run.about(*scopes))
