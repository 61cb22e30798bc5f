"""A model on ``cuda:1`` while ``cuda:0`` is current (DEV-1): values, and nothing on ``cuda:0``."""

from __future__ import annotations

import sys

import torch

from sconv import ForwardBatch, StateSpec, Stream
from sconv_cuda.backend import create


def main() -> None:
    if torch.cuda.device_count() < 2:
        sys.exit("two GPUs are needed")
    torch.cuda.set_device(0)
    there = torch.device("cuda", 1)
    spec = StateSpec(2, [Stream("s", 256)], 4, 4, 4, dtype=torch.float32, max_draft_tokens=2)
    x = torch.randn(4, 256, device=there)
    weight = torch.randn(256, 4, device=there)
    slots = torch.tensor([3, 1], device=there)
    used = torch.cuda.memory_allocated(0)
    backend = create(spec=spec, device=there, pool=None)
    state = torch.randn(2, 5, 3, 256, device=there)
    backend.pool.stacked.copy_(state)
    backend.warmup()
    batch = ForwardBatch.target_verify(slots=slots, seq_lens=slots, draft_token_num=2)
    backend.init_forward_metadata(forward_batch=batch)
    for layer in range(2):
        y = backend.short_conv(
            x=x, weight=weight, layer_id=layer, stream="s", forward_batch=batch, bias=None,
            activation=None, residual=True,
        )  # fmt: skip
        for row, slot in enumerate((3, 1)):
            history = torch.cat([state[layer, slot], x[2 * row : 2 * row + 2]]).double()
            expected = (history.unfold(0, 4, 1) * weight.double()).sum(2) + x[2 * row : 2 * row + 2]
            error = (y[2 * row : 2 * row + 2].double() - expected).norm() / expected.norm()
            assert error < 1e-6, float(error)
    backend.update_mamba_state_after_mtp_verify(
        last_correct_step_indices=torch.tensor([1, 0], device=there),
        mamba_track_indices=None,
        mamba_steps_to_track=None,
        req_pool_indices=slots,
    )
    assert torch.equal(backend.pool.layers[1][3, 1:], x[:2])
    assert torch.equal(backend.pool.layers[0][1, 2], x[2])
    batch = ForwardBatch.decode(slots=slots)
    backend.init_forward_metadata(forward_batch=batch)
    backend.short_conv(
        x=x[:2], weight=weight, layer_id=0, stream="s", forward_batch=batch, bias=None,
        activation="silu", residual=False,
    )  # fmt: skip
    assert torch.equal(backend.pool.layers[0][3, 2], x[0])
    torch.cuda.synchronize(there)
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) == used
    print("cuda:1 while cuda:0 is current: ok", torch.cuda.get_device_name(1))


if __name__ == "__main__":
    main()
