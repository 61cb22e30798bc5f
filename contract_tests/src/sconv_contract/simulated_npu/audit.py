"""Audit regions: what a plugin did in some lines, counted, and what it may not do, refused."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .errors import HostSync, SilentFallback, UnlistedOperator
from .state import Region, settings, thread

__all__ = ["count", "count_operator", "count_sync", "region"]


@contextmanager
def region(
    in_graph: bool,
    cpu: Literal["refuse", "count"] = "refuse",
    allow: frozenset[str] | None = None,
) -> Iterator[Counter[str]]:
    """Watch what the body does on the device and beside it.

    Args:
        in_graph: Whether it is to be recordable: whatever makes the host wait for the device, or
            moves data between them, is then refused, and counted otherwise.
        cpu: Whether operators on tensors of the host are refused or counted. A tensor without
            dimensions is a number, and looking at a tensor in another shape is no work.
        allow: The operators that the plugin says it uses, as ``aten::index_select``, or one
            overload as ``aten::where.self``; as torch_npu's dispatcher meets them, so a slice is
            a view, and views and memory are not asked for. None allows all.

    Yields:
        Counters that go on counting until the end: ``op.NAME`` for every operator of the device,
        ``cpu.NAME`` of the host, ``sync.WHAT``, ``h2d``, ``d2h``, ``p2p`` for transfers, ``alloc``
        and ``alloc_in_graph`` for new memory, ``unlisted.NAME`` for what was refused so.

    Raises:
        HostSync: The host waited, or data moved, in graph.
        SilentFallback: A tensor of the host was computed with, and ``cpu`` is ``refuse``.
        UnlistedOperator: An operator is not in ``allow``.
    """
    if cpu not in ("refuse", "count"):
        raise ValueError(f"cpu is 'refuse' or 'count', not {cpu!r}")
    entered = Region(in_graph, cpu, None if allow is None else frozenset(allow))
    thread.regions.append(entered)
    try:
        # Above the device, so that it sees what the plugin calls and not how kernels compute here.
        with _HostWork(entered):
            yield entered.counters
    finally:
        thread.regions.remove(entered)


def count(event: str) -> None:
    """Count an event in every region of the thread."""
    for entered in thread.regions:
        entered.counters[event] += 1


def count_operator(operator: str, overload: str) -> None:
    """Count an operator of the device.

    Raises:
        UnlistedOperator: A region does not allow it.
    """
    for entered in thread.regions:
        if not entered.allows(operator, overload):
            count(f"unlisted.{overload}")
            raise UnlistedOperator(
                f"{overload} is not among the {len(entered.allow or ())} operators that the plugin"
                " lists; use one that is, or list it if every NPU that the plugin serves has it"
            )
    count(f"op.{operator}")


def count_sync(what: str, why: str = "the host waits for the device") -> None:
    """Count that the host waits.

    Raises:
        HostSync: In a capture, in a region of a graph, or wherever the debug mode says so.
    """
    count(f"sync.{what}")
    if thread.capture is not None:
        thread.capture.fail(f"{what}: {why}")
        raise HostSync(f"{what} in a capture: {why}")
    if any(entered.in_graph for entered in thread.regions):
        raise HostSync(f"{what} in a region of a graph: {why}")
    if settings.sync_mode == "error":
        raise HostSync(f"{what} under set_sync_debug_mode('error'): {why}")
    if settings.sync_mode == "warn":
        warnings.warn(f"{what}: {why}", stacklevel=2)


class _HostWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees operators on tensors of the host."""

    def __init__(self, entered: Region) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._region = entered

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if _works_on_host(func, given, kwargs):
            self._found(func)
        out = func(*args, **kwargs)
        if not given and any(_has_elements_on_host(leaf) for leaf in tree_leaves(out)):
            self._found(func)
        return out

    def _found(self, func: Callable[..., Any]) -> None:
        name = func._schema.name  # type: ignore[attr-defined]
        self._region.counters[f"cpu.{name}"] += 1
        if self._region.cpu == "refuse":
            raise SilentFallback(
                f"{name} ran on tensors of the host, where the device should have done the work"
            )


def _has_elements_on_host(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu" and value.dim() > 0


def _works_on_host(
    func: Callable[..., Any], given: Sequence[Tensor], kwargs: dict[str, Any]
) -> bool:
    if any(one.device.type != "cpu" for one in given) or _looks_only(func):
        return False
    target = kwargs.get("device")
    if target is not None and torch.device(target).type != "cpu":
        return False
    return any(_has_elements_on_host(one) for one in given)


def _looks_only(func: Callable[..., Any]) -> bool:
    """Whether an operator returns views, and nothing else."""
    returns = func._schema.returns  # type: ignore[attr-defined]
    return bool(returns) and all(
        one.alias_info is not None and not one.alias_info.is_write for one in returns
    )
