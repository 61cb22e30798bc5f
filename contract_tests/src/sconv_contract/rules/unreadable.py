"""SCV210: files that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ..findings import Finding, Where
from .rule import Rule, Text
from .subjects import Unread

__all__ = ["RULES"]


class UnreadableFile(Rule[Unread]):
    """Files that cannot be decoded or parsed."""

    text = Text(
        "SCV210",
        "file cannot be read",
        "Every Python file of the plugin can be decoded and parsed.",
        why="A file that a check skips is where the fault is.",
        example="def short_conv(self:  # a syntax error",
        fix="Correct the file, or verify with the Python version that it is written for.",
    )
    scope = Unread

    def check(self, subject: Unread) -> Iterator[Finding]:
        """Yield the file, unless it is only too large."""
        if not subject.problem.is_too_large:
            where = Where(subject.path, subject.problem.line)
            yield self.found(where, f"{subject.path.name} {subject.problem}")


RULES: Final = (UnreadableFile(),)
