"""Which entry points may answer to their name, decided before anything is imported."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from .installed import Entry, canonical

__all__ = ["OWNERS", "RESERVED", "contests", "faults", "qualified"]

#: Names that mean something else wherever a backend's name is given.
RESERVED: Final = frozenset({"", "auto", "none"})

#: Names that belong to one distribution: no other may answer to them by accident.
OWNERS: Final = {
    "ascend": "sconv-plugin-ascend",
    "cpu": "sconv-plugin-cpu",
    "cuda": "sconv-plugin-cuda",
}


def faults(found: Sequence[Entry]) -> dict[Entry, str]:
    """Say which entries cannot be loaded whatever is asked for, from their names alone."""
    refused = {
        entry: f"the name {entry.name!r} is reserved: {entry.distribution} must choose another"
        for entry in found
        if entry.name in RESERVED
    }
    for module, claims in _grouped(found, lambda entry: entry.value.partition(":")[0].strip()):
        owners = _distributions(claims)
        if len(owners) > 1:
            # Only one file can answer to the name, so all but one would get another's code.
            text = f"the module {module!r} is claimed by {' and '.join(owners)}: uninstall one"
            refused.update(dict.fromkeys(claims, text))
    return refused


def contests(found: Sequence[Entry]) -> dict[Entry, str]:
    """Say which entries may not be loaded by their bare name, because another has a claim to it."""
    refused: dict[Entry, str] = {}
    for name, claims in _grouped(found, lambda entry: entry.name):
        owner = OWNERS.get(name)
        rightful = [claim for claim in claims if owner in (None, canonical(claim.distribution))]
        for claim in claims:
            if claim not in rightful:
                refused[claim] = (
                    f"the name {name!r} belongs to {owner}: {claim.distribution} must rename its"
                    f" entry point; until then choose it as {qualified(claim)!r}"
                )
        if len(rightful) > 1:
            refused.update(dict.fromkeys(rightful, _clash(name, rightful)))
    return refused


def qualified(entry: Entry) -> str:
    """Return the name that only this distribution's entry has."""
    return f"{entry.distribution}:{entry.name}"


def _clash(name: str, claims: Sequence[Entry]) -> str:
    who = " and ".join(f"{claim} ({claim.value})" for claim in claims)
    owners = _distributions(claims)
    if len(owners) == 1:
        return f"{owners[0]} declares the name {name!r} twice: {who}"
    choices = " or ".join(repr(qualified(claim)) for claim in claims)
    return (
        f"the name {name!r} is claimed by {who}: choose {choices}, or uninstall one of them"
        f" (pip uninstall {' or '.join(owners)})"
    )


def _grouped(
    found: Sequence[Entry], key: Callable[[Entry], str]
) -> Iterable[tuple[str, list[Entry]]]:
    groups: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in found:
        groups[key(entry)].append(entry)
    return groups.items()


def _distributions(claims: Sequence[Entry]) -> list[str]:
    return list(dict.fromkeys(claim.distribution for claim in claims))
