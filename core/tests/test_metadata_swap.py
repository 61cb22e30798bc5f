"""``forward_metadata`` is writable: an engine may put an earlier step back and go on with it."""

from __future__ import annotations

import torch

from sconv.state.spec import StateSpec, Stream
from sconv.step.batch import ForwardBatch
from sconv.torch_backend.backend import TorchBackend

K, D = 4, 3


def _backend() -> TorchBackend:
    spec = StateSpec(
        num_layers=1,
        streams=[Stream("conv", D)],
        kernel_size=K,
        num_slots=4,
        max_requests=4,
        dtype=torch.float32,
        max_draft_tokens=3,
    )
    return TorchBackend(spec=spec, device=torch.device("cpu"), pool=None)


def _run(backend: TorchBackend, batch: ForwardBatch, x: torch.Tensor, weight: torch.Tensor):
    return backend.short_conv(x, weight, 0, "conv", batch, None, None, True)


def test_a_step_that_is_put_back_runs_as_if_it_had_just_been_prepared():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(D, K, generator=generator)
    prompt = torch.randn(5 + 2, D, generator=generator)
    draft = torch.randn(2 * 3, D, generator=generator)
    plain, swapped = _backend(), _backend()
    slots = plain.pool.alloc(2)
    swapped.pool.alloc(2)
    extend = ForwardBatch.extend(
        slots=slots,
        extend_seq_lens=torch.tensor([5, 2]),
        extend_prefix_lens=torch.tensor([0, 0]),
        num_tokens=7,
    )
    verify = ForwardBatch.target_verify(slots=slots, draft_token_num=3)

    plain.init_forward_metadata(extend)
    first = _run(plain, extend, prompt, weight)
    plain.init_forward_metadata(verify)
    second = _run(plain, verify, draft, weight)

    swapped.init_forward_metadata(extend)
    of_extend = swapped.forward_metadata
    swapped.init_forward_metadata(verify)
    of_verify = swapped.forward_metadata
    swapped.forward_metadata = of_extend
    assert torch.equal(_run(swapped, extend, prompt, weight), first)
    swapped.forward_metadata = of_verify
    assert torch.equal(_run(swapped, verify, draft, weight), second)
    assert torch.equal(swapped.pool.layers[0], plain.pool.layers[0])
