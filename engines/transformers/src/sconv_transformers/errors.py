"""The error that the command shows as one line."""

from __future__ import annotations

__all__ = ["UsageError"]


class UsageError(Exception):
    """What was asked for cannot be done here; the text says why in one line."""
