"""Small pieces of error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["did_you_mean", "kind_of", "one_line", "one_line_error"]


def kind_of(value: object) -> str:
    """Return what something is, by its type: ``"a list"``; ``"None"`` is itself."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def one_line(text: str) -> str:
    """Return the text with every run of whitespace, line breaks too, as one space.

    What is not printable, as a terminal's escape sequences are, is written as Python escapes it.
    """
    line = " ".join(text.split())
    if line.isprintable():
        return line
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii")
        for each in line
    )


def one_line_error(error: BaseException) -> str:
    """Return an exception's type and text in one line, with the first cause of its chain.

    A device library's own error is often three levels down; the top level alone ("loading failed")
    helps nobody.
    """
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    text = _type_and_text(error)
    return text if root is error else f"{text} (caused by {_type_and_text(root)})"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the nearest known word, or ``""``. Case is ignored."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    nearest = get_close_matches(word.lower(), by_lower, n=1)
    return f" (did you mean {by_lower[nearest[0]]!r}?)" if nearest else ""


def _type_and_text(error: BaseException) -> str:
    try:
        text = one_line(str(error))
    except Exception:
        text = "its text cannot be read"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
