"""oneDNN changes the time of a convolution and no value of its result."""

from __future__ import annotations

import pytest
import torch

import sconv
import sconv_cpu.backend
from sconv.plugin import ConvParams, convolve
from sconv_cpu import onednn

DTYPES = [torch.bfloat16, torch.float16]


def _require_onednn(dtype: torch.dtype, kernel_size: int) -> None:
    if not onednn.supports(64, dtype):
        pytest.skip("this build of torch has no oneDNN")
    if not onednn.matches_plain_torch(dtype, kernel_size):
        pytest.skip(f"oneDNN sums {dtype} taps in another order on this processor")


def _backend(dtype: torch.dtype, dim: int, kernel_size: int) -> sconv.Backend:
    spec = sconv.StateSpec(
        num_layers=1,
        streams=[sconv.Stream("conv", dim)],
        kernel_size=kernel_size,
        num_slots=40,
        max_requests=40,
        dtype=dtype,
    )
    return sconv.load_backend("cpu", spec=spec)


def _decode(backend: sconv.Backend, rows: list[int], x, weight, state, *, residual: bool):
    backend.pool.conv(0, "conv").copy_(state)
    batch = sconv.ForwardBatch.decode(slots=torch.tensor(rows))
    backend.init_forward_metadata(batch)
    y = backend.short_conv(
        x, weight, layer_id=0, stream="conv", forward_batch=batch, residual=residual
    )
    return y, backend.pool.conv(0, "conv").clone()


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("kernel_size", [2, 4, 7])
@pytest.mark.parametrize("dim", [16, 130, 512])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_has_the_same_bits_on_both_paths(monkeypatch, dtype, dim, kernel_size, residual):
    _require_onednn(dtype, kernel_size)
    _require_onednn(dtype, kernel_size + 1)
    backend = _backend(dtype, dim, kernel_size)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randperm(40, generator=generator)[:33].add(1).tolist()
    x = torch.randn(33, dim, generator=generator).to(dtype)
    weight = torch.randn(dim, kernel_size, generator=generator).to(dtype)
    state = torch.randn(41, kernel_size - 1, dim, generator=generator).to(dtype)

    calls = []
    monkeypatch.setattr(
        onednn,
        "convolve_image",
        lambda *a, _run=onednn.convolve_image, **k: calls.append(1) or _run(*a, **k),
    )
    monkeypatch.setattr(sconv_cpu.backend, "_MIN_ELEMENTS", 1 << 40)
    plain, plain_state = _decode(backend, rows, x, weight, state, residual=residual)
    assert not calls
    monkeypatch.setattr(sconv_cpu.backend, "_MIN_ELEMENTS", 0)
    fast, fast_state = _decode(backend, rows, x, weight, state, residual=residual)
    assert calls
    assert torch.equal(plain, fast)
    assert torch.equal(plain_state, fast_state)


@pytest.mark.parametrize("lengths", [[1], [2, 0, 1], [37], [3, 40, 1, 5]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_extend_has_the_same_bits_on_both_paths(monkeypatch, dtype, lengths):
    _require_onednn(dtype, 4)
    _require_onednn(dtype, 5)
    backend = _backend(dtype, 64, 4)
    generator = torch.Generator().manual_seed(2)
    wide = torch.randn(sum(lengths), 192, generator=generator).to(dtype)
    x = wide[:, 64:128]  # a slice of a wider projection: rows are strided
    weight = torch.randn(64, 4, generator=generator).to(dtype)
    batch = sconv.ForwardBatch.extend(
        slots=torch.tensor([7, 3, 11, 5][: len(lengths)]),
        extend_seq_lens=torch.tensor(lengths),
        extend_prefix_lens=torch.tensor([0, 4, 0, 9][: len(lengths)]),
    )
    results = []
    for least in (1 << 40, 0):
        monkeypatch.setattr(sconv_cpu.backend, "_MIN_ELEMENTS", least)
        backend.pool.conv(0, "conv").copy_(torch.arange(41.0)[:, None, None] / 8)
        backend.init_forward_metadata(batch)
        y = backend.short_conv(
            x, weight, layer_id=0, stream="conv", forward_batch=batch, residual=False
        )
        results.append((y, backend.pool.conv(0, "conv").clone()))
    (plain, plain_state), (fast, fast_state) = results
    assert torch.equal(plain, fast)
    assert torch.equal(plain_state, fast_state)


def test_another_order_of_taps_would_be_seen(monkeypatch):
    """The self-test compares bits, so a kernel that sums newest first fails it."""
    _require_onednn(torch.bfloat16, 4)
    onednn.matches_plain_torch.cache_clear()
    monkeypatch.setattr(
        onednn,
        "conv_rows",
        lambda inputs, weight: sum(
            inputs[:, j : j + inputs.shape[1] - 3].float() * weight[:, j].float()
            for j in reversed(range(4))
        ).to(inputs.dtype),
    )
    try:
        assert not onednn.matches_plain_torch(torch.bfloat16, 4)
    finally:
        onednn.matches_plain_torch.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
def test_doc_2_what_the_page_names_is_all_that_differs(dtype):
    """Signs of zeros, payloads of NaN, and what is below 2**-126."""
    _require_onednn(dtype, 4)
    special = [0.0, 1e-40, 1e-20, 6e-8, 1.0, 3e4, 1e19, 3e38, float("inf"), float("nan")]
    values = torch.tensor([sign * value for value in special for sign in (1, -1)]).to(dtype)
    count = len(values)
    generator = torch.Generator().manual_seed(3)
    inputs = values[torch.randint(count, (40, 23, 64), generator=generator)]
    weight = values[torch.randint(count, (64, 4), generator=generator)]
    inputs[0], weight[:2] = -0.0, 1.0
    plain = torch.empty(40, 20, 64, dtype=dtype)
    convolve(inputs, ConvParams(weight, None, None, False), out=plain)
    fast = onednn.conv_rows(inputs, weight)
    differs = (plain != fast) & ~(plain.isnan() & fast.isnan())
    for result in (plain, fast):
        assert bool((result[differs].double().abs() <= 2.0**-126).all()), result[differs]
    assert plain.isnan().any()
    assert plain.isinf().any()
    assert torch.signbit(plain[0, 0, 0])
