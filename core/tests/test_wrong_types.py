"""What is of the wrong Python type is named as such, before anything is built from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sconv
from sconv import ConvStatePool, ExportedState, SconvError, StateSpec, Stream
from sconv.engine.nn import ShortConvolution
from sconv.step.conv_checks import check_conv, check_same_rows
from sconv.torch_backend.backend import TorchBackend

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "streams": [Stream("a", 4)],
    "kernel_size": 4,
    "num_slots": 3,
    "max_requests": 3,
    "dtype": torch.float32,
    "max_draft_tokens": 2,
}
SPEC = StateSpec(**SIZES)
LAYERS = torch.zeros(2, 4, 3, 4)


def spec(**changes: Any) -> StateSpec:
    return StateSpec(**(SIZES | changes))


def adopt(**changes: Any) -> ConvStatePool:
    return ConvStatePool.adopt(**({"spec": SPEC, "layers": LAYERS} | changes))


def restored(data: Any) -> None:
    pool = ConvStatePool(SPEC)
    pool.restore(pool.alloc(1), data)


def module(**changes: Any) -> ShortConvolution:
    return ShortConvolution(
        **({"hidden_size": 4, "kernel_size": 4, "layer_id": 0, "stream": "a"} | changes)
    )


CASES: dict[str, tuple[Callable[[], object], str]] = {
    "streams by name": (lambda: spec(streams="kv"), r"streams is 'kv': expected a list of sconv.S"),
    "no streams": (lambda: spec(streams=None), r"streams is None: expected a list"),
    "one stream": (lambda: spec(streams=Stream("a", 4)), r"streams is Stream\(.*: expected a list"),
    "a layer that is no list": (lambda: spec(streams=[1, 2]), r"a layer of streams is 1: expected"),
    "a stream by number": (
        lambda: spec(streams=[Stream(1, 4)]),  # type: ignore[arg-type]
        r"a stream named 1: expected a string",
    ),
    "a layer in a string": (lambda: SPEC.layer_dim("0"), r"layer_id='0': expected an int, 0 to 1"),  # type: ignore[arg-type]
    "a layer past the last": (lambda: SPEC.layer_dim(2), r"layer_id=2: this backend has layers 0"),
    "a layer before the first": (lambda: SPEC.window_shape(-1), r"layer_id=-1: this backend has"),
    "no name": (
        lambda: sconv.load_backend(None, spec=SPEC),  # type: ignore[arg-type]
        r"name is None: expected the name of an installed backend, or 'auto'",
    ),
    "no spec": (
        lambda: sconv.load_backend(spec=None),  # type: ignore[arg-type]
        r"spec is None: expected a sconv.StateSpec",
    ),
    "a spec as a dict": (
        lambda: sconv.load_backend(spec=SIZES),  # type: ignore[arg-type]
        r"spec is a dict: expected a sconv.StateSpec",
    ),
    "a device by number": (
        lambda: sconv.load_backend(spec=SPEC, device=0),  # type: ignore[arg-type]
        r"device is 0: expected a torch.device, or its name",
    ),
    "tensors as a pool": (
        lambda: sconv.load_backend(spec=SPEC, pool=LAYERS),  # type: ignore[arg-type]
        r"pool is a Tensor: expected a sconv.ConvStatePool",
    ),
    "a plan of nothing": (lambda: sconv.plan(None, memory=1), r"spec is None: expected"),  # type: ignore[arg-type]
    "a pool of nothing": (lambda: ConvStatePool(None), r"spec is None: expected"),  # type: ignore[arg-type]
    "nothing to adopt for": (lambda: adopt(spec=None), r"spec is None: expected"),
    "a number adopted": (lambda: adopt(layers=1), r"layers is 1: expected one tensor, or one per"),
    "a scalar adopted": (lambda: adopt(layers=torch.tensor(1.0)), r"layers is tensor\(1.\): exp"),
    "lists adopted": (lambda: adopt(layers=[[0], [0]]), r"layer 0 is a list: expected a tensor"),
    "a number as windows": (lambda: adopt(windows=1), r"windows is an int: expected one tensor"),
    "windows of nothing": (
        lambda: adopt(windows=[None, None]),
        r"windows: layer 0 is None: expected a tensor",
    ),
    "a null slot by itself": (lambda: adopt(null_slots=-1), r"null_slots is -1: expected the slot"),
    "a table in a list": (
        lambda: adopt(virtual_to_physical=[0, 1]),
        r"virtual_to_physical is a list: expected an int32 or int64 table",
    ),
    "a table of floats": (
        lambda: adopt(virtual_to_physical=torch.zeros(2)),
        r"virtual_to_physical is torch.float32 of shape \[2\]: expected",
    ),
    "nothing restored": (lambda: restored(None), r"data is None: expected the sconv.ExportedState"),
    "bare layers restored": (
        lambda: restored([LAYERS[0, :1], LAYERS[1, :1]]),
        r"data is a list: expected the sconv.ExportedState",
    ),
    "lists restored": (
        lambda: restored(ExportedState(SPEC.fingerprint, [[], []])),  # type: ignore[list-item]
        r"layer 0 is a list: expected a tensor",
    ),
    "a module of no size": (lambda: module(hidden_size=None), r"hidden_size=None: expected an int"),
    "a module of half a kernel": (lambda: module(kernel_size=2.5), r"kernel_size=2.5: expected an"),
    "a rank in a string": (lambda: module(tp_rank="0"), r"tp_rank='0': expected an int"),
    "parts by size": (lambda: module(parts=[4]), r"parts is \[4\]: expected a list of sconv.nn"),
    "a backend by name": (lambda: module(backend="cpu"), r"backend is a str: expected a sconv.B"),
    "a module's batch": (
        lambda: module()(LAYERS, None),
        r"forward_batch is None: expected a sconv.ForwardBatch",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_by_its_type(case: str) -> None:
    call, message = CASES[case]
    with pytest.raises(SconvError, match=message):
        call()


def test_integers_of_other_types_are_layers() -> None:
    """Numpy's and the like, which a model's configuration may hold."""

    class Index:
        def __index__(self) -> int:
            return 1

    assert SPEC.stream_slice(Index(), "a").dim == 4  # type: ignore[arg-type]


def test_on_a_device_another_step_is_told_by_its_memory() -> None:
    """There nothing can be read inside a capture; a meta tensor has nothing to read at all."""
    meta = torch.device("meta")
    backend = TorchBackend(spec=SPEC, device=meta, pool=ConvStatePool(SPEC, meta))
    rows = torch.empty(3, dtype=torch.int64, device=meta)
    batch = sconv.ForwardBatch.decode(rows[:2])
    backend.init_graph_state(4, 4)
    backend.init_forward_metadata_in_graph(batch)
    prepared = backend.forward_metadata
    assert prepared is not None
    assert prepared.batch is batch

    def check(other: sconv.ForwardBatch) -> None:
        x, weight = torch.empty(2, 4, device=meta), torch.empty(4, 4, device=meta)
        check_conv(x, weight, None, None, True, 0, "a", other, prepared, SPEC, meta)

    anew, elsewhere = sconv.ForwardBatch.decode(rows[:2]), sconv.ForwardBatch.decode(rows[1:])
    check(anew)
    check(elsewhere)
    check_same_rows(prepared, anew)
    with pytest.raises(sconv.MetadataError, match="differ in their rows or lengths"):
        check_same_rows(prepared, elsewhere)
