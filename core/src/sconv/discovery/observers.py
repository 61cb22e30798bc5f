"""Profiling, tracing and fault injection around the hooks, at no cost while nobody looks.

An observer is an object whose methods are pluggy wrappers: named like a hook, marked with
``@sconv.hookimpl(wrapper=True)``, and with one ``yield``, whose value is what the call returned. It
may name any of the hook's parameters, and leave the others out::

    class CountCalls:
        def __init__(self):
            self.seen = Counter()

        @sconv.hookimpl(wrapper=True)
        def short_conv(self, layer_id):
            self.seen[layer_id] += 1
            return (yield)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pluggy

from ..errors import PluginError
from .load_check import check_observer, step_hooks

__all__ = ["Observers"]


class Observers:
    """The observers of one backend.

    Args:
        manager: Holds the backend's implementation, registered against the step hooks
            (:func:`sconv.discovery.load_check.bind`).
    """

    __slots__ = ("_calls", "_manager", "_present")

    def __init__(self, manager: pluggy.PluginManager) -> None:
        self._manager = manager
        # A hook that the implementation leaves out has no relay: its caller has the default, and a
        # wrapper around nothing would turn that into None.
        callers = {name: getattr(manager.hook, name) for name in step_hooks()}
        self._calls: dict[str, Callable[..., Any]] = {
            name: caller for name, caller in callers.items() if caller.get_hookimpls()
        }
        self._present: list[object] = []

    @property
    def active(self) -> bool:
        """Whether anybody observes."""
        return bool(self._present)

    def calls(self) -> dict[str, Callable[..., Any]]:
        """Return what to call, by keyword, in place of each method of the implementation.

        The last observer that was added is the outermost.
        """
        return dict(self._calls)

    def add(self, observer: object) -> None:
        """Let an observer see the calls from now on.

        Raises:
            ContractError: It is not made of wrappers, or it names a hook or a parameter that does
                not exist. It was not added.
            PluginError: It, or an object equal to it, is here already: pluggy compares plugins.
        """
        check_observer(observer)
        if observer in self._present:
            raise PluginError(f"{observer!r}, or an equal object, observes this backend already")
        self._manager.register(observer, name=_name(observer))
        self._present.append(observer)

    def remove(self, observer: object) -> None:
        """Let an observer see no further call.

        Raises:
            PluginError: It is not here.
        """
        left = [present for present in self._present if present is not observer]
        if len(left) == len(self._present):
            raise PluginError(f"{observer!r} does not observe this backend")
        self._manager.unregister(name=_name(observer))
        self._present = left


def _name(observer: object) -> str:
    return f"observer {id(observer)}"
