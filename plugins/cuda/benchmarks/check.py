"""Correctness on a GPU: random cases of every mode against float64, eager and as graph replays.

A configuration fixes what a kernel is compiled for; its cases differ in everything else. Each has
one graph per mode, captured on other data and in the order extend, verify, draft-extend, decode.
Before every run the outputs' memory, the unused slots and the verify windows are NaN.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from configs import CONFIGS, DRAFTS, ROWS, TOKENS, Config
from draws import Draws
from harness import DEVICE, build, compile_all, machine, record
from oracle import Case, committed, outputs, state
from torch import Tensor

import sconv
from sconv import ForwardBatch, StateSpec, Stream
from sconv.testing.poison import PoisonedMemory, poison_

MODES = ("extend", "verify", "draft", "decode")
MOST = {"bfloat16": 2e-3, "float16": 1e-3, "float32": 1e-6}


class Run:
    """One configuration: a backend, static inputs, and one graph per mode."""

    def __init__(self, config: Config, seed: int) -> None:
        self.config = config
        self.generator = torch.Generator(DEVICE).manual_seed(seed)
        streams = [Stream(f"s{i}", dim) for i, dim in enumerate(config.dims)]
        self.spec = StateSpec(
            num_layers=2,
            streams=streams,
            kernel_size=config.kernel_size,
            num_slots=24,
            max_requests=16,
            dtype=config.state,
            window_axis=config.axis,
            max_draft_tokens=DRAFTS,
            draft_topk=DRAFTS if config.has("tree") else 1,
            track_interval=6,
            chunk_size=2,
            window_layout=config.layout,
        )
        self.backend = build(self.spec)
        self.backend.init_graph_state(ROWS, TOKENS)
        self.draws = Draws(config, self.backend.pool, seed)
        self.weights = {
            key: self.draw(dim, config.kernel_size).to(config.weight) for key, dim in self.keys()
        }
        self.biases = {
            key: self.draw(dim).to(config.weight) if config.has("bias") else None
            for key, dim in self.keys()
        }
        self.graphs: dict[str, Any] = {}
        self.errors: dict[str, list[float]] = {}

    def keys(self) -> list[tuple[tuple[int, str], int]]:
        return [
            ((layer, f"s{i}"), dim) for layer in range(2) for i, dim in enumerate(self.config.dims)
        ]

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=DEVICE)

    def inputs(self, tokens: int) -> dict[tuple[int, str], Tensor]:
        found = {}
        for key, dim in self.keys():
            # The gap keeps rows aligned where the width does, and only there.
            wide = self.draw(tokens, 2 * dim + 8).to(self.config.x)
            found[key] = (
                wide[:, dim : 2 * dim] if self.config.has("strided") else wide[:, :dim].contiguous()
            )
        return found

    def convolve(
        self, batch: ForwardBatch, inputs: dict[tuple[int, str], Tensor]
    ) -> dict[tuple[int, str], Tensor]:
        config, found = self.config, {}
        for layer in range(2):
            keys = [(layer, f"s{i}") for i in range(len(config.dims))]
            if config.has("group"):
                ys = self.backend.short_conv_group(
                    [inputs[key] for key in keys],
                    [self.weights[key] for key in keys],
                    layer_id=layer,
                    streams=[key[1] for key in keys],
                    forward_batch=batch,
                    biases=[self.biases[key] for key in keys],
                    activation="silu" if config.has("silu") else None,
                    residual=config.has("residual"),
                )
            else:
                ys = [
                    self.backend.short_conv(
                        inputs[key],
                        self.weights[key],
                        layer_id=layer,
                        stream=key[1],
                        forward_batch=batch,
                        bias=self.biases[key],
                        activation="silu" if config.has("silu") else None,
                        residual=config.has("residual"),
                    )
                    for key in keys
                ]
            found.update(zip(keys, ys, strict=True))
        return found

    def pools(self) -> dict[tuple[int, str], Tensor]:
        axis = self.spec.window_axis
        return {
            key: sconv.reference.time_axis(self.backend.pool.conv(*key), axis).clone()
            for key, _ in self.keys()
        }

    def refill(self, case: Case) -> None:
        """New windows in the slots of the case, NaN in all others."""
        used = [slot for slot in case.slots if slot > 0]
        for layer in self.backend.pool.layers:
            poison_(layer)
            layer[used] = self.draw(len(used), *layer.shape[1:]).to(layer.dtype)

    def compare(
        self,
        what: str,
        case: Case,
        inputs: dict[tuple[int, str], Tensor],
        before: dict[tuple[int, str], Tensor],
        ys: dict[tuple[int, str], Tensor],
    ) -> None:
        after, config = self.pools(), self.config
        for key, y in ys.items():
            x = inputs[key]
            expected, bound = outputs(
                case,
                x,
                before[key],
                self.weights[key],
                self.biases[key],
                config.has("silu"),
                config.has("residual"),
            )
            error = (y.double() - expected).abs()
            worst = float((error - bound).max())
            assert worst <= 0, f"{what} {key}: {worst} more than a rounding\n{case}\n{config}"
            kind = str(config.x).removeprefix("torch.")
            sums = self.errors.setdefault(kind, [0.0, 0.0])
            sums[0] += float(error.square().sum())
            sums[1] += float(expected.square().sum())
            same(after[key], state(case, x, before[key]), f"{what} state {key}\n{case}\n{config}")

    def eager(self, mode: str) -> None:
        case, names = self.draws.case(mode, full=False)
        self.refill(case)
        with PoisonedMemory():
            inputs, before = self.inputs(case.num_tokens), self.pools()
            batch = self.draws.batch(case, names, full=False)
            self.backend.init_forward_metadata(batch)
            ys = self.convolve(batch, inputs)
            self.compare("eager " + mode, case, inputs, before, ys)
            if mode == "verify":
                self.commit("eager", case, names, inputs, before)

    def commit(
        self,
        what: str,
        case: Case,
        names: list[int],
        inputs: dict[tuple[int, str], Tensor],
        before: dict[tuple[int, str], Tensor],
    ) -> None:
        self.backend.update_mamba_state_after_mtp_verify(
            torch.tensor(case.last_steps, device=DEVICE, dtype=torch.int32),
            torch.tensor(case.track_slots, device=DEVICE),
            torch.tensor(case.track_steps, device=DEVICE),
            req_pool_indices=torch.tensor(names, device=DEVICE),
        )
        after = self.pools()
        for key in inputs:
            expected = committed(case, inputs[key], before[key])
            same(after[key], expected, f"{what} commit {key}\n{case}\n{self.config}")

    def warm(self, mode: str) -> None:
        """Compile what the graph of a mode needs."""
        case, names = self.draws.case(mode, full=True)
        batch = self.draws.batch(case, names, full=True)
        self.backend.init_forward_metadata(batch)
        self.convolve(batch, self.inputs(case.num_tokens))

    def capture(self, mode: str) -> None:
        case, names = self.draws.case(mode, full=True)
        self.refill(case)
        held = self.inputs(case.num_tokens)
        batch = self.draws.batch(case, names, full=True)
        self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.backend.init_forward_metadata_in_graph(batch)
            ys = self.convolve(batch, held)
        self.graphs[mode] = (graph, held, ys)

    def replay(self, mode: str) -> None:
        case, names = self.draws.case(mode, full=True)
        self.refill(case)
        graph, held, ys = self.graphs[mode]
        inputs, before = self.inputs(case.num_tokens), self.pools()
        for key, value in inputs.items():
            held[key].copy_(value)
            poison_(ys[key])
        for windows in self.backend.pool.windows.layers:
            poison_(windows)
        batch = self.draws.batch(case, names, full=True)
        self.backend.init_forward_metadata_out_graph(batch, in_capture=False)
        graph.replay()
        self.compare("replay " + mode, case, inputs, before, ys)
        if mode == "verify":
            self.commit("replay", case, names, inputs, before)


def same(one: Tensor, other: Tensor, what: str) -> None:
    """Compare bits, NaN included; row 0 means nothing."""
    width = {2: torch.int16, 4: torch.int32}[one.element_size()]
    differs = one[1:].contiguous().view(width) != other[1:].contiguous().view(width)
    assert not bool(differs.any()), f"{what}: {int(differs.sum())} differences"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="of each mode, eager and replayed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json")
    options = parser.parse_args()
    runs = [Run(config, options.seed * 1000 + i) for i, config in enumerate(CONFIGS)]
    jobs: dict[Any, Any] = {}
    for run in runs:
        for mode in MODES:
            for _ in range(4):

                def once(run: Run = run, mode: str = mode) -> None:
                    case, names = run.draws.case(mode, full=True)
                    batch = run.draws.batch(case, names, full=True)
                    run.backend.init_forward_metadata(batch)
                    run.convolve(batch, run.inputs(case.num_tokens))
                    if mode == "verify":
                        nothing = dict.fromkeys(())
                        run.commit("", case, names, nothing, nothing)

                record(run.backend, once, jobs)
    if DEVICE == "cuda":
        print(f"{len(jobs)} compilations in {compile_all(jobs):.1f} s", flush=True)
    report: dict[str, Any] = {"machine": machine(), "cases": {}}
    failed = 0
    for run in runs:
        for mode in MODES:
            run.warm(mode)
        for mode in MODES if DEVICE == "cuda" else ():
            run.capture(mode)
    per_config = -(-options.cases // len(runs))
    for mode in MODES:
        for what in ("eager", "replay") if DEVICE == "cuda" else ("eager",):
            done = 0
            for run in runs:
                for _ in range(per_config):
                    try:
                        getattr(run, what)(mode)
                    except AssertionError as exc:
                        failed += 1
                        if failed <= 6:
                            print("FAILED", str(exc)[:1500], flush=True)
                        break
                    done += 1
            report["cases"][f"{mode} {what}"] = done
    sums: dict[str, list[float]] = {}
    for run in runs:
        for kind, (error, size) in run.errors.items():
            both = sums.setdefault(kind, [0.0, 0.0])
            both[0], both[1] = both[0] + error, both[1] + size
    report["relative error"] = {kind: (error / size) ** 0.5 for kind, (error, size) in sums.items()}
    for kind, error in report["relative error"].items():
        failed += error > MOST[kind]
    print(
        json.dumps(report["cases"]),
        json.dumps(report["relative error"]),
        "failed:",
        failed,
        flush=True,
    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
