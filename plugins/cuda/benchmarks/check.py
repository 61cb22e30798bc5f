"""Correctness on a GPU: random cases of every mode against float64, eager and as graph replays.

A configuration fixes what a kernel is compiled for; its cases differ in everything else. Each has
one graph per mode, captured on other data and in the order extend, verify, draft-extend, decode.
Before every run the outputs' memory, the unused slots and the verify windows are NaN.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from harness import DEVICE, build, compile_all, machine, record
from oracle import Case, committed, outputs, state
from torch import Tensor

import sconv
from sconv import ForwardBatch, StateSpec, Stream
from sconv.testing.poison import PoisonedMemory, poison_

MODES = ("extend", "verify", "draft", "decode")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MOST = {"bfloat16": 2e-3, "float16": 1e-3, "float32": 1e-6}
ROWS, TOKENS, DRAFTS = 7, 160, 4


@dataclass
class Config:
    kernel_size: int
    dims: tuple[int, ...]
    axis: str
    state: torch.dtype
    x: torch.dtype
    weight: torch.dtype
    bias: bool
    silu: bool
    residual: bool
    strided: bool
    group: bool
    tree: bool
    links: bool = False


CONFIGS = [
    Config(4, (64, 136), "time", BF16, BF16, BF16, False, False, True, False, False, False),
    Config(4, (64, 136), "time", BF16, BF16, BF16, False, True, False, False, True, True),
    Config(4, (1024,), "time", BF16, BF16, BF16, True, True, True, True, False, True, True),
    Config(4, (64, 136), "channel", BF16, BF16, BF16, False, True, False, False, True, False),
    Config(4, (130, 3), "time", BF16, BF16, BF16, False, False, True, False, True, True),
    Config(4, (1, 65), "channel", FP32, FP32, FP32, True, True, False, True, False, True),
    Config(4, (512,), "time", FP32, FP32, FP32, True, False, True, False, False, False),
    Config(4, (512, 8), "time", FP32, BF16, FP32, True, False, True, False, True, True, True),
    Config(2, (264, 64), "time", BF16, BF16, BF16, False, True, False, False, False, False),
    Config(2, (33,), "channel", FP16, FP16, FP16, True, False, False, False, False, True),
    Config(3, (2048,), "channel", BF16, BF16, BF16, True, False, False, False, False, True),
    Config(3, (264,), "time", FP16, FP16, FP16, False, True, True, True, False, False),
    Config(8, (136, 264), "time", BF16, BF16, BF16, True, True, True, False, True, True),
    Config(8, (130,), "channel", BF16, FP32, BF16, False, False, True, True, False, False),
    Config(5, (64,), "time", FP16, BF16, FP32, True, False, True, False, False, True),
    Config(7, (72, 64), "time", FP32, FP16, BF16, False, True, False, True, True, True, True),
]


class Run:
    """One configuration: a backend, static inputs, and one graph per mode."""

    def __init__(self, config: Config, seed: int) -> None:
        self.config = config
        self.random = random.Random(seed)
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
            draft_topk=2 if config.tree else 1,
            track_interval=6,
            chunk_size=2,
        )
        self.backend = build(self.spec)
        self.backend.init_graph_state(ROWS, TOKENS)
        self.weights = {
            key: self.draw(dim, config.kernel_size).to(config.weight) for key, dim in self.keys()
        }
        self.biases = {
            key: self.draw(dim).to(config.weight) if config.bias else None
            for key, dim in self.keys()
        }
        self.static: dict[str, dict[str, Any]] = {}
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
                wide[:, dim : 2 * dim] if self.config.strided else wide[:, :dim].contiguous()
            )
        return found

    def case(self, mode: str, *, full: bool) -> tuple[Case, list[int]]:
        """Draw a step and its request rows; ``full`` ones have the shape of the graphs."""
        pick = self.random
        live = pick.sample(range(1, 25), 12)
        rows = ROWS if full else pick.randint(1, ROWS)
        slots = live[:rows]
        for _ in range(pick.randint(0, 2)):
            slots[pick.randrange(rows)] = -1
        names = pick.sample(range(1, 17), rows)
        pool = self.backend.pool
        pool.req_to_slot.fill_(-1)
        pool.req_to_slot[torch.tensor(names, device=DEVICE)] = torch.tensor(
            slots, dtype=torch.int32, device=DEVICE
        )
        before = [pick.choice((0, 1, 3, 5, 11, 30)) for _ in range(rows)]
        free = [slot for slot in range(1, 25) if slot not in live]
        targets = [pick.choice((slot, -1)) for slot in pick.sample(free, rows)]
        track = {"track_slots": targets} if pick.random() < 0.6 or full else {}
        match mode:
            case "decode":
                case = Case(mode, slots, [1] * rows, before, rows, **track)
            case "extend":
                lengths = [pick.choice((0, 1, 2, 3, 4, 9, 17, 40)) for _ in range(rows)]
                if pick.random() < 0.3:
                    lengths[pick.randrange(rows)] = 60
                while sum(lengths) > TOKENS:
                    lengths[pick.randrange(rows)] = 0
                tokens = TOKENS if full else sum(lengths) + pick.choice((0, 0, 3))
                case = Case(mode, slots, lengths, before, max(tokens, 1), **track)
                if track:
                    wanted = [
                        pick.randint(-1, old + new + 2)
                        for old, new in zip(before, lengths, strict=True)
                    ]
                    case.track_tokens = [
                        length - old if length >= 0 else -1
                        for length, old in zip(wanted, before, strict=True)
                    ]
            case _:
                drafts = DRAFTS if full else pick.randint(1, DRAFTS)
                case = Case(mode, slots, [drafts] * rows, before, rows * drafts)
                if mode == "draft":
                    case.accepts = [pick.randint(-1, drafts + 1) for _ in range(rows)]
                    case.track_slots = track.get("track_slots")
                    case.track_tokens = [
                        crossing(old, kept, 6)
                        for old, kept in zip(before, case.accepts, strict=True)
                    ]
                else:
                    if self.config.tree:
                        case.parents = [
                            [-1, *(pick.randint(0, node - 1) for node in range(1, drafts))]
                            for _ in range(rows)
                        ]
                    case.last_steps = [pick.randint(-1, drafts) for _ in range(rows)]
                    case.track_slots = targets
                    case.track_steps = [pick.randint(-1, drafts) for _ in range(rows)]
        return case, names

    def batch(self, case: Case, names: list[int], *, full: bool) -> ForwardBatch:
        """Build the batch; a full one in the static tensors of its graph."""

        def tensor(name: str, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
            fresh = torch.tensor(values, dtype=dtype, device=DEVICE)
            if not full:
                return fresh
            held = self.static.setdefault(case.mode, {}).setdefault(name, fresh)
            return held.copy_(fresh)

        rows = tensor("rows", names)
        before = tensor("before", case.before, torch.int32)
        targets = None
        if case.track_slots is not None and case.mode != "verify":
            targets = tensor("targets", case.track_slots)
        match case.mode:
            case "decode":
                return ForwardBatch.decode(rows, before, mamba_track_indices=targets)
            case "extend":
                until = None
                if targets is not None and case.track_tokens is not None:
                    until = tensor(
                        "until",
                        [
                            old + n if n >= 0 else -1
                            for old, n in zip(case.before, case.track_tokens, strict=True)
                        ],
                    )
                    case.track_tokens = [
                        n if old + n >= 0 and n >= 0 else -1
                        for old, n in zip(case.before, case.track_tokens, strict=True)
                    ]
                return ForwardBatch.extend(
                    rows,
                    tensor("lengths", case.lengths),
                    tensor("prefixes", case.before),
                    num_tokens=case.num_tokens,
                    mamba_track_indices=targets,
                    mamba_track_seqlens=until,
                )
            case "verify":
                tree: dict[str, Tensor] = {}
                if case.parents is not None and self.config.links:
                    child, sibling = links(case.parents)
                    tree["next_token"] = tensor("child", child)
                    tree["next_sibling"] = tensor("sibling", sibling)
                elif case.parents is not None:
                    tree["parents"] = tensor("parents", case.parents, torch.int32)
                return ForwardBatch.target_verify(rows, before, case.lengths[0], **tree)
            case _:
                return ForwardBatch.draft_extend(
                    rows,
                    before,
                    case.lengths[0],
                    tensor("accepts", case.accepts, torch.int32),
                    mamba_track_indices=targets,
                )

    def convolve(
        self, batch: ForwardBatch, inputs: dict[tuple[int, str], Tensor]
    ) -> dict[tuple[int, str], Tensor]:
        config, found = self.config, {}
        for layer in range(2):
            keys = [(layer, f"s{i}") for i in range(len(config.dims))]
            if config.group:
                ys = self.backend.short_conv_group(
                    [inputs[key] for key in keys],
                    [self.weights[key] for key in keys],
                    layer_id=layer,
                    streams=[key[1] for key in keys],
                    forward_batch=batch,
                    biases=[self.biases[key] for key in keys],
                    activation="silu" if config.silu else None,
                    residual=config.residual,
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
                        activation="silu" if config.silu else None,
                        residual=config.residual,
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
                config.silu,
                config.residual,
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
        case, names = self.case(mode, full=False)
        self.refill(case)
        with PoisonedMemory():
            inputs, before = self.inputs(case.num_tokens), self.pools()
            batch = self.batch(case, names, full=False)
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
        case, names = self.case(mode, full=True)
        batch = self.batch(case, names, full=True)
        self.backend.init_forward_metadata(batch)
        self.convolve(batch, self.inputs(case.num_tokens))

    def capture(self, mode: str) -> None:
        case, names = self.case(mode, full=True)
        self.refill(case)
        held = self.inputs(case.num_tokens)
        batch = self.batch(case, names, full=True)
        self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.backend.init_forward_metadata_in_graph(batch)
            ys = self.convolve(batch, held)
        self.graphs[mode] = (graph, held, ys)

    def replay(self, mode: str) -> None:
        case, names = self.case(mode, full=True)
        self.refill(case)
        graph, held, ys = self.graphs[mode]
        inputs, before = self.inputs(case.num_tokens), self.pools()
        for key, value in inputs.items():
            held[key].copy_(value)
            poison_(ys[key])
        for windows in self.backend.pool.windows.layers:
            poison_(windows)
        batch = self.batch(case, names, full=True)
        self.backend.init_forward_metadata_out_graph(batch, in_capture=False)
        graph.replay()
        self.compare("replay " + mode, case, inputs, before, ys)
        if mode == "verify":
            self.commit("replay", case, names, inputs, before)


def crossing(before: int, kept: int, grid: int) -> int:
    """Tokens until the newest multiple of the grid that kept tokens reach, -1 = none."""
    return next((n for n in range(kept, 0, -1) if (before + n) % grid == 0), -1)


def links(parents: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    children, siblings = [], []
    for row in parents:
        child, sibling, last = [-1] * len(row), [-1] * len(row), {}
        for node, parent in enumerate(row):
            if parent >= 0:
                if parent in last:
                    sibling[last[parent]] = node
                else:
                    child[parent] = node
                last[parent] = node
        children.append(child)
        siblings.append(sibling)
    return children, siblings


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
    # The interpreter cuts bfloat16 off where a GPU rounds.
    configs = [
        config for config in CONFIGS if DEVICE == "cuda" or BF16 not in (config.x, config.state)
    ]
    runs = [Run(config, options.seed * 1000 + i) for i, config in enumerate(configs)]
    jobs: dict[Any, Any] = {}
    for run in runs:
        for mode in MODES:
            for _ in range(4):

                def once(run: Run = run, mode: str = mode) -> None:
                    case, names = run.case(mode, full=True)
                    batch = run.batch(case, names, full=True)
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
