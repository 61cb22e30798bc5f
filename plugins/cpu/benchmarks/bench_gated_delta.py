"""Speed of a verify step of the gated delta rule against the transformers fallback, in one run.

    pytest plugins/cpu/benchmarks/bench_gated_delta.py --benchmark-json=gated_delta.json

Every case times, under one group, ``sconv verify`` (4 drafts per row from one read of the state),
the same ``with commit`` of all four, and ``fallback``: four decode steps of what transformers runs
without an accelerator package. Qwen3-Next's shapes: 16 key heads, 32 value heads of 128 x 128.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

import sconv

DRAFTS, KEY_HEADS, VALUE_HEADS, DIM = 4, 16, 32, 128


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def _inputs(tokens: int, heads: int, gate: str) -> list[torch.Tensor]:
    wide = (DIM,) if gate == "channel" else ()
    shapes = [(heads, DIM), (heads, DIM), (VALUE_HEADS, DIM), (VALUE_HEADS, *wide), (VALUE_HEADS,)]
    return [torch.randn(tokens, *shape) for shape in shapes]


@pytest.mark.parametrize("what", ["sconv verify", "with commit", "fallback"])
@pytest.mark.parametrize("gate", ["scalar", "channel"])
@pytest.mark.parametrize("rows", [1, 8])
def bench_verify(benchmark, rows, gate, what):
    benchmark.group = f"verify B={rows} dtn={DRAFTS} {gate}"
    heads = VALUE_HEADS if gate == "channel" else KEY_HEADS
    q, k, v, raw, beta = _inputs(rows * DRAFTS, heads, gate)
    if what == "fallback":
        benchmark(_fallback(rows, q, k, v, raw, beta))
        return
    spec = sconv.StateSpec(
        num_layers=1,
        streams=[sconv.Stream("qkv", 8)],
        kernel_size=4,
        num_slots=rows,
        max_requests=rows,
        max_draft_tokens=DRAFTS,
        recurrent=sconv.GatedDelta(heads, VALUE_HEADS, DIM, DIM, gate=gate),
    )
    backend = sconv.load_backend("cpu", spec=spec)
    slots = backend.pool.alloc(rows)
    batch = sconv.ForwardBatch.target_verify(slots=slots, draft_token_num=DRAFTS)
    backend.init_forward_metadata(batch)
    rate, bias = torch.randn(VALUE_HEADS), torch.randn(raw.shape[1:])
    last = torch.full((rows,), DRAFTS - 1)

    def step() -> None:
        backend.gated_delta(q, k, v, raw, beta, rate, bias, layer_id=0, forward_batch=batch)
        if what == "with commit":
            backend.update_mamba_state_after_mtp_verify(last, req_pool_indices=slots)

    benchmark(step)


def _fallback(rows, q, k, v, raw, beta):
    """Four steps of one token, gates activated already, which sconv does itself."""
    state = torch.randn(rows, VALUE_HEADS, DIM, DIM)
    q, k, v, beta = (each.unflatten(0, (rows, DRAFTS)) for each in (q, k, v, beta.sigmoid()))
    decay = -torch.nn.functional.softplus(raw).unflatten(0, (rows, DRAFTS))

    def steps() -> None:
        held = state
        for t in range(DRAFTS):
            step = [each[:, t : t + 1] for each in (q, k, v, decay, beta)]
            if decay.dim() == 4:
                _, held = _channel_step(*step, held)
            else:
                _, held = torch_recurrent_gated_delta_rule(
                    *step, held, output_final_state=True, use_qk_l2norm_in_kernel=True
                )

    return steps


def _channel_step(q, k, v, decay, beta, state):
    """The operators of the scalar fallback with a decay per channel of the key."""
    q, k, v, decay, beta = (each[:, 0] for each in (q, k, v, decay, beta))
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    state = state * decay.exp()[..., None]
    error = (v - (state * k[..., None]).sum(-2)) * beta[..., None]
    state = state + k[..., None] * error[..., None, :]
    return (state * (q * DIM**-0.5)[..., None]).sum(-2), state
