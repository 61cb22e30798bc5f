"""Graphs of ``torch.npu.NPUGraph``, captured by the code that captures CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sconv import ForwardBatch, capture, has_graphs, load_backend
from sconv.testing.digits import digit_inputs, digit_spec, digit_weight, fill_pool, read_digits
from sconv.testing.digits import read_window as window
from sconv_contract.simulated_npu import StaleAddress


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="npu")


def test_a_device_chooses_its_kind_of_graph() -> None:
    assert has_graphs(torch.device("npu:1"))
    captured = capture(torch.device("npu"), lambda: torch.ones(2, device="npu") + 1)
    assert type(captured.graph) is torch.npu.NPUGraph
    captured.replay()
    assert captured.result.tolist() == [2, 2]


def test_replays_follow_what_the_static_tensors_hold() -> None:
    backend = load_backend("ascend", spec=digit_spec(max_requests=3))
    backend.init_graph_state(3, 3)
    pool, weight = backend.pool, digit_weight(device="npu")
    rows, x = ints(0, 0, 0), digit_inputs([9, 9, 9], device="npu")
    batch = ForwardBatch.decode(rows)

    def step() -> Tensor:
        backend.init_forward_metadata_in_graph(batch)
        return backend.short_conv(
            x, weight, layer_id=0, stream="a", forward_batch=batch, residual=False
        )

    # Warm-up and capture are on the dummy's row: they change no request.
    fill_pool(pool, {2: [1, 2, 3], 7: [4, 5, 6]}, {1: 2, 3: 7})
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    captured = capture(backend.device, step)
    meta = backend.conv_state_metadata(0, batch)
    assert (window(pool, 2), window(pool, 7)) == ([1, 2, 3], [4, 5, 6])

    for names, tokens, digits in (
        ([3, 1, 0], [7, 4, 0], [7654, 4321]),
        ([1, 0, 0], [5, 0, 0], [5432]),
    ):
        rows.copy_(ints(*names))
        x.copy_(digit_inputs(tokens, device="npu"))
        backend.init_forward_metadata_out_graph(batch)
        captured.replay()
        y = captured.result[: len(digits)]
        assert read_digits(y) == digits
    assert (window(pool, 2), window(pool, 7)) == ([3, 4, 5], [5, 6, 7])

    # What the engine and the backend hold is still what was captured.
    captured.graph.assert_bound(
        rows=rows, x=x, state=pool.layers[0], slots=meta.cache_indices, safe=meta.safe_idx
    )
    with pytest.raises(StaleAddress):
        captured.graph.assert_bound(rows=rows.clone())
