"""Which backends are installed, which of them can run here, and which one is meant.

A backend is an entry point of the group ``sconv.backends``: its name is the backend's name, its
value an object that implements :class:`sconv.hookspecs.DiscoverySpec`. Everything is decided from
names before anything is imported, and nothing is remembered across processes, so that a spawned and
a forked worker see what their parent saw.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import pluggy

from ..errors import BackendNotFoundError, BackendUnavailableError, PluginError
from ..hookspecs import (
    CONTRACT_VERSION,
    PROJECT_NAME,
    Available,
    BackendInfo,
    Broken,
    Capabilities,
    DiscoverySpec,
    Origin,
    Unavailable,
)
from ..messages import did_you_mean, one_line, one_line_error
from .installed import Entry, damaged_metadata, entries, import_attribute, is_reference
from .load_check import check_discovery
from .name_conflicts import OWNERS, contests, faults, qualified

__all__ = [
    "ENVIRONMENT",
    "GROUP",
    "backends",
    "broken",
    "choose",
    "describe",
    "list_backends",
    "resolve_factory",
    "select",
]

GROUP: Final = "sconv.backends"
ENVIRONMENT: Final = "SCONV_BACKEND"

#: What people type who think of torch's device.
_DEVICE_NAMES: Final = {"npu": "ascend", "gpu": "cuda"}

_log: Final = logging.getLogger("sconv")

# What a plugin said of itself, so that asking twice has the effect of asking once. The process id
# is part of the key: a forked worker inherits the dictionary but not the right to its answers.
_described: Final[dict[tuple[int, Entry], BackendInfo]] = {}


def backends() -> list[BackendInfo]:
    """Return every installed backend, best first.

    A plugin that fails is in the list like the others; its ``availability`` says why. Nothing that
    a plugin raises makes this raise.
    """
    return list_backends(describe)


def list_backends(ask: Callable[[Entry], BackendInfo]) -> list[BackendInfo]:
    """Return every installed backend, best first, each described by the function given.

    What is refused for its name alone is not described.
    """
    found = entries(GROUP)
    refusals = contests(found) | faults(found)
    infos = [broken(entry, refusals[entry]) if entry in refusals else ask(entry) for entry in found]
    return sorted(infos, key=_rank)


def select(name: str = "auto", *, device_type: str | None = None) -> BackendInfo:
    """Return the backend to use, and log the choice in one line.

    Args:
        name: A backend's name, or ``"distribution:name"`` where two distributions claim one name,
            or ``"auto"``: the one that ``SCONV_BACKEND`` names, else the available one of the
            highest priority. A name imports no other plugin.
        device_type: Under ``"auto"``, consider only backends that serve this type of device.

    Raises:
        BackendNotFoundError: No such backend is installed, or none at all.
        BackendUnavailableError: The named backend, or every installed one, cannot run here.
        PluginError: The named backend is broken, or two backends have an equal claim.
    """
    chosen, why, skipped = choose(name, device_type=device_type)
    line = f"using {chosen}, {why}"
    if skipped:
        line += "; skipped " + _listing(skipped)
    broken = any(isinstance(info.availability, Broken) for info in skipped)
    _log.log(logging.WARNING if broken else logging.INFO, line)
    return chosen


def choose(
    name: str = "auto",
    *,
    device_type: str | None = None,
    ask: Callable[[Entry], BackendInfo] | None = None,
) -> tuple[BackendInfo, str, list[BackendInfo]]:
    """Do as :func:`select` does, without the log line.

    Args:
        name: As for :func:`select`.
        device_type: As for :func:`select`.
        ask: Describes a plugin; None = :func:`describe`, in this process.

    Returns:
        The backend, why it is the one, and those that were passed over because they cannot run.
    """
    ask = ask or describe
    why = "asked for by name"
    if name == "auto":
        name = os.environ.get(ENVIRONMENT, "").strip() or "auto"
        why = f"asked for by {ENVIRONMENT}"
    if name != "auto":
        return _named(name, why, ask), why, []
    infos = list_backends(ask)
    if device_type is not None:
        infos = [info for info in infos if info.device_type == device_type]
        if not infos:
            raise BackendNotFoundError(f"no installed backend serves {device_type!r} devices")
    best = _best(infos, device_type)
    skipped = [info for info in infos if not isinstance(info.availability, Available)]
    return best, "the available backend of the highest priority", skipped


def describe(entry: Entry) -> BackendInfo:
    """Import a plugin in this process, and ask what it is and whether it can run here.

    Whatever it raises becomes the reason why it is broken.
    """
    try:
        info = _load(entry)
        conflict = _version_conflict(info.contract)
        return replace(info, availability=Broken(conflict) if conflict else _ask(info))
    except PluginError as exc:
        return broken(entry, str(exc), exc.__cause__)
    except Exception as exc:
        # An answer whose repr() raises, a version that is too large to be printed, and the like.
        return broken(entry, one_line_error(exc), exc)


def broken(entry: Entry, reason: str, error: BaseException | None = None) -> BackendInfo:
    """Return what is known of a plugin that did not describe itself, with the reason."""
    availability = Broken(one_line(reason), error)
    return BackendInfo(
        name=entry.name,
        device_type="unknown",
        contract=(0, 0),
        factory="",
        probe=lambda: availability,
        origin=Origin(entry.distribution, entry.version, entry.value),
        availability=availability,
    )


def resolve_factory(info: BackendInfo) -> Callable[..., Any]:
    """Import what ``info.factory`` names.

    Raises:
        PluginError: It cannot be imported or called. The text names the plugin, its distribution
            and the reference, and ends with the cause.
        BackendUnavailableError: Its module found out that it cannot run here.
    """
    try:
        factory = import_attribute(info.factory)
    except PluginError as exc:
        if isinstance(exc.__cause__, BackendUnavailableError):
            text = f"{info} cannot run here: {exc.__cause__}"
            raise BackendUnavailableError(text) from exc.__cause__.__cause__
        raise PluginError(f"{info}: its factory fails: {exc}") from exc.__cause__ or exc
    if not callable(factory):
        raise PluginError(f"{info}: its factory {info.factory!r} is {factory!r}, not a callable")
    return factory


def _named(name: str, why: str, ask: Callable[[Entry], BackendInfo]) -> BackendInfo:
    found = entries(GROUP)
    refusals = contests(found)
    matches = [entry for entry in found if entry.name == name]
    if not matches:
        matches = [entry for entry in found if qualified(entry) == name]
        if len(matches) == 1:
            # A name with its distribution settles a contest.
            refusals = {}
    if not matches:
        raise BackendNotFoundError(_not_found(name, why, found))
    refusals |= faults(found)
    usable = [entry for entry in matches if entry not in refusals]
    if not usable:
        raise PluginError(f"backend {name!r}, {why}: {refusals[matches[0]]}")
    info = ask(usable[0])
    state = info.availability
    if isinstance(state, Broken):
        raise PluginError(f"{info}, {why}, is broken: {state.reason}") from state.error
    if isinstance(state, Unavailable):
        raise BackendUnavailableError(f"{info}, {why}, cannot run here: {state.reason}")
    return info


def _not_found(name: str, why: str, found: Sequence[Entry]) -> str:
    installed = ", ".join(f"{entry.name} ({entry})" for entry in found) or "none"
    text = f"backend {name!r}, {why}, is not installed; installed: {installed}"
    names = [entry.name for entry in found]
    known = _DEVICE_NAMES.get(name, name)
    if known in OWNERS and known not in names:
        text += f"; for {known!r}: pip install {OWNERS[known]}"
    else:
        text += did_you_mean(known, names)
    return "; ".join([text, *damaged_metadata()])


def _best(infos: Sequence[BackendInfo], device_type: str | None) -> BackendInfo:
    if not infos:
        raise BackendNotFoundError(
            f"no backend is installed: pip install {OWNERS['cpu']} (or {OWNERS['cuda']})"
        )
    able = [info for info in infos if isinstance(info.availability, Available)]
    if not able:
        states = [info.availability for info in infos]
        cause = next((state.error for state in states if isinstance(state, Broken)), None)
        serving = "" if device_type is None else f" that serves {device_type!r} devices"
        raise BackendUnavailableError(
            f"no installed backend{serving} can run here: {_listing(infos)}"
        ) from cause
    if len(able) > 1 and able[0].availability == able[1].availability:
        raise PluginError(
            f"{able[0]} and {able[1]} have the same priority: name one, by name= or {ENVIRONMENT},"
            " or uninstall the other"
        )
    return able[0]


def _load(entry: Entry) -> BackendInfo:
    """Import a plugin and have it describe itself; a PluginError's text is the bare cause."""
    key = (os.getpid(), entry)
    if key in _described:
        return _described[key]
    plugin = import_attribute(entry.value)
    check_discovery(plugin)
    # One manager for each plugin: whatever happens in it stays in it.
    manager = pluggy.PluginManager(PROJECT_NAME)
    manager.add_hookspecs(DiscoverySpec)
    manager.register(plugin, name=entry.name)
    try:
        info = manager.hook.sconv_backend()
    except (Exception, SystemExit) as exc:
        contract = _dotted(CONTRACT_VERSION)
        raise PluginError(
            f"sconv_backend() raised {one_line_error(exc)} (sconv-core has contract {contract})"
        ) from exc
    _check_description(info, entry)
    origin = Origin(entry.distribution, entry.version, entry.value)
    _described[key] = replace(info, origin=origin, availability=None)
    return _described[key]


