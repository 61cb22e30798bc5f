"""What a rule is: its texts, what it is asked about, and how it finds a breach."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import UnionType
from typing import Any, ClassVar, Generic, TypeVar, get_args

from ..findings import Finding, Severity, Where

__all__ = ["Rule", "Text"]

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Text:
    """What is told of a rule.

    Attributes:
        id: Stable: never given to another rule.
        name: A few words, for tables.
        summary: What is asked, in one sentence.
        fix: What to do.
        why: What happens to those who break it.
        example: Code that breaks it.
        severity: Error, or warning where the breach may be harmless.
    """

    id: str
    name: str
    summary: str
    fix: str
    why: str = ""
    example: str = ""
    severity: Severity = Severity.ERROR


class Rule(Generic[S]):
    """One rule of the static half; a subclass is one rule, and its module is all there is of it.

    The docstring of the class that has the id is its message: a summary, a blank line, and why.

    Attributes:
        id, name, fix, example, severity: As in :class:`Text`.
        scope: The kind of subject (:mod:`.subjects`) that it is asked about.
        foreign: It is told of a class that another distribution defines, too.
        is_question: It says what cannot be seen, and so is never left open itself.
    """

    id: ClassVar[str]
    name: ClassVar[str]
    fix: ClassVar[str]
    example: ClassVar[str]
    severity: ClassVar[Severity] = Severity.ERROR
    scope: ClassVar[type[Any] | UnionType]
    foreign: ClassVar[bool] = False
    is_question: ClassVar[bool] = False

    @cached_property
    def text(self) -> Text:
        """What is told of it."""
        named = next(one for one in type(self).__mro__ if "id" in vars(one))
        summary, _, why = (named.__doc__ or "").partition("\n\n")
        summary, why = " ".join(summary.split()), " ".join(why.split())
        return Text(self.id, self.name, summary, self.fix, why, self.example, self.severity)

    @property
    def scopes(self) -> tuple[type[Any], ...]:
        """The kinds of subject of its scope."""
        return get_args(self.scope) or (self.scope,)

    def check(self, subject: S) -> Iterator[Finding]:
        """Yield what breaks the rule in one subject."""
        raise NotImplementedError

    def found(
        self,
        where: Where,
        message: str,
        *,
        fix: str = "",
        hook: str = "",
        leaves_open: tuple[str, ...] = (),
    ) -> Finding:
        """Return a breach of this rule."""
        return Finding(
            path=str(where.path),
            line=where.line,
            column=where.column,
            rule=self.id,
            message=message,
            fix=fix or self.fix,
            hook=hook,
            severity=self.severity,
            leaves_open=leaves_open,
        )
