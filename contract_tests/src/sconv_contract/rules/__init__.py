"""Every rule of the contract, by id. The static half's are objects of one module per family."""

from __future__ import annotations

from typing import Any, Final

from . import (
    class_hooks,
    description,
    discovery_imports,
    patched_classes,
    private_imports,
    recorded,
    signature,
    unreadable,
)
from .behaviour import BEHAVIOUR
from .rule import Rule, Text

__all__ = ["RULES", "TEXTS"]

_MODULES: Final = (
    signature,
    class_hooks,
    description,
    discovery_imports,
    patched_classes,
    private_imports,
    unreadable,
    recorded,
)

_STATIC: Final[list[Rule[Any]]] = [rule for module in _MODULES for rule in module.RULES]

#: The static half, in the order of the ids.
RULES: Final[dict[str, Rule[Any]]] = {
    rule.id: rule for rule in sorted(_STATIC, key=lambda rule: rule.id)
}

#: What is told of every rule, those of behaviour included.
TEXTS: Final[dict[str, Text]] = {id_: rule.text for id_, rule in RULES.items()} | BEHAVIOUR
