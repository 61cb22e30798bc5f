"""Every rule of the contract, by id; one module per family."""

from __future__ import annotations

from typing import Final

from . import description, entry, imports, ingraph, reading, signature, wiring
from .rule import Rule

__all__ = ["RULES"]

_EVERY: Final = (
    *signature.RULES,
    *wiring.RULES,
    *entry.RULES,
    *imports.RULES,
    *reading.RULES,
    *description.RULES,
    *ingraph.RULES,
)

#: All rules in the order of their ids.
RULES: Final[dict[str, Rule]] = {rule.id: rule for rule in sorted(_EVERY, key=lambda one: one.id)}
