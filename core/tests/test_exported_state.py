"""An exported state says what it is, and goes into nothing else; a refused one changes nothing."""

from __future__ import annotations

import io
import pickle
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sconv import ConvStatePool, ExportedState, SlotError, StateSpec, Stream
from sconv.testing.harness import assert_same_bits


def spec(**changes: Any) -> StateSpec:
    options: dict[str, Any] = {
        "num_layers": 2,
        "streams": [Stream("k", 3), Stream("v", 3)],
        "kernel_size": 4,
        "num_slots": 4,
        "max_requests": 4,
        "dtype": torch.float32,
    }
    return StateSpec(**{**options, **changes})


def filled(**changes: Any) -> ConvStatePool:
    pool = ConvStatePool(spec(**changes))
    pool.alloc(3)
    for number, layer in enumerate(pool.layers):
        layer.copy_(torch.arange(layer.numel()).view(layer.shape) + 1000 * number)
    return pool


K, V = Stream("k", 3), Stream("v", 3)
OTHERS: dict[str, dict[str, Any]] = {
    "another axis": {"window_axis": "channel"},
    "streams in another order": {"streams": [V, K]},
    "streams of other names": {"streams": [K, Stream("g", 3)]},
    "one stream as wide as both": {"streams": [Stream("kv", 6)]},
    "other widths of the same sum": {"streams": [Stream("k", 2), Stream("v", 4)]},
    "another kernel": {"kernel_size": 3},
    "another dtype": {"dtype": torch.bfloat16},
    "fewer layers": {"num_layers": 1},
    "layers of other streams": {"streams": [[K, V], [V, K]]},
}


@pytest.mark.parametrize("case", OTHERS)
def test_track_11_a_state_goes_only_into_its_like(case: str) -> None:
    """Shapes agree where D = K-1, and where k and v are equally wide."""
    sent = filled(**OTHERS[case]).export([1, 2])
    pool = filled()
    before = [layer.clone() for layer in pool.layers]
    with pytest.raises(SlotError, match=r"the state is of '.*', this pool's of 'time K=4 .*2x"):
        pool.restore([2, 3], sent)
    for layer, old in zip(pool.layers, before, strict=True):
        assert_same_bits(layer, old, "state after a refused restore")


def test_track_11_a_square_window_is_not_transposed() -> None:
    """D = 3 and K = 4: read along the other axis, [1, 2, 3] would be three channels."""
    square = {"streams": [K], "num_layers": 1}
    time, channel = filled(**square), filled(**square, window_axis="channel")
    with pytest.raises(SlotError, match="the state is of 'time K=4"):
        channel.restore(1, time.export(1))


@pytest.mark.parametrize(
    "changes",
    [{"num_slots": 9}, {"max_requests": 1}, {"max_draft_tokens": 3, "window_layout": "inputs"}],
)
def test_what_is_no_part_of_the_state_does_not_matter(changes: dict[str, Any]) -> None:
    pool, other = filled(), filled(**changes)
    other.restore([3, 1], pool.export([1, 2]))
    for layer, source in zip(other.layers, pool.layers, strict=True):
        assert_same_bits(layer[[3, 1]], source[[1, 2]], "restored slots")


def test_a_state_travels() -> None:
    pool = filled()
    sent = pool.export([1, 2])
    assert sent.fingerprint == "time K=4 float32 2x(k=3, v=3)"
    assert (len(sent), [*sent][1] is sent[1]) == (2, True)
    saved = io.BytesIO()
    torch.save(sent, saved)
    saved.seek(0)
    with torch.serialization.safe_globals([ExportedState]):
        loaded = torch.load(saved)
    apart = ExportedState(sent.fingerprint, [layer.clone() for layer in sent])
    for state in (loaded, pickle.loads(pickle.dumps(sent)), apart):
        other = filled()
        for layer in other.layers:
            layer.zero_()
        other.restore([3, 1], state)
        for layer, source in zip(other.layers, pool.layers, strict=True):
            assert_same_bits(layer[[3, 1]], source[[1, 2]], "restored slots")


class Raising(Tensor):
    """Raises in every operator."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("not with me")


def quantised(value: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(value, 0.1, 0, torch.qint8)


BAD: dict[str, Any] = {
    "meta": lambda value: value.to("meta"),
    "sparse": lambda value: value.to_sparse(),
    "mkldnn": lambda value: value.to_mkldnn(),
    "quantised": lambda value: quantised(value),
    "a subclass that raises": lambda value: value.as_subclass(Raising),
    "another dtype": lambda value: value.half(),
    "another shape": lambda value: value[:, 1:],
    "a list": lambda value: value.tolist(),
    "nothing": lambda value: None,
}


@pytest.mark.parametrize("case", BAD)
def test_err_2_no_layer_is_written_when_a_later_one_is_refused(case: str) -> None:
    pool = filled()
    good = pool.export([1, 2])
    before = [layer.clone() for layer in pool.layers]
    with pytest.raises(SlotError, match="restore: layer 1 "):
        pool.restore([2, 3], replace(good, layers=(good[0] + 1, BAD[case](good[1]))))
    for layer, old in zip(pool.layers, before, strict=True):
        assert_same_bits(layer, old, "state after a refused restore")


def test_err_2_a_part_of_the_pool_is_read_before_it_is_written() -> None:
    pool = filled()
    expected = [layer[[1, 2]].clone() for layer in pool.layers]
    views = ExportedState(pool.spec.fingerprint, [layer[1:3] for layer in pool.layers])
    pool.restore([2, 3], views)
    for layer, value in zip(pool.layers, expected, strict=True):
        assert_same_bits(layer[2:4], value, "restored slots")


def test_err_4_a_restored_state_holds_no_graph() -> None:
    """Layers of different width are tensors of their own, which would take a grad_fn."""
    pool = filled(streams=[[K], [K, V]])
    sent = pool.export(1)
    values = [layer.clone().requires_grad_() * 2 for layer in sent]
    with torch.enable_grad():
        pool.restore(2, replace(sent, layers=values))
    for layer, value in zip(pool.layers, values, strict=True):
        assert layer.grad_fn is None
        assert not layer.requires_grad
        assert_same_bits(layer[2], value[0].detach(), "restored slot")
