"""The gated delta rule on a GPU: errors against float64, then times under graph replay.

Shapes: KDA with 32 heads, GDN with 16 key and 32 value heads, 128 x 128 states in float32, bfloat16
activations as views of one packed projection, gate activation included. A case's bytes are what it
has to move at least; its copy moves as many in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from harness import Recorder, compile_all, machine
from timing import copy_us, graph_us
from torch import Tensor
from torch.nn.functional import softplus

from sconv_cuda.delta.commit import CommitTile, StateTable, commit
from sconv_cuda.delta.inputs import Heads, Inputs, Records
from sconv_cuda.delta.paths import node_bits, paths_of
from sconv_cuda.delta.recurrence import RECURRENCE_TILE, RecurrenceTile, Rows, recur
from sconv_cuda.delta.verify import VERIFY_TILES as TABLE
from sconv_cuda.delta.verify import VerifyTile, verify
from sconv_cuda.launch import Launcher

DEVICE = torch.device("cuda:0")
HEADS = {"KDA": Heads(32, 32, 128, 128, True), "GDN": Heads(16, 32, 128, 128, False)}
LAYERS, COMMIT_ROWS = 27, 64
SETS = {64: 6, 8: 32, 1: 64}
VERIFY_TILES = [
    VerifyTile(*shape)
    for shape in ((16, 32, 1, 4), (32, 32, 1, 3), (32, 32, 1, 4), (64, 32, 2, 3), (128, 32, 4, 3))
]
COMMIT_TILES = [
    CommitTile(*shape)
    for shape in (
        (8, 1, 0), (8, 1, 96), (8, 1, 128), (16, 2, 128), (32, 4, 128), (8, 2, 0), (4, 1, 0),
        (16, 4, 0),
    )
]  # fmt: skip
RECURRENCE_TILES = [RecurrenceTile(*shape) for shape in ((4, 1), (8, 1), (8, 2))]


#: Ids are slots, and slots are rows of the pool.
SOURCE = {
    "map_size": 0,
    "physical_step": 1,
    "physical_size": 0,
    "LOOKUP": False,
    "NULL_ZERO": True,
    "TRANSLATE": False,
}


def ones(rows: int) -> Tensor:
    """Return that all rows resume their states."""
    return torch.ones(rows, dtype=torch.bool, device=DEVICE)


@dataclass
class Data:
    """One set of inputs of a case."""

    inputs: Inputs
    slots: Tensor
    records: Records
    out: Tensor | None = None


def draw_inputs(heads: Heads, tokens: int, dtype: torch.dtype, strength: float = 1.0) -> Inputs:
    """Draw the tensors of a call; q, k and v lie in one packed projection."""
    h, hv, dk, dv = heads.keys, heads.values, heads.key_dim, heads.value_dim
    mixed = torch.randn(tokens, 2 * h * dk + hv * dv, device=DEVICE).to(dtype)
    q, k, v = mixed.split([h * dk, h * dk, hv * dv], 1)
    wide = (hv, dk) if heads.channel else (hv,)
    return Inputs(
        q=q.unflatten(1, (h, dk)),
        k=k.unflatten(1, (h, dk)),
        v=v.unflatten(1, (hv, dv)),
        gate=(torch.randn(tokens, *wide, device=DEVICE) * strength).to(dtype),
        beta=torch.randn(tokens, hv, device=DEVICE).to(dtype),
        A_log=torch.rand(hv, device=DEVICE) * 2.5,
        dt_bias=torch.randn(*wide, device=DEVICE),
        scale=dk**-0.5,
        lower_bound=None,
        normalize=True,
    )


def draw_records(heads: Heads, lead: tuple[int, ...], places: int, dtype: torch.dtype) -> Records:
    """Allocate records full of NaN."""
    wide = (heads.key_dim,) if heads.channel else ()
    nan = float("nan")
    return Records(
        torch.full((*lead, heads.values, places, heads.value_dim), nan, device=DEVICE),
        torch.full((*lead, heads.keys, places, heads.key_dim), nan, device=DEVICE, dtype=dtype),
        torch.full((*lead, heads.values, places, *wide), nan, device=DEVICE),
    )


def draw_ancestors(rows: int, drafts: int) -> Tensor:
    """Draw trees, whose parents come before their children."""
    found = torch.zeros(rows, drafts, drafts, dtype=torch.bool)
    for row in range(rows):
        for node in range(drafts):
            if node:
                found[row, node] = found[row, int(torch.randint(0, node, ()))]
            found[row, node, node] = True
    return found.to(DEVICE)


def reference(
    heads: Heads, inputs: Inputs, before: Tensor, drafts: int, ancestors: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Return outputs ``[B, drafts, HV, dv]`` and the states after each token, in float64.

    Args:
        heads: The layer's.
        inputs: Of ``B * drafts`` tokens.
        before: ``[B, HV, dv, dk]``.
        drafts: Tokens of a row.
        ancestors: Of trees.
    """
    rows, group = before.shape[0], heads.values // heads.keys

    def rows_of(values: Tensor, t: int) -> Tensor:
        return values.unflatten(0, (rows, drafts))[:, t].double()

    outputs: list[Tensor] = []
    states: list[Tensor] = []
    for t in range(drafts):
        s = before.double() if t == 0 else states[t - 1]
        if ancestors is not None and t:
            above = ancestors[:, t, :t].long() * torch.arange(1, t + 1, device=DEVICE)
            parent = above.max(1).values - 1
            s = torch.stack(states, 1)[torch.arange(rows, device=DEVICE), parent]
        q = rows_of(inputs.q, t).repeat_interleave(group, 1)
        k = rows_of(inputs.k, t).repeat_interleave(group, 1)
        q = q * inputs.scale / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        rate = inputs.A_log.double().exp()
        assert inputs.dt_bias is not None
        x = rows_of(inputs.gate, t) + inputs.dt_bias.double()
        g = -softplus(x) * (rate[:, None] if heads.channel else rate)
        decay = g.exp()[:, :, None, :] if heads.channel else g.exp()[:, :, None, None]
        s = s * decay
        beta = rows_of(inputs.beta, t).sigmoid()[:, :, None]
        u = beta * (rows_of(inputs.v, t) - (s @ k[..., None])[..., 0])
        s = s + u[..., None] * k[..., None, :]
        outputs.append((s @ q[..., None])[..., 0])
        states.append(s)
    return torch.stack(outputs, 1), states


