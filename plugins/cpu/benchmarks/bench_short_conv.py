"""Speed of the CPU backend against the transformers fallback and a copy, in one run.

    pytest plugins/cpu/benchmarks/bench_short_conv.py --benchmark-json=short_conv.json

Every case times three things under one group: ``sconv``, ``fallback`` (what transformers runs
without an accelerator package: ``torch.cat``, a state copy and ``F.conv1d`` over ``[B, D, K]``,
with the residual added after it) and ``copy`` (a plain copy that reads and writes as many bytes as
the step must: x, y, and every window twice). Ratios within a group are the result; times depend on
the machine.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import sconv

K = 4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def _backend(dim: int, rows: int, dtype: torch.dtype) -> sconv.Backend:
    spec = sconv.StateSpec(
        num_layers=1,
        streams=[sconv.Stream("conv", dim)],
        kernel_size=K,
        num_slots=rows + 8,
        max_requests=rows + 8,
        dtype=dtype,
    )
    return sconv.load_backend("cpu", spec=spec)


def _scattered_slots(backend: sconv.Backend, rows: int) -> Tensor:
    order = torch.randperm(rows + 8, generator=torch.Generator().manual_seed(0))
    return backend.pool.alloc(rows + 8)[order][:rows]


def _copy(count: int, dtype: torch.dtype):
    source, target = torch.randn(count).to(dtype), torch.empty(count, dtype=dtype)
    return lambda: target.copy_(source)


@pytest.mark.parametrize("what", ["sconv", "fallback", "copy"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "dim"), [(1, 2048), (32, 2048), (256, 6144)])
def bench_decode(benchmark, rows, dim, dtype, what):
    benchmark.group = f"decode B={rows} D={dim} {dtype}"
    torch_dtype = DTYPES[dtype]
    weight = torch.randn(dim, K).to(torch_dtype)
    x = torch.randn(rows, dim).to(torch_dtype)
    if what == "copy":
        # x and y once, K-1 columns of state read and written: half of that is what a copy reads.
        benchmark(_copy(rows * dim * (1 + (K - 1)), torch_dtype))
    elif what == "fallback":
        state = torch.zeros(rows, dim, K, dtype=torch_dtype)
        token = x[:, :, None]

        def fallback():
            seen = torch.cat([state, token], dim=-1)
            state.copy_(seen[:, :, -K:])
            y = functional.conv1d(seen, weight[:, None], groups=dim)[:, :, -1:]
            return y + token

        benchmark(fallback)
    else:
        backend = _backend(dim, rows, torch_dtype)
        batch = sconv.ForwardBatch.decode(slots=_scattered_slots(backend, rows))
        backend.init_forward_metadata(batch)
        benchmark(
            lambda: backend.short_conv(x, weight, layer_id=0, stream="conv", forward_batch=batch)
        )


@pytest.mark.parametrize("what", ["sconv", "fallback", "copy"])
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
def bench_extend(benchmark, dtype, residual, what, tokens=4096, dim=2048):
    benchmark.group = f"extend T={tokens} D={dim} {dtype} {'residual' if residual else 'plain'}"
    torch_dtype = DTYPES[dtype]
    weight = torch.randn(dim, K).to(torch_dtype)
    x = torch.randn(tokens, dim).to(torch_dtype)
    if what == "copy":
        benchmark(_copy(tokens * dim, torch_dtype))
    elif what == "fallback":
        # As transformers' models call it: packed activations, transposed for the convolution and
        # back; the residual of Inkling is added in float32 before the only rounding.
        wide = torch.float32 if residual else torch_dtype
        state = torch.zeros(1, dim, K, dtype=wide)
        kernel = weight[:, None].to(wide)

        def fallback():
            hidden = x[None].to(wide).transpose(1, 2)
            seen = torch.cat([state, hidden], dim=-1)
            state.copy_(seen[:, :, -K:])
            y = functional.conv1d(seen, kernel, groups=dim)[:, :, -tokens:]
            y = y + hidden if residual else y
            state.zero_()
            return y.transpose(1, 2).to(torch_dtype)

        benchmark(fallback)
    else:
        backend = _backend(dim, 8, torch_dtype)
        batch = sconv.ForwardBatch.extend(
            slots=_scattered_slots(backend, 1),
            extend_seq_lens=torch.tensor([tokens]),
            extend_prefix_lens=torch.tensor([0]),
            num_tokens=tokens,
        )
        backend.init_forward_metadata(batch)
        benchmark(
            lambda: backend.short_conv(
                x, weight, layer_id=0, stream="conv", forward_batch=batch, residual=residual
            )
        )


def bench_conv_state_metadata(benchmark):
    backend = _backend(64, 8, torch.float32)
    batch = sconv.ForwardBatch.decode(slots=_scattered_slots(backend, 8))
    backend.init_forward_metadata(batch)
    # Many calls a round: reading the clock takes as long as one.
    benchmark.pedantic(
        backend.conv_state_metadata, args=(0, batch), rounds=200, iterations=1000, warmup_rounds=5
    )
