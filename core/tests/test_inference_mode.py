"""A backend that was first used under inference mode goes on without it, and vice versa."""

from __future__ import annotations

import pytest
import torch

from sconv.state.spec import StateSpec, Stream
from sconv.step.batch import ForwardBatch
from sconv.torch_backend.backend import TorchBackend


@pytest.mark.parametrize("axis", ["time", "channel"])
@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_may_change_between_steps(axis, first):
    spec = StateSpec(
        num_layers=1,
        streams=[Stream("conv", 8)],
        kernel_size=4,
        num_slots=2,
        max_requests=2,
        dtype=torch.float32,
        window_axis=axis,
        max_draft_tokens=3,
    )
    weight, x = torch.ones(8, 4), torch.ones(3, 8)
    with torch.no_grad():
        backend = TorchBackend(spec=spec, device=torch.device("cpu"), pool=None)
        slots = backend.pool.alloc(1)
        for inference in (first, not first, first):
            with torch.inference_mode(inference):
                steps = (
                    ForwardBatch.extend(
                        slots=slots,
                        extend_seq_lens=torch.tensor([3]),
                        extend_prefix_lens=torch.tensor([0]),
                    ),
                    ForwardBatch.decode(slots=slots),
                    ForwardBatch.target_verify(slots=slots, draft_token_num=3),
                )
                for step in steps:
                    backend.init_forward_metadata(step)
                    tokens = x[:1] if step.tokens_per_row == 1 else x
                    y = backend.short_conv(tokens, weight, 0, "conv", step, None, None, False)
                kept = torch.tensor([1])
                backend.update_mamba_state_after_mtp_verify(kept, None, None, slots)
        assert y[-1].tolist() == [4.0] * 8
        assert backend.pool.layers[0][slots].eq(1).all()
