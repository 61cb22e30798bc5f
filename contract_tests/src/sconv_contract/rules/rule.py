"""What a rule is; the families of rules are the other modules of this package."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from ..findings import Finding, Severity

__all__ = ["Rule", "Where"]


@dataclass(frozen=True, slots=True)
class Where:
    """A place in a file that a finding points at."""

    path: Path
    line: int = 1
    column: int = 1

    @classmethod
    def of(cls, path: Path, node: ast.AST) -> Where:
        """Return the place of a syntax node."""
        return cls(path, getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of the contract.

    Attributes:
        id: Stable: never given to another rule.
        name: A few words, for tables.
        summary: What is asked, in one sentence.
        why: What happens to those who break it.
        example: Code that breaks it.
        fix: What to do.
        severity: Error, or warning where the breach may be harmless.
    """

    id: str
    name: str
    summary: str
    why: str
    example: str
    fix: str
    severity: Severity = Severity.ERROR

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
