"""Captures a step with the graphs of its device: ``torch.cuda.CUDAGraph``, ``torch.npu.NPUGraph``.

Device modules of torch are alike in this, so one piece of code serves every device that has graphs
and no step hook knows which one it is. An engine with a capture of its own needs none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ..errors import SpecError

__all__ = ["CapturedStep", "capture", "has_graphs"]

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class CapturedStep(Generic[Result]):
    """A captured call.

    Attributes:
        graph: The device's graph.
        result: What the call returned at capture: the tensors that each replay writes.
    """

    graph: Any
    result: Result

    def replay(self) -> None:
        """Run the recorded operators on the addresses of the capture."""
        self.graph.replay()


def has_graphs(device: torch.device) -> bool:
    """Whether torch can capture graphs on this device, which must be one that is here."""
    return device.type != "cpu" and _graph_class(device) is not None


def capture(
    device: torch.device,
    step: Callable[[], Result],
    *,
    warm_ups: int = 1,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> CapturedStep[Result]:
    """Run a call to warm it up, then capture it. Out of graph.

    A step moves its state on each time that it runs: give warm-ups rows whose state may change,
    such as rows on the dummy slot.

    Args:
        device: Where the call's tensors lie.
        step: In-graph part of a step: ``init_forward_metadata_in_graph`` and what the model runs.
        warm_ups: Calls before the capture, on a stream of their own; a kernel is compiled in one.
        around: Makes a context in which the captured call runs.

    Raises:
        SpecError: The device has no graphs.
    """
    if not has_graphs(device):
        raise SpecError(f"{device} has no graphs: only a device of an accelerator has")
    module: Any = torch.get_device_module(device)
    # A capture is of the current device.
    with module.device(device):
        with module.stream(module.Stream(device)):
            for _ in range(warm_ups):
                step()
        module.synchronize(device)
        graph = _graph_class(device)()
        with module.graph(graph), around():
            result = step()
    return CapturedStep(graph, result)


def _graph_class(device: torch.device) -> Any:
    return getattr(torch.get_device_module(device), f"{device.type.upper()}Graph", None)
