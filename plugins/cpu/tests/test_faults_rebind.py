"""Memory that an engine takes back between two steps, and gives again at another place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sconv import Backend, ConvStatePool, ForwardBatch, PoolError, SpecError, load_backend
from sconv.plugin import TorchBackend
from sconv.testing.digits import digit_spec, read_window, run_digits, set_window

ROWS = torch.tensor([1])


def memory(rows: int = 5, layers: int = 2) -> Tensor:
    return torch.zeros(layers, rows, 3, 1)


@pytest.fixture(params=["cpu", "plain"])
def backend(request: pytest.FixtureRequest) -> Any:
    spec = digit_spec(num_layers=2, num_slots=4, max_requests=4, max_draft_tokens=3)
    pool = ConvStatePool.adopt(spec, memory())
    pool.assign(1, 2)
    if request.param == "cpu":
        return load_backend("cpu", spec=spec, pool=pool)
    return Plain(spec, pool)


class Plain(TorchBackend):
    """The backend that others build on, called as an engine calls one."""

    def __init__(self, spec: Any, pool: ConvStatePool) -> None:
        super().__init__(spec=spec, device=torch.device("cpu"), pool=pool)

    def short_conv(self, x: Tensor, weight: Tensor, **options: Any) -> Tensor:  # type: ignore[override]
        return super().short_conv(x, weight, bias=None, activation=None, **options)

    def update_mamba_state_after_mtp_verify(self, *steps: Tensor, **options: Any) -> None:  # type: ignore[override]
        super().update_mamba_state_after_mtp_verify(*steps, None, None, **options)


def decode(backend: Backend, token: int) -> list[list[int]]:
    """Decode one token in both layers, which share nothing."""
    batch = ForwardBatch.decode(ROWS)
    backend.init_forward_metadata(batch)
    return [run_digits(backend, batch, [token], layer_id=layer, prepare=False) for layer in (0, 1)]


def test_slot_12_state_is_released_and_bound_anew_between_steps(backend: Backend) -> None:
    pool = backend.pool
    for layer in (0, 1):
        set_window(pool, 2, [1, 2, 3], layer_id=layer)
    first = pool.layers
    assert decode(backend, 4) == [[4321], [4321]]
    saved = pool.export(2)
    pool.release()
    for use in (lambda: decode(backend, 5), lambda: pool.export(2), lambda: pool.num_rows):
        with pytest.raises(PoolError, match=r"call pool.bind\(tensors\) first"):
            use()
    for layer in first:
        layer.fill_(9)
    pool.bind(memory(7))
    assert pool.num_rows == 7
    pool.restore(2, saved)
    assert decode(backend, 5) == [[5432], [5432]]
    assert [read_window(pool, 2, layer_id=layer) for layer in (0, 1)] == [[3, 4, 5]] * 2
    assert all(bool((layer == 9).all()) for layer in first)
    # Without a release, too; and a commit follows.
    set_window(pool, 2, [6, 7, 8], layer_id=1)
    second, third = pool.layers, memory()
    pool.bind(third)
    verify = ForwardBatch.target_verify(ROWS, ROWS, 2)
    for layer in (0, 1):
        set_window(pool, 2, [1, 1, 1], layer_id=layer)
    backend.init_forward_metadata(verify)
    for layer in (0, 1):
        run_digits(backend, verify, [2, 3], layer_id=layer, prepare=False)
    backend.update_mamba_state_after_mtp_verify(torch.tensor([1]), req_pool_indices=ROWS)
    assert third[:, 2, :, 0].tolist() == [[1, 2, 3]] * 2
    assert second[1][2, :, 0].tolist() == [6, 7, 8]


def test_slot_12_graphs_that_die_are_named(backend: Backend) -> None:
    pool = backend.pool
    backend.init_graph_state(4, 12)
    for batch in (
        ForwardBatch.decode(torch.tensor([1, 0])),
        ForwardBatch.target_verify(ROWS, ROWS, 2),
    ):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(batch)
    bound = pool.layers
    with pytest.raises(PoolError, match=r"\(decode of 2 rows, target_verify of 1 rows\) and"):
        pool.bind(memory())
    assert pool.layers is bound
    with pytest.raises(SpecError, match="3 layers, the spec has 2"):
        pool.bind(memory(layers=3), recapture=True)
    assert pool.layers is bound
    pool.release()
    with pytest.raises(PoolError, match="capture them all again"):
        pool.bind(memory())
    pool.bind(memory(), recapture=True)
    pool.bind(memory())


def test_slot_12_state_of_its_own_is_neither_bound_nor_released() -> None:
    pool = load_backend("cpu", spec=digit_spec()).pool
    bound = pool.layers
    for call in (pool.release, lambda: pool.bind(memory())):
        with pytest.raises(PoolError, match="this pool has its state"):
            call()
    assert pool.layers is bound
