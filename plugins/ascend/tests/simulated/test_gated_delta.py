"""The gated delta rule on the simulated device: the CPU's results, and nothing read on the host."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import sconv
from sconv import ForwardBatch
from sconv_contract import simulated_npu

TREE = [[-1, 0, 0, 1], [-1, 0, 1, 1], [-1, 0, 1, 2]]


def steps(device: str, gate: str, log: int) -> list[Tensor]:
    """Run every mode, and return outputs and states."""
    delta = sconv.GatedDelta(2, 4, 16, 8, gate=gate, log=log)  # type: ignore[arg-type]
    spec = sconv.StateSpec(
        num_layers=1,
        streams=[sconv.Stream("qkv", 8)],
        kernel_size=4,
        num_slots=6,
        max_requests=6,
        max_draft_tokens=4,
        draft_topk=2,
        track_interval=4,
        chunk_size=4,
        recurrent=delta,
    )
    backend = sconv.load_backend({"cpu": "cpu", "npu": "ascend"}[device], spec=spec)
    backend.pool.alloc(6)
    generator = torch.Generator().manual_seed(3)
    results = []

    def ids(*values: object) -> Tensor:
        return torch.tensor(values).to(device)

    def run(batch: ForwardBatch, tokens: int) -> None:
        wide = (16,) if gate == "channel" else ()
        shapes = [(2, 16), (2, 16), (4, 8), (4, *wide), (4,)]
        given = [
            torch.randn(tokens, *shape, generator=generator).to(device) for shape in shapes
        ] + [torch.zeros(4, device=device), torch.ones(4, *wide, device=device)]
        backend.init_forward_metadata(batch)
        # An eager extend reads its longest row, once.
        graph = device == "npu" and not batch.forward_mode.is_ragged
        with simulated_npu.region(in_graph=True) if graph else nullcontext():
            out = backend.gated_delta(*given, layer_id=0, forward_batch=batch)
        results.append(out.cpu())

    run(
        ForwardBatch.extend(
            slots=ids(1, 0, 3, -1),
            extend_seq_lens=ids(19, 1, 2, 3),
            extend_prefix_lens=ids(0, 0, 0, 0),
            num_tokens=25,
            mamba_track_indices=ids(5, 0, -1, 6),
            mamba_track_seqlens=ids(16, 1, -1, 2),
        ),
        25,
    )
    run(ForwardBatch.decode(slots=ids(3, -1, 1)), 3)
    for parents in (None, ids(*TREE)):
        for kept in ((1, 3, 0), (-1, 0, 2)):
            run(
                ForwardBatch.target_verify(slots=ids(1, 0, 3), draft_token_num=4, parents=parents),
                12,
            )
            given = ids(*kept), ids(-1, -1, 6), ids(-1, -1, 0), ids(1, 0, 3)
            with simulated_npu.region(in_graph=True) if device == "npu" else nullcontext():
                backend.update_mamba_state_after_mtp_verify(*given)
    run(ForwardBatch.draft_extend(None, ids(3, 0), 4, ids(2, -1), slots=ids(1, 2)), 8)
    return [*results, *(each.cpu() for each in backend.pool.export([1, 3, 5, 6]).recurrent)]


@pytest.mark.parametrize("gate", ["scalar", "channel"])
@pytest.mark.parametrize("log", [0, 5])
def test_every_mode_is_the_cpus(gate: str, log: int) -> None:
    for got, want in zip(steps("npu", gate, log), steps("cpu", gate, log), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
