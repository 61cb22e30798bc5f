"""The kernels of the device: every operator runs on the host's side of its tensors' memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload

from .audit import count, count_operator, count_sync
from .errors import MixedDevice, UnlistedOperator
from .memory import CPU_KERNELS, on_device
from .operands import HostSide, tensors_in
from .races import refuse_race
from .state import thread
from .table import TORCH_NPU, table

__all__ = ["Kernel", "copy", "refuse_unlisted"]

_UNWRITTEN: Final = frozenset(
    {
        "aten::empty.memory_format",
        "aten::empty_strided",
        "aten::empty_like",
        "aten::new_empty",
        "aten::new_empty_strided",
    }
)
#: They change a tensor's description, not its elements.
_DESCRIBING: Final = frozenset(
    {
        "aten::as_strided",
        "aten::as_strided_",
        "aten::_reshape_alias",
        "aten::is_set_to",
        "aten::resize_",
        "aten::set_",
        "aten::squeeze",
        "aten::squeeze_",
        "aten::unfold",
        "aten::unsqueeze",
        "aten::unsqueeze_",
        "aten::view",
    }
)
#: Their result's size, or their result, is known to the host only when the device is done.
_WAITING: Final = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::_unique",
        "aten::_unique2",
        "aten::bincount",
        "aten::equal",
        "aten::is_nonzero",
        "aten::masked_select",
        "aten::nonzero",
        "aten::nonzero_numpy",
        "aten::repeat_interleave.Tensor",
        "aten::repeat_interleave.self_Tensor",
        "aten::unique_consecutive",
        "aten::unique_dim",
        "aten::unique_dim_consecutive",
    }
)
_INDEXING: Final = frozenset({"aten::index", "aten::index_put_", "aten::_index_put_impl_"})


class Kernel:
    """The kernel of one operator overload.

    Attributes:
        operator: The overload.
        name: As in ``aten::index_select``.
        overload: As in ``aten::where.self``; without a dot for the default overload.
        describes: Whether it changes descriptions of tensors alone.
        unwritten: Whether it hands out memory that nobody wrote.
    """

    def __init__(self, operator: OpOverload) -> None:
        schema = operator._schema
        self.operator = operator
        self.name = str(schema.name)
        self.overload = ".".join(filter(None, (schema.name, schema.overload_name)))
        self.describes = self.name in _DESCRIBING
        self.unwritten = self.overload in _UNWRITTEN
        written = [
            one.alias_info is not None and one.alias_info.is_write for one in schema.arguments
        ]
        self._written: list[tuple[int, str]] = [
            (place, argument.name)
            for place, (argument, writes) in enumerate(zip(schema.arguments, written, strict=True))
            if writes
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What torch's dispatcher calls."""
        if self.describes:
            return self.operator.redispatch(CPU_KERNELS, *args, **kwargs)
        given = [*tensors_in(args), *tensors_in(kwargs.values())]
        index = self._device(given, kwargs)
        if self._waits(args, kwargs):
            count_sync(self.overload)
        elif not self.unwritten:
            count_operator(self.name, self.overload)
        if thread.capture is not None:
            return thread.capture.record(self, args, kwargs, index)
        return self.run(args, kwargs, index)

    def run(self, args: Sequence[Any], kwargs: dict[str, Any], index: int) -> Any:
        """Execute it, and return tensors of the device for what it returns."""
        hosts = HostSide(index)
        host_args, host_kwargs = hosts.of(args), hosts.of(kwargs)
        refuse_race(self.name, host_args, host_kwargs)
        out = self.operator(*host_args, **host_kwargs)
        for tensor in self.written(args, kwargs):
            hosts.wrote(self.name, tensor)
        return hosts.back(out, self.unwritten, self.name)

    def written(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
        """Yield the arguments that it writes."""
        for place, name in self._written:
            yield from tensors_in((args[place] if place < len(args) else kwargs.get(name),))

    def _device(self, given: Sequence[Tensor], kwargs: dict[str, Any]) -> int:
        """Return the index of the device that the operator runs on."""
        index: int | None = None
        for tensor in given:
            if on_device(tensor):
                if index is not None and tensor.device.index != index:
                    raise MixedDevice(
                        f"{self.overload} was given tensors of npu:{index} and of {tensor.device}"
                    )
                index = tensor.device.index
        for tensor in given:
            # A tensor of the host without dimensions is taken as a number, as torch does.
            if not on_device(tensor) and (tensor.device.type != "cpu" or tensor.dim() > 0):
                raise MixedDevice(
                    f"{self.overload} was given tensors of npu:{index} and of {tensor.device}"
                )
        if index is None:
            device = kwargs.get("device")
            index = None if device is None else torch.device(device).index
        return thread.device if index is None else index

    def _waits(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        if self.name in _WAITING or self.overload in _WAITING:
            return True
        if self.name not in _INDEXING:
            return False
        indices = args[1] if len(args) > 1 else kwargs["indices"]
        return any(one.dtype in (torch.bool, torch.uint8) for one in tensors_in(indices))


def copy(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """``copy_``, between the devices and the host too."""
    both = (self, src)
    if all(on_device(one) for one in both) and self.device == src.device:
        return _COPY(self, src, non_blocking)  # type: ignore[no-any-return]
    if not all(on_device(one) or one.device.type == "cpu" for one in both):
        raise MixedDevice(f"a copy from {src.device} to {self.device} is not simulated")
    if on_device(self) and on_device(src):
        way = "p2p"
        if thread.capture is not None:
            raise MixedDevice(f"a copy from {src.device} to {self.device} in a capture")
        count(way)
    else:
        way = "h2d" if on_device(self) else "d2h"
        count(way)
        moved = "from the host to the device" if way == "h2d" else "from the device to the host"
        count_sync(f"copy_ {moved}", "a graph has no part of the host in it")
    hosts = HostSide(0)
    hosts.of(self).copy_(hosts.of(src))
    if on_device(self):
        hosts.wrote(way, self)
    return self


_COPY: Final = Kernel(torch.ops.aten.copy_.default)


def refuse_unlisted(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Refuse what has no kernel.

    Raises:
        UnlistedOperator: Always.
    """
    name = str(operator._schema.name)
    overload = ".".join(filter(None, (name, operator._schema.overload_name)))
    count(f"unlisted.{overload}")
    if thread.capture is not None:
        thread.capture.fail(f"{overload} has no kernel")
    if overload.removeprefix("aten::") in table().cpu_fallback:
        why = (
            f"torch_npu {TORCH_NPU} has no kernel for it: it would run on the CPU, with a copy to"
            " the host and one back"
        )
    elif name.startswith("aten::"):
        why = f"torch_npu {TORCH_NPU} does not list it"
    else:
        why = "nobody registered a kernel for npu; simulated_npu.custom_op(schema, reference) does"
    raise UnlistedOperator(f"{overload}: {why}")