def off(found: Tensor, expected: Tensor) -> float:
    """Return the relative error."""
    return float((found.double() - expected).norm() / expected.norm())


def check(launcher: Launcher) -> Iterator[dict[str, Any]]:
    """Compare verify, commit and decode with float64: bounds 1e-6 for states and float32."""
    for name, heads in HEADS.items():
        for dtype in (torch.float32, torch.bfloat16):
            for drafts, tree, strength in (
                (1, False, 1.0), (2, False, 1.0), (4, False, 1.0), (4, True, 1.0), (8, False, 1.0),
                (8, True, 8.0), (16, True, 1.0),
            ):  # fmt: skip
                rows = 5
                inputs = draw_inputs(heads, rows * drafts, dtype, strength)
                state = torch.randn(8, 32, 128, 128, device=DEVICE)
                before = state.clone()
                slots = torch.tensor([3, 7, -1, 1, 5], dtype=torch.int32, device=DEVICE)
                live = torch.tensor([0, 1, 3, 4], device=DEVICE)
                records = draw_records(heads, (1, rows), drafts, torch.float32)
                ancestors = draw_ancestors(rows, drafts) if tree else None
                paths = (
                    None if ancestors is None else paths_of(ancestors, node_bits(drafts, DEVICE))
                )
                layer = Records(records.u[0], records.k[0], records.g[0])
                out = verify(
                    launcher, heads, inputs, state, slots, ones(rows), layer,
                    drafts=drafts, tree=paths,
                )  # fmt: skip
                kept = torch.equal(state, before)
                outputs, states = reference(
                    heads, inputs, before[slots.clamp(min=0).long()], drafts, ancestors
                )
                steps = torch.randint(0, drafts, (rows,), device=DEVICE)
                commit(
                    launcher, heads, StateTable.build((state,)), records, slots, steps, ones(rows),
                    source=SOURCE | {"map_index": slots, "physical_index": slots},
                    drafts=drafts, tree=paths,
                    targets=torch.tensor([2, -1, 4, -1, 6], device=DEVICE), track_steps=steps // 2,
                )  # fmt: skip
                after = torch.stack(states, 1)
                each = torch.arange(rows, device=DEVICE)
                found = {
                    "outputs": off(out.unflatten(0, (rows, drafts))[live], outputs[live]),
                    "states": off(state[slots[live].long()], after[each, steps][live]),
                    "snapshots": off(state[[2, 6]], after[each, steps // 2][[0, 4]]),
                }
                kept &= bool((out.unflatten(0, (rows, drafts))[2] == 0).all())
                kept &= torch.equal(state[4], before[4])
                bound = 1e-6 if dtype == torch.float32 else 3e-3
                kept &= all(found[key] <= 1e-6 for key in ("states", "snapshots"))
                yield {
                    "case": f"{name} {str(dtype)[6:]} dtn {drafts}{' tree' if tree else ''}",
                    **found,
                    "kept": kept and found["outputs"] <= bound,
                }
            inputs = draw_inputs(heads, 6, dtype)
            state = torch.randn(8, 32, 128, 128, device=DEVICE)
            slots = torch.tensor([3, 7, 2, 1, 5, 6], dtype=torch.int32, device=DEVICE)
            fresh = torch.ones(6, dtype=torch.bool, device=DEVICE)
            outputs, states = reference(heads, inputs, state[slots.long()], 1, None)
            out = recur(launcher, heads, inputs, state, Rows(slots, None, fresh))
            error, moved = off(out, outputs[:, 0]), off(state[slots.long()], states[0])
            bound = 1e-6 if dtype == torch.float32 else 3e-3
            yield {
                "case": f"{name} {str(dtype)[6:]} decode",
                "outputs": error,
                "states": moved,
                "kept": error <= bound and moved <= 1e-6,
            }
            inputs = draw_inputs(heads, 3 * 37, dtype)
            starts = torch.tensor([0, 37, 74, 111], dtype=torch.int32, device=DEVICE)
            outputs, states = reference(heads, inputs, state[slots[:3].long()], 37, None)
            out = recur(launcher, heads, inputs, state, Rows(slots[:3], starts, fresh))
            error = off(out.unflatten(0, (3, 37)), outputs)
            moved = off(state[slots[:3].long()], states[-1])
            yield {
                "case": f"{name} {str(dtype)[6:]} extend",
                "outputs": error,
                "states": moved,
                "kept": error <= bound and moved <= 1e-6,
            }


def check_tiles(launcher: Launcher, tiles: list[VerifyTile]) -> Iterator[dict[str, Any]]:
    """Compare the bits of all shapes of programs, among which a launch chooses by its rows."""
    for name, heads in HEADS.items():
        for drafts in (2, 4, 8):
            inputs = draw_inputs(heads, 5 * drafts, torch.bfloat16)
            state = torch.randn(8, 32, 128, 128, device=DEVICE)
            slots = torch.tensor([3, 7, 2, 1, 5], dtype=torch.int32, device=DEVICE)
            found = []
            for tile in tiles:
                records = draw_records(heads, (5,), drafts, torch.float32)
                out = verify(
                    launcher, heads, inputs, state, slots, ones(5), records,
                    drafts=drafts, tree=None, tile=tile,
                )  # fmt: skip
                found.append((out, records.u, records.g))
            same = [
                all(torch.equal(x, y) for x, y in zip(one, found[0], strict=True)) for one in found
            ]
            yield {"case": f"{name} dtn {drafts} bits of tiles", "same": same, "kept": all(same)}


class Timings:
    """Data of the cases that are timed."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.state = torch.randn(64 * SETS[64], 32, 128, 128, device=DEVICE)
        self.order = torch.randperm(self.state.shape[0], device=DEVICE).int()

    def sets(self, name: str, rows: int, drafts: int, key_dtype: torch.dtype) -> list[Data]:
        """Draw as many sets as rotate through more than the cache."""
        heads = HEADS[name]
        return [
            Data(
                draw_inputs(heads, rows * drafts, torch.bfloat16),
                self.order[i * rows : (i + 1) * rows].contiguous(),
                draw_records(heads, (rows,), drafts, key_dtype),
            )
            for i in range(SETS[rows])
        ]

    def verify(
        self, name: str, sets: list[Data], drafts: int, tree: bool, tile: VerifyTile | None
    ) -> list[Callable[[], Any]]:
        heads = HEADS[name]
        rows = sets[0].slots.shape[0]
        paths = paths_of(draw_ancestors(rows, drafts), node_bits(drafts, DEVICE)) if tree else None
        resumes = ones(rows)
        return [
            lambda data=data: verify(
                self.launcher, heads, data.inputs, self.state, data.slots, resumes, data.records,
                drafts=drafts, tree=paths, tile=tile,
            )
            for data in sets
        ]  # fmt: skip

    def decode(self, name: str, sets: list[Data], tile: RecurrenceTile) -> list[Callable[[], Any]]:
        resumes = ones(64)
        return [
            lambda data=data: recur(
                self.launcher, HEADS[name], data.inputs, self.state,
                Rows(data.slots, None, resumes), tile,
            )
            for data in sets
        ]  # fmt: skip


def moved_bytes(name: str, rows: int, drafts: int, key_bytes: int) -> float:
    """Bytes that a verify step has to move: states, inputs, outputs and records once."""
    heads = HEADS[name]
    h, hv, d = heads.keys, heads.values, 128
    wide = d if heads.channel else 1
    token = 2 * (2 * h * d + 2 * hv * d + hv * wide + hv)
    record = 4 * hv * d + key_bytes * h * d + 4 * hv * wide
    return float(rows * (hv * d * d * 4 + drafts * (token + record)))


def timed(launcher: Launcher, *, tune: bool) -> Iterator[dict[str, Any]]:
    """Time verify and decode."""
    timings = Timings(launcher)
    for rows in (64, 8, 1):
        for name in HEADS:
            for drafts in (2, 4, 8):
                for key_dtype in (torch.float32, torch.bfloat16):
                    if key_dtype == torch.bfloat16 and (tune or rows < 64):
                        continue
                    moved = moved_bytes(name, rows, drafts, key_dtype.itemsize)
                    sets = timings.sets(name, rows, drafts, key_dtype)
                    copy = copy_us(moved, SETS[rows])
                    for tree in (False, True):
                        tiles: list[VerifyTile | None] = [None]
                        if tune and not tree:
                            tiles += VERIFY_TILES
                        for tile in tiles:
                            for data in sets:
                                data.records.u.fill_(float("nan"))
                            calls = timings.verify(name, sets, drafts, tree, tile)
                            yield {
                                "case": f"{name} verify B={rows} dtn={drafts}"
                                f"{' tree' if tree else ''}"
                                f"{' 16-bit key records' if key_dtype.itemsize == 2 else ''}",
                                "tile": None if tile is None else str(tile),
                                "us": graph_us(calls),
                                "copy_us": copy,
                                "bytes": moved,
                            }
            sets = timings.sets(name, rows, 1, torch.float32)
            moved = rows * 32 * 128 * 128 * 8.0
            copy = copy_us(moved, SETS[rows])
            for shape in RECURRENCE_TILES if tune else [RECURRENCE_TILE]:
                yield {
                    "case": f"{name} decode B={rows}",
                    "tile": str(shape),
                    "us": graph_us(timings.decode(name, sets, shape)),
                    "copy_us": copy,
                    "bytes": moved,
                }


def _multiply_us(numbers: int) -> float:
    source = torch.randn(numbers, device=DEVICE)
    copied = torch.empty_like(source)
    return graph_us([lambda: torch.mul(source, 1.0000001, out=copied)])


def timed_commits(launcher: Launcher, *, tune: bool) -> Iterator[dict[str, Any]]:
    """Time the commit of all layers."""
    state = torch.randn(LAYERS, COMMIT_ROWS + 16, 32, 128, 128, device=DEVICE)
    table = StateTable.build(tuple(state))
    slots = torch.randperm(state.shape[1] - 1, device=DEVICE)[:COMMIT_ROWS].int() + 1
    resumes = ones(COMMIT_ROWS)
    moved = LAYERS * COMMIT_ROWS * 32 * 128 * 128 * 8.0
    copy = _multiply_us(int(moved // 8))
    for name, heads in HEADS.items():
        for drafts in (4, 8):
            for key_dtype in (torch.float32, torch.bfloat16)[: 1 if tune else 2]:
                lead = (LAYERS, COMMIT_ROWS)
                records = draw_records(heads, lead, drafts, key_dtype)
                records.u.normal_().mul_(0.01)
                records.k.normal_()
                records.g.normal_().abs_().mul_(-0.3)
                for accepted in ("all", "random"):
                    steps = torch.randint(0, drafts, (COMMIT_ROWS,), device=DEVICE)
                    if accepted == "all":
                        steps.fill_(drafts - 1)
                    for tile in COMMIT_TILES if tune else [None]:
                        us = graph_us(
                            [
                                lambda tile=tile, steps=steps, records=records, heads=heads: commit(
                                    launcher, heads, table, records, slots, steps, resumes,
                                    source=SOURCE | {"map_index": slots, "physical_index": slots},
                                    drafts=records.places, tree=None, tile=tile,
                                )
                            ]
                        )  # fmt: skip
                        yield {
                            "case": f"{name} commit dtn={drafts} {accepted}"
                            f"{' 16-bit key records' if key_dtype.itemsize == 2 else ''}",
                            "tile": None if tile is None else str(tile),
                            "us": us,
                            "copy_us": copy,
                            "over_copy": us / copy,
                        }


def tiles_of(tune: bool) -> list[VerifyTile]:
    """Return the shapes that are compared."""
    return [tile for _, tile in TABLE] + (VERIFY_TILES if tune else [])


def compile_timed(tune: bool) -> float:
    """Compile side by side what the checks and timings will need."""
    jobs: dict[Any, Any] = {}
    launcher = Recorder(DEVICE, jobs)
    list(check(launcher))
    list(check_tiles(launcher, tiles_of(tune)))
    for heads in HEADS.values():
        # The table of tiles goes by the rows: one of each class.
        for rows in (1, 8, 64):
            state = torch.empty(2, 32, 128, 128, device=DEVICE)
            slots = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
            for drafts in (2, 4, 8):
                inputs = draw_inputs(heads, rows * drafts, torch.bfloat16)
                for key_dtype in (torch.float32, torch.bfloat16):
                    records = draw_records(heads, (1, rows), drafts, key_dtype)
                    layer = Records(records.u[0], records.k[0], records.g[0])
                    for tree in (
                        None,
                        paths_of(draw_ancestors(rows, drafts), node_bits(drafts, DEVICE)),
                    ):
                        for tile in [None, *VERIFY_TILES] if tune and tree is None else [None]:
                            verify(
                                launcher, heads, inputs, state, slots, ones(rows), layer,
                                drafts=drafts, tree=tree, tile=tile,
                            )  # fmt: skip
                    for shape in COMMIT_TILES if tune else [None]:
                        commit(
                            launcher, heads, StateTable.build((state,)), records, slots,
                            slots.long(), ones(rows),
                            source=SOURCE | {"map_index": slots, "physical_index": slots},
                            drafts=drafts, tree=None, tile=shape,
                        )  # fmt: skip
            inputs = draw_inputs(heads, rows, torch.bfloat16)
            for block in RECURRENCE_TILES if tune else [RECURRENCE_TILE]:
                on = Rows(slots, None, torch.ones(rows, dtype=torch.bool, device=DEVICE))
                recur(launcher, heads, inputs, state, on, block)
    print(len(jobs), "compilations", flush=True)
    return compile_all(jobs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tune", action="store_true", help="try other shapes of programs")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.manual_seed(0)
    launcher = Launcher(DEVICE)
    print(f"compiled in {compile_timed(options.tune):.0f} s", flush=True)
    report: dict[str, Any] = {"machine": machine(), "checks": [], "times": []}
    for found in chain(check(launcher), check_tiles(launcher, tiles_of(options.tune))):
        report["checks"].append(found)
        print(*(f"{v:.1e}" if isinstance(v, float) else v for v in found.values()), flush=True)
    if not options.tune and not all(found["kept"] for found in report["checks"]):
        print("errors are too large: nothing is timed")
        return 1
    for part in (timed, timed_commits):
        for row in part(launcher, tune=options.tune):
            report["times"].append(row)
            print(
                f"{row['case']}: {row['us']:.2f} us, copy {row['copy_us']:.2f}, "
                f"of copy {row['copy_us'] / row['us']:.2f} {row['tile'] or ''}",
                flush=True,
            )
            if options.json:
                with open(options.json, "w") as file:
                    json.dump(report, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
