"""The same work elsewhere: the CPU backend, and dense batches as causal-conv1d takes them.

    python compare.py --json results.json

* Random steps of all modes in a row on two backends, this one and the CPU's, from equal windows:
  states must be equal bit for bit, outputs to float32 arithmetic and one rounding, commits
  included.
* Equal-length batches ``[B, D, T]`` with initial and final states, as ``causal_conv1d_fn`` and
  ``causal_conv1d_update`` take them, written here with torch's own grouped convolution in float64.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from typing import Any

import torch
from harness import DEVICE, build, machine
from torch import Tensor
from torch.nn import functional

import sconv
from sconv import ForwardBatch, StateSpec, Stream
from sconv.testing.harness import output_bound

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DRAFTS, ROWS = 4, 6


class Pair:
    """The backend under test and the CPU backend, with equal windows and weights."""

    def __init__(self, seed: int) -> None:
        self.random = pick = random.Random(seed)
        torch.manual_seed(seed)
        self.dims = pick.choice(((512,), (64, 136), (65, 3)))
        self.kernel_size = pick.choice((2, 3, 4, 4, 4, 8))
        self.dtype = pick.choice(DTYPES)
        spec = StateSpec(
            num_layers=1,
            streams=[Stream(f"s{i}", dim) for i, dim in enumerate(self.dims)],
            kernel_size=self.kernel_size,
            num_slots=2 * ROWS,
            max_requests=2 * ROWS,
            dtype=self.dtype,
            window_axis=pick.choice(("time", "channel")),
            max_draft_tokens=DRAFTS,
            track_interval=4,
            chunk_size=2,
        )
        self.backends = (build(spec), sconv.load_backend("cpu", spec=spec))
        window = torch.randn(self.backends[1].pool.layers[0].shape).to(self.dtype)
        for backend in self.backends:
            backend.pool.layers[0].copy_(window)
        self.weights = [torch.randn(dim, self.kernel_size).to(self.dtype) for dim in self.dims]
        self.options = {
            "activation": pick.choice((None, "silu")),
            "residual": pick.choice((True, False)),
        }

    def step(self, mode: str) -> None:
        pick = self.random
        slots = pick.sample(range(1, ROWS + 1), pick.randint(1, ROWS))
        before = [pick.choice((0, 3, 8)) for _ in slots]
        drafts = pick.randint(2, DRAFTS)
        lengths = [pick.choice((0, 1, 2, 5, 17)) for _ in slots]
        accepts = [pick.randint(-1, drafts) for _ in slots]
        targets = pick.sample(range(ROWS + 1, 2 * ROWS + 1), len(slots))
        tokens = {"decode": len(slots), "extend": sum(lengths)}.get(mode, len(slots) * drafts)
        xs = [torch.randn(tokens, dim).to(self.dtype) for dim in self.dims]
        found = []
        for backend in self.backends:

            def on(
                values: list[int], dtype: torch.dtype = torch.int64, to: Any = backend
            ) -> Tensor:
                return torch.tensor(values, dtype=dtype, device=to.device)

            track = {"mamba_track_indices": on(targets)}
            match mode:
                case "decode":
                    batch = ForwardBatch.decode(slots=on(slots), seq_lens=on(before), **track)
                case "extend":
                    batch = ForwardBatch.extend(
                        slots=on(slots),
                        extend_seq_lens=on(lengths),
                        extend_prefix_lens=on(before),
                        num_tokens=tokens,
                        **track,
                    )
                case "draft":
                    batch = ForwardBatch.draft_extend(
                        slots=on(slots),
                        seq_lens=on(before),
                        draft_token_num=drafts,
                        num_accept_tokens=on(accepts, torch.int32),
                        **track,
                    )
                case _:
                    batch = ForwardBatch.target_verify(slots=on(slots), draft_token_num=drafts)
            backend.init_forward_metadata(batch)
            ys = [
                backend.short_conv(
                    x.to(backend.device),
                    weight.to(backend.device),
                    layer_id=0,
                    stream=f"s{i}",
                    forward_batch=batch,
                    **self.options,
                )
                for i, (x, weight) in enumerate(zip(xs, self.weights, strict=True))
            ]
            if mode == "verify":
                steps = on([min(accept, drafts - 1) for accept in accepts])
                backend.update_mamba_state_after_mtp_verify(
                    steps, on(targets), steps.clone(), req_pool_indices=on(slots)
                )
            found.append(([y.cpu() for y in ys], backend.pool.layers[0].cpu()))
        (mine, state), (theirs, their_state) = found
        for y, other, x, weight in zip(mine, theirs, xs, self.weights, strict=True):
            # Windows hold standard normal numbers: this is the size of the sum's terms.
            size = torch.full(y.shape, 6.0 * float(weight.abs().sum(1).max() + 1)).double()
            bound = 2 * output_bound(other.double(), size, x.dtype, self.kernel_size)
            worst = float(((y.double() - other.double()).abs() - bound).max()) if y.numel() else -1
            assert worst <= 0, f"{mode}: {worst} beyond both roundings"
        assert torch.equal(state[1:], their_state[1:]), f"{mode}: states differ"


def dense(rows: int, length: int, dim: int, kernel_size: int, dtype: torch.dtype) -> float:
    """An equal-length batch with initial and final states; returns the relative error."""
    spec = StateSpec(1, [Stream("s", dim)], kernel_size, rows, rows, dtype=dtype)
    backend = build(spec)
    x = torch.randn(rows, length, dim, device=DEVICE).to(dtype)
    weight = torch.randn(dim, kernel_size, device=DEVICE).to(dtype)
    bias = torch.randn(dim, device=DEVICE).to(dtype)
    initial = torch.randn(rows, kernel_size - 1, dim, device=DEVICE).to(dtype)
    backend.pool.layers[0][1:] = initial
    slots = torch.arange(1, rows + 1, device=DEVICE)
    if length == 1:
        batch = ForwardBatch.decode(slots=slots)
    else:
        lengths = torch.full((rows,), length, device=DEVICE)
        batch = ForwardBatch.extend(
            slots=slots,
            extend_seq_lens=lengths,
            extend_prefix_lens=torch.ones_like(lengths),
            num_tokens=rows * length,
        )
    backend.init_forward_metadata(batch)
    y = backend.short_conv(
        x.view(-1, dim),
        weight,
        layer_id=0,
        stream="s",
        forward_batch=batch,
        bias=bias,
        activation="silu",
        residual=False,
    )
    whole = torch.cat([initial, x], 1).double().transpose(1, 2)  # [B, D, K-1 + T]
    expected = functional.conv1d(whole, weight.double()[:, None], bias.double(), groups=dim)
    expected = functional.silu(expected).transpose(1, 2).reshape(-1, dim)
    final = torch.cat([initial, x], 1)[:, 1 - kernel_size :]
    assert torch.equal(backend.pool.layers[0][1:], final), "final states differ"
    return float((y.double() - expected).norm() / expected.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000, help="of each mode")
    parser.add_argument("--json")
    options = parser.parse_args()
    modes = ("extend", "decode", "verify", "draft")
    pairs = [Pair(seed) for seed in range(min(24, options.steps))]
    for number in range(options.steps):
        for mode in modes:
            pairs[number % len(pairs)].step(mode)
    report: dict[str, Any] = {"machine": machine(), "steps": options.steps * len(modes)}
    print(report["steps"], "steps equal those of the CPU backend", flush=True)
    worst: dict[str, float] = {}
    shapes = [(4, 512, 2048), (2, 4096, 1024), (32, 1, 6144), (3, 77, 130), (16, 2, 64)]
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        errors = [dense(*shape, width, dtype) for shape in shapes for width in (2, 3, 4)]
        worst[name] = max(errors)
        assert worst[name] <= {"bfloat16": 2e-3, "float16": 1e-3, "float32": 1e-6}[name], errors
    report["dense batches"] = {"cases": 3 * len(shapes) * 3, "relative error": worst}
    print("dense batches", report["dense batches"], flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
