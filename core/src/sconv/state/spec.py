"""What a backend is built for: the streams of every layer, the kernel width, the sizes."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, Literal, TypeAlias, get_args

import torch

from ..errors import SpecError
from ..messages import kind_of
from .gated_delta import GatedDelta

__all__ = [
    "KERNEL_SIZES",
    "MOST_SLOTS",
    "StateSpec",
    "Stream",
    "StreamSlice",
    "WindowAxis",
    "WindowLayout",
    "check_is_spec",
]

WindowAxis: TypeAlias = Literal["time", "channel"]
WindowLayout: TypeAlias = Literal["auto", "dense", "dedup", "inputs"]

#: Smallest and largest kernel width of the contract.
KERNEL_SIZES: Final = (2, 8)

#: Most slots, and most request rows: what an int32 can name.
MOST_SLOTS: Final = torch.iinfo(torch.int32).max

#: Most bytes of one tensor: sizes in torch are int64.
_MOST_BYTES: Final = torch.iinfo(torch.int64).max

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class Stream:
    """One convolution of a layer.

    Attributes:
        name: Its name in the layer, for example ``"k"``.
        dim: Its channels on this tensor-parallel rank.
    """

    name: str
    dim: int


@dataclass(frozen=True, slots=True)
class StreamSlice:
    """Where a stream lies among the channels of its layer: ``[start, stop)``."""

    start: int
    stop: int

    @property
    def dim(self) -> int:
        """Channels of the stream."""
        return self.stop - self.start


@dataclass(frozen=True)
class StateSpec:
    """The state of one model on one tensor-parallel rank.

    Attributes:
        num_layers: Layers that own convolutions, numbered 0 to ``num_layers - 1``.
        streams: The streams of a layer, in the order in which they lie side by side. One sequence
            for all layers, or one sequence per layer where their widths differ.
        kernel_size: Width K of every convolution, 2 to 8.
        num_slots: Usable slots, numbered 1 to ``num_slots``, at most 2**31 - 1; row 0 of the pool
            is the dummy.
        max_requests: Most request rows, and most rows of an eager batch; at most 2**31 - 1.
        dtype: Dtype of the state: bfloat16, float16 or float32.
        window_axis: ``"time"`` keeps a window as ``[K-1, D]`` (Inkling, KDA), ``"channel"`` as
            ``[D, K-1]`` (LFM2, GDN, Mamba2).
        max_draft_tokens: Most tokens of a row in a verify step, the always-kept root included;
            1 means no speculation.
        draft_topk: Most children of a node of a draft tree; 1 means chains. A wider tree is refused
            where values are checked.
        track_interval: Tokens between two prefix-cache snapshots of a running request; None = none.
        chunk_size: Tokens to which cached prefixes are aligned.
        window_layout: How verify windows are kept: ``"dense"``, ``"dedup"``,
            ``"inputs"``, or ``"auto"`` for the backend's choice.
        recurrent: The recurrent matrices of each layer beside its convolutions; None = none.

    Raises:
        SpecError: A value is out of the contract's range; the message names it.
    """

    num_layers: int
    streams: Sequence[Stream] | Sequence[Sequence[Stream]]
    kernel_size: int
    num_slots: int
    max_requests: int
    dtype: torch.dtype = torch.bfloat16
    window_axis: WindowAxis = "time"
    max_draft_tokens: int = 1
    draft_topk: int = 1
    track_interval: int | None = None
    chunk_size: int = 64
    window_layout: WindowLayout = "auto"
    recurrent: GatedDelta | None = None
    _layers: tuple[tuple[Stream, ...], ...] = field(init=False, repr=False, compare=False)
    _slices: tuple[dict[str, StreamSlice], ...] = field(init=False, repr=False, compare=False)
    #: Channels of each stream by layer and name, for the check of every convolution.
    stream_dims: dict[tuple[int, str], int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "num_slots",
            "max_requests",
            "max_draft_tokens",
            "draft_topk",
            "chunk_size",
        ):
            _check_int(name, getattr(self, name), least=1)
        for name in ("num_slots", "max_requests"):
            if getattr(self, name) > MOST_SLOTS:
                raise SpecError(
                    f"{name}={getattr(self, name)}: expected at most {MOST_SLOTS}, since slots and "
                    "rows are int32"
                )
        if self.track_interval is not None:
            _check_int("track_interval", self.track_interval, least=1)
            if self.track_interval < self.max_draft_tokens:
                raise SpecError(
                    f"track_interval={self.track_interval} is smaller than max_draft_tokens="
                    f"{self.max_draft_tokens}: one step could cross two snapshot boundaries"
                )
        _check_int("kernel_size", self.kernel_size, least=KERNEL_SIZES[0])
        if self.kernel_size > KERNEL_SIZES[1]:
            raise SpecError(
                f"kernel_size={self.kernel_size}: the contract covers {KERNEL_SIZES[0]} to "
                f"{KERNEL_SIZES[1]}"
            )
        if self.dtype not in _DTYPES:
            raise SpecError(f"dtype={self.dtype}: the state is bfloat16, float16 or float32")
        if self.window_axis not in ("time", "channel"):
            raise SpecError(f"window_axis={self.window_axis!r}: expected 'time' or 'channel'")
        if self.window_layout not in get_args(WindowLayout):
            raise SpecError(
                f"window_layout={self.window_layout!r}: expected "
                + ", ".join(map(repr, get_args(WindowLayout)))
            )
        if self.recurrent is not None and not isinstance(self.recurrent, GatedDelta):
            raise SpecError(
                f"recurrent is {kind_of(self.recurrent)}: expected a sconv.GatedDelta, or None"
            )
        given = _items("streams", self.streams)
        layers = _freeze_streams(given, self.num_layers)
        uniform = isinstance(given[0], Stream)
        # Frozen, so that a spec can be a dictionary key and no caller's list is shared.
        object.__setattr__(self, "streams", layers[0] if uniform else layers)
        object.__setattr__(self, "_layers", layers)
        object.__setattr__(self, "_slices", tuple(map(_slices, layers)))
        dims = {(at, each.name): each.dim for at, layer in enumerate(layers) for each in layer}
        object.__setattr__(self, "stream_dims", dims)
        self._check_bytes()

    def _check_bytes(self) -> None:
        """Refuse a state that no tensor can hold, before anything is built for it."""
        channels = sum(stream.dim for layer in self._layers for stream in layer)
        slot = channels * self.window_size * self.dtype.itemsize
        rows = self.num_slots + 1
        if slot * rows > _MOST_BYTES:
            raise SpecError(
                f"num_slots={self.num_slots} takes {slot * rows} bytes of state, {slot} per slot: "
                f"a tensor has at most {_MOST_BYTES}. Ask `sconv plan` how many slots fit"
            )
        if self.recurrent is not None:
            states = self.recurrent.state_nbytes * self.num_layers * rows
            if states > _MOST_BYTES:
                raise SpecError(
                    f"num_slots={self.num_slots} takes {states} bytes of recurrent state: a tensor "
                    f"has at most {_MOST_BYTES}. Ask `sconv plan` how many slots fit"
                )
        row = channels * self.window_size * self.max_draft_tokens * self.dtype.itemsize
        if row * self.max_requests > _MOST_BYTES:
            raise SpecError(
                f"max_requests={self.max_requests} with max_draft_tokens={self.max_draft_tokens} "
                f"takes up to {row * self.max_requests} bytes of verify windows: a tensor has at "
                f"most {_MOST_BYTES}. Ask `sconv plan` how many requests fit"
            )

    @property
    def window_size(self) -> int:
        """Inputs that a window keeps: K-1."""
        return self.kernel_size - 1

    @property
    def track_grid(self) -> int | None:
        """Tokens between two snapshots, ``lcm(chunk_size, track_interval)``; None = no tracking."""
        if self.track_interval is None:
            return None
        return math.lcm(self.chunk_size, self.track_interval)

    @property
    def uniform(self) -> bool:
        """Whether all layers have the same total width, so that they stack in one tensor."""
        return len({self.layer_dim(layer) for layer in range(self.num_layers)}) == 1

    @property
    def fingerprint(self) -> str:
        """What two states must share for one to be restored as the other, as a line of text.

        Window axis, kernel width, dtype, the streams of all layers in order with their widths, and
        the heads, widths and dtype of a recurrent state;
        sizes of a pool, drafts and snapshots do not matter.
        """
        dtype = str(self.dtype).removeprefix("torch.")
        layers = " ".join(
            f"{len(list(same))}x({', '.join(f'{each.name}={each.dim}' for each in streams)})"
            for streams, same in groupby(self._layers)
        )
        text = f"{self.window_axis} K={self.kernel_size} {dtype} {layers}"
        delta = self.recurrent
        if delta is not None:
            shape = "x".join(map(str, delta.state_shape))
            text += f" {shape} {str(delta.dtype).removeprefix('torch.')}"
        return text

    def layer_streams(self, layer_id: int) -> tuple[Stream, ...]:
        """Return the streams of one layer, in channel order."""
        return self._layers[self._layer(layer_id)]

    def layer_dim(self, layer_id: int) -> int:
        """Return the channels of one layer: the sum over its streams."""
        return sum(stream.dim for stream in self.layer_streams(layer_id))

    def stream_slice(self, layer_id: int, stream: str) -> StreamSlice:
        """Return where a stream lies among the channels of its layer.

        Raises:
            SpecError: The layer or the stream does not exist; the message lists what does.
        """
        # Runs in every convolution of every step: what is right is one comparison away.
        if type(layer_id) is not int or not 0 <= layer_id < self.num_layers:
            layer_id = self._layer(layer_id)
        try:
            return self._slices[layer_id][stream]
        except (KeyError, TypeError):
            known = ", ".join(map(repr, self._slices[layer_id]))
            raise SpecError(f"stream={stream!r}: layer {layer_id} has {known}") from None

    def _layer(self, layer_id: int) -> int:
        """Return a layer id of any integer type as an int.

        Raises:
            SpecError: The layer does not exist.
        """
        last = self.num_layers - 1
        try:
            number = operator.index(layer_id)
        except TypeError:
            number = None
        # A tensor on a device would have to be waited for.
        if number is None or isinstance(layer_id, bool | torch.Tensor):
            raise SpecError(f"layer_id={layer_id!r}: expected an int, 0 to {last}")
        if not 0 <= number <= last:
            raise SpecError(f"layer_id={number}: this backend has layers 0 to {last}")
        return number

    def window_shape(self, layer_id: int) -> tuple[int, int]:
        """Return the shape of one slot of one layer: ``(K-1, D)`` or ``(D, K-1)``."""
        dim = self.layer_dim(layer_id)
        if self.window_axis == "time":
            return (self.window_size, dim)
        return (dim, self.window_size)


def check_is_spec(value: object) -> None:
    """Check that what should be a spec is one.

    Raises:
        SpecError: It is something else.
    """
    if not isinstance(value, StateSpec):
        raise SpecError(f"spec is {kind_of(value)}: expected a sconv.StateSpec")


def _check_int(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SpecError(f"{name}={value!r}: expected an int")
    if value < least:
        raise SpecError(f"{name}={value}: expected at least {least}")


def _freeze_streams(streams: Sequence[object], num_layers: int) -> tuple[tuple[Stream, ...], ...]:
    flat: list[Stream] = []
    nested: list[tuple[object, ...]] = []
    for item in streams:
        if isinstance(item, Stream):
            flat.append(item)
        else:
            nested.append(_items("a layer of streams", item))
    if flat and nested:
        raise SpecError(
            "streams mixes Stream and sequences of Stream: give one list, or one per layer"
        )
    if not flat and not nested:
        raise SpecError("streams is empty: a layer has at least one convolution")
    if flat:
        return (_checked_streams(flat, "streams"),) * num_layers
    if len(nested) != num_layers:
        raise SpecError(
            f"streams has {len(nested)} lists for num_layers={num_layers}: one per layer"
        )
    return tuple(_checked_streams(layer, f"streams[{index}]") for index, layer in enumerate(nested))


def _items(what: str, value: object) -> tuple[object, ...]:
    if isinstance(value, str | torch.Tensor) or not isinstance(value, Iterable):
        raise SpecError(f"{what} is {value!r}: expected a list of sconv.Stream(name, dim)")
    return tuple(value)


def _checked_streams(streams: Sequence[object], where: str) -> tuple[Stream, ...]:
    if not streams:
        raise SpecError(f"{where} is empty: a layer has at least one convolution")
    checked: list[Stream] = []
    for stream in streams:
        if not isinstance(stream, Stream):
            raise SpecError(f"{where} holds {stream!r}: expected sconv.Stream(name, dim)")
        if not isinstance(stream.name, str) or not stream.name:
            raise SpecError(
                f"{where} holds a stream named {stream.name!r}: expected a string that is not empty"
            )
        _check_int(f"dim of stream {stream.name!r}", stream.dim, least=1)
        checked.append(stream)
    names = [stream.name for stream in checked]
    if len(set(names)) != len(names):
        raise SpecError(f"{where} names a stream twice: {names}")
    return tuple(checked)


def _slices(streams: Sequence[Stream]) -> dict[str, StreamSlice]:
    slices = {}
    start = 0
    for stream in streams:
        slices[stream.name] = StreamSlice(start, start + stream.dim)
        start += stream.dim
    return slices
