"""What is going on, on standard error, and only for somebody who watches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["TokenBar", "TokenCounter", "status", "token_bar"]


@contextmanager
def status(text: str) -> Iterator[None]:
    """Show a spinner while the block runs; nothing if standard error is no terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    # As text: a folder may be called what rich takes for markup.
    with console.status(Text(text)):
        yield


class TokenCounter:
    """Takes the number of tokens of every step and shows nothing."""

    def advance(self, tokens: int) -> None:
        """Count ``tokens`` more."""


class TokenBar(TokenCounter):
    """Shows them as a bar."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def advance(self, tokens: int) -> None:
        """Count ``tokens`` more."""
        self._progress.advance(self._task, tokens)


@contextmanager
def token_bar(text: str, total: int) -> Iterator[TokenCounter]:
    """Show a bar over ``total`` tokens while the block runs, under the same condition."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        yield TokenCounter()
        return
    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield TokenBar(progress, progress.add_task(text, total=total))
