"""SCV210: files that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ..findings import Finding, Where
from .rule import Rule
from .subjects import Unread

__all__ = ["RULES"]


class UnreadableFile(Rule[Unread]):
    """Every Python file of the plugin can be decoded and parsed.

    A file that a check skips is where the fault is.
    """

    id = "SCV210"
    name = "file cannot be read"
    example = "def short_conv(self:  # a syntax error"
    fix = "Correct the file, or verify with the Python version that it is written for."
    scope = Unread

    def check(self, subject: Unread) -> Iterator[Finding]:
        if not subject.problem.is_too_large:
            where = Where(subject.path, subject.problem.line)
            yield self.found(where, f"{subject.path.name} {subject.problem}")


RULES: Final = (UnreadableFile(),)
