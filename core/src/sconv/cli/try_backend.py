"""Tries a backend in a child process: builds it, and decodes one token.

A probe looks at files and metadata, so that listing stays quick; whether the driver answers shows
only when it is asked. That takes seconds, loads device libraries, and can end the process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..discovery.installed import Entry
from ..discovery.torch_failure import torch_failure
from ..errors import SconvError
from ..hookspecs import BackendInfo, Broken
from ..messages import one_line, one_line_error
from .plugin_process import NoAnswerError, PluginProcess

__all__ = ["LIMIT", "Trial", "decode_one_token", "try_backend"]

#: Seconds that a backend may take; importing a device library alone can take ten.
LIMIT: Final = 120.0


@dataclass(frozen=True, slots=True)
class Trial:
    """How it ended.

    Attributes:
        device: Where a token was decoded; None if it failed.
        error: Why it failed, in one line.
    """

    device: str | None
    error: str | None = None


def try_backend(info: BackendInfo, *, limit: float = LIMIT) -> Trial:
    """Try a backend in a child process, also one whose probe says that it cannot run here."""
    if isinstance(info.availability, Broken):
        return Trial(None, info.availability.reason)
    assert info.origin is not None
    entry = Entry(info.name, info.origin.value, info.origin.distribution, info.origin.version)
    with PluginProcess(limit=limit) as process:
        try:
            found = process.ask(entry, trial=True)
        except NoAnswerError as exc:
            return Trial(None, f"it {exc}")
    return Trial(found["device"], found["error"])


def decode_one_token(info: BackendInfo) -> Trial:
    """Build a backend and decode one token, in this process."""
    try:
        return Trial(_decode(info))
    except SconvError as exc:
        return Trial(None, one_line(str(exc)))
    except Exception as exc:
        return Trial(None, torch_failure(exc, backend=info.name) or one_line_error(exc))


def _decode(info: BackendInfo) -> str:
    """Build a backend and decode one token; return the device."""
    import torch

    from ..engine.loading import build
    from ..state.spec import StateSpec, Stream
    from ..step.batch import ForwardBatch

    can = info.capabilities
    spec = StateSpec(
        num_layers=1,
        streams=[Stream("a", 64)],
        kernel_size=min(max(4, can.kernel_sizes[0]), can.kernel_sizes[1]),
        num_slots=2,
        max_requests=1,
        dtype=getattr(torch, can.dtypes[0]),
        window_axis="time" if "time" in can.window_axes else "channel",
    )
    backend = build(info, spec=spec)
    weight = torch.ones(64, spec.kernel_size, dtype=spec.dtype, device="cpu").to(backend.device)
    x = torch.ones(1, 64, dtype=spec.dtype, device="cpu").to(backend.device)
    batch = ForwardBatch.decode(
        slots=torch.tensor([1], dtype=torch.int64, device="cpu").to(backend.device)
    )
    backend.init_forward_metadata(batch)
    y = backend.short_conv(x, weight, layer_id=0, stream="a", forward_batch=batch, residual=False)
    if y.cpu().tolist() != [[1.0] * 64]:
        raise SconvError(f"one token after an empty window gave {y[0, 0].item()} instead of 1")
    return str(backend.device)
