"""Capture and replay without an accelerator: record operators once, run them on the same memory.

A graph keeps addresses and Python's decisions, nothing else. A :class:`Recording` does the same on
any device: a replay repeats every operator of the recorded call on the very tensors of that call,
and no line of Python in between. Code that reads a value on the host, keeps what it computed
outside of the recorded call, or allocates afresh what a later replay must find, fails here as it
would there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..engine.process import plain_arithmetic

__all__ = ["HostSyncError", "Recording", "record"]

#: Operators that hand a device value, or a shape made of one, to the host.
_SYNCS: Final = (
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::equal",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
)


class HostSyncError(AssertionError):
    """The recorded call read a value on the host, which no graph can record."""


class _Call:
    """One operator, its arguments, and where its results went."""

    def __init__(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], out: Any
    ) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        read = {_storage(leaf) for leaf in _tensors((args, kwargs))}
        # A result that lies in an argument's memory was written in place, or is a view of it.
        self.results = [None if _storage(leaf) in read else leaf for leaf in _tensors(out)]

    @property
    def is_view(self) -> bool:
        schema = self.func._schema  # type: ignore[attr-defined]
        return not schema.is_mutable and all(result is None for result in self.results)

    def run(self) -> None:
        out = self.func(*self.args, **self.kwargs)
        for old, new in zip(self.results, _tensors(out), strict=True):
            if old is not None:
                old.copy_(new)


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operators of one call; see :func:`record`.

    Attributes:
        result: What the call returned. A replay writes new values into its tensors.
        calls: Operators recorded, views left out.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.result: Any = None
        self.calls: list[_Call] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func._schema.name  # type: ignore[attr-defined]
        if name in _SYNCS:
            raise HostSyncError(f"{name} in a recorded call")
        out = func(*args, **(kwargs or {}))
        call = _Call(func, args, kwargs or {}, out)
        if not call.is_view:
            self.calls.append(call)
        return out

    def replay(self) -> None:
        """Run the operators again, in order, on the tensors of the recorded call."""
        # A device's graph repeats kernels, whatever autograd and autocast are by then.
        with plain_arithmetic("cpu"):
            for call in self.calls:
                call.run()


def record(call: Callable[[], Any]) -> Recording:
    """Run a call once and record it.

    Args:
        call: Takes nothing. Its inputs are tensors that it closes over: write new values into them
            before a replay.

    Raises:
        HostSyncError: The call reads a value on the host.
    """
    recording = Recording()
    with recording:
        recording.result = call()
    return recording


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
