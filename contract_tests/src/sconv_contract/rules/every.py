"""Both halves in one table: what reports and known findings name."""

from __future__ import annotations

from typing import Final

from ..behaviour.rules import BEHAVIOUR
from . import RULES
from .rule import Rule

__all__ = ["EVERY"]

EVERY: Final[dict[str, Rule]] = RULES | BEHAVIOUR
