"""Every error that sconv raises on purpose.

Each one derives from :class:`SconvError` and from the built-in that a caller would expect, so that
``except ValueError`` around a bad argument keeps working.
"""

from __future__ import annotations

__all__ = [
    "BackendNotFoundError",
    "BackendUnavailableError",
    "BatchError",
    "ContractError",
    "GraphBufferError",
    "MetadataError",
    "PluginError",
    "PoolError",
    "PoolExhaustedError",
    "SconvError",
    "SlotError",
    "SpecError",
    "TorchUnavailableError",
]


class SconvError(Exception):
    """Base of all errors of this project.

    An error reaches another process with its fields. Python rebuilds an exception by calling its
    class with ``args``, which fails where ``__init__`` takes anything else than the text; a worker
    pool then waits for an answer that never comes. So ``__init__`` is not called again.
    """

    def __reduce__(self) -> tuple[object, ...]:
        """Return how to rebuild the error: its class, ``args``, and its fields."""
        parts = super().__reduce__()
        return (_rebuild, (type(self), self.args), *parts[2:])


class PluginError(SconvError, RuntimeError):
    """A plugin could not be loaded, or two plugins claim the same thing."""


class BackendNotFoundError(PluginError, LookupError):
    """No installed plugin has the name that was asked for."""


class BackendUnavailableError(PluginError):
    """The backend that was asked for is installed but cannot run here."""


class ContractError(PluginError, TypeError):
    """An implementation does not keep the contract of :mod:`sconv.hookspecs`."""


class SpecError(SconvError, ValueError):
    """A :class:`~sconv.StateSpec` that no pool or no backend can satisfy."""


class TorchUnavailableError(SconvError, ImportError):
    """A name needs torch, which is not installed or failed to start; the message says what to do.

    Attributes:
        name: ``"torch"``.
    """


class BatchError(SconvError, ValueError):
    """An argument of a step hook has the wrong shape, dtype, device or range."""


class MetadataError(SconvError, RuntimeError):
    """Step metadata was read before the step was prepared."""


class SlotError(SconvError, ValueError):
    """A slot id is out of range, not in use, or named twice."""


class PoolError(SconvError, RuntimeError):
    """The pool cannot do what was asked: it is not bound yet, or its slots are the engine's."""


class PoolExhaustedError(PoolError):
    """Fewer slots are free than were asked for; none was taken."""


class GraphBufferError(SconvError, RuntimeError):
    """A static buffer is too small, or was asked to change after it was sized.

    Attributes:
        have: What the buffer holds, by name (`max_bs`, `max_num_tokens`).
        need: What was asked of it, by the same names.
    """

    def __init__(self, message: str, *, have: dict[str, int], need: dict[str, int]) -> None:
        super().__init__(f"{message}: have {_sizes(have)}, need {_sizes(need)}")
        self.have = have
        self.need = need


def _rebuild(kind: type[SconvError], args: tuple[object, ...]) -> SconvError:
    error = kind.__new__(kind, *args)
    # The built-in's: it keeps its own fields outside of the instance's dictionary.
    super(SconvError, error).__init__(*args)
    return error


def _sizes(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sizes.items())