def _check_description(info: object, entry: Entry) -> None:
    if not isinstance(info, BackendInfo):
        raise PluginError(f"sconv_backend() returned {info!r}, not a sconv.BackendInfo")
    if info.name != entry.name:
        raise PluginError(
            f"it calls itself {info.name!r} and its entry point {entry.name!r}: make them the same"
        )
    expected: tuple[tuple[str, bool, str], ...] = (
        ("device_type", isinstance(info.device_type, str) and bool(info.device_type), "a string"),
        ("contract", _is_version(info.contract), "a tuple of two ints such as (1, 0)"),
        ("factory", is_reference(info.factory), "a string 'module:attr'"),
        ("probe", callable(info.probe), "a callable"),
        ("capabilities", isinstance(info.capabilities, Capabilities), "a sconv.Capabilities"),
    )
    for field, right, wanted in expected:
        if not right:
            raise PluginError(f"BackendInfo.{field} is {getattr(info, field)!r}, not {wanted}")


def _is_version(contract: object) -> bool:
    return isinstance(contract, tuple) and [type(part) for part in contract] == [int, int]


def _version_conflict(contract: tuple[int, int]) -> str | None:
    if contract[0] == CONTRACT_VERSION[0] and contract[1] <= CONTRACT_VERSION[1]:
        return None
    older = "sconv-core" if contract > CONTRACT_VERSION else "the plugin"
    return (
        f"it keeps contract {_dotted(contract)} and sconv-core has {_dotted(CONTRACT_VERSION)}:"
        f" upgrade {older}"
    )


def _dotted(contract: tuple[int, int]) -> str:
    return f"{contract[0]}.{contract[1]}"


def _ask(info: BackendInfo) -> Available | Unavailable:
    try:
        answer: object = info.probe()
    except (Exception, SystemExit) as exc:
        return Broken(f"its probe raised {one_line_error(exc)}", exc)
    if isinstance(answer, Available) and type(answer.priority) is int:
        return answer
    if isinstance(answer, Unavailable):
        return Unavailable(one_line(str(answer.reason)) or "its probe gave no reason")
    return Broken(
        f"its probe returned {answer!r}: return Available(priority) with an int, or"
        " Unavailable(reason)"
    )


def _rank(info: BackendInfo) -> tuple[int, int, str, str]:
    distribution = info.origin.distribution if info.origin else ""
    state = info.availability
    if isinstance(state, Available):
        return (0, -state.priority, info.name, distribution)
    return (2 if isinstance(state, Broken) else 1, 0, info.name, distribution)


def _listing(infos: Sequence[BackendInfo]) -> str:
    return "; ".join(
        f"{info.name} ({info.origin}): {info.availability.reason}"
        for info in infos
        if isinstance(info.availability, Unavailable)
    )
