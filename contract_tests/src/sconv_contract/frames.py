"""One function on the way through recorded code: what its local names are."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from .kinds import HOST
from .methods import Function
from .resolve import ClassRef, Place

__all__ = ["Frame"]


@dataclass
class Frame:
    """A function that is followed.

    Attributes:
        function: Its node.
        place: Where it stands.
        kinds: What each local name is.
        owner: The class that defines it, for super().
        depth: Calls above it.
        result: What it returns, so far.
        methods: Local names that are a method of something: ``first = self.first``.
    """

    function: Function
    place: Place
    kinds: dict[str, str]
    owner: ClassRef | None
    depth: int
    result: str = HOST
    methods: dict[str, ast.Attribute] = field(default_factory=dict)

    @property
    def inside(self) -> Place:
        """The place of its body."""
        return self.place.inside(self.function)
