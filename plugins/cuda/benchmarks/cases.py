"""The cases of the speed table: what is called, how many bytes it must move, and the aim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from harness import build
from timing import sets_for

import sconv
from sconv import ForwardBatch, StateSpec, Stream
from sconv_cuda.launch import Tile
from sconv_cuda.tiles import RaggedTile

K = 4
SIZE = 2  # bytes of bfloat16


@dataclass
class Timed:
    """One case.

    Attributes:
        name: As in the table.
        bytes: Bytes that a call must move; 0 = a time is the aim.
        aim: Fraction of a copy of as many bytes, or microseconds where ``bytes`` is 0.
        calls: Builds the calls, in a tile of one's choice or in the table's.
        tiles: Shapes to try.
        backend: For the recorder of compilations.
        host: Also measure what the host spends on an eager call.
    """

    name: str
    bytes: float
    aim: float
    calls: Callable[[Any], list[Callable[[], Any]]]
    tiles: list[Any] = field(default_factory=list)
    backend: sconv.Backend | None = None
    host: bool = False


def flavours() -> list[tuple[str, str | None, bool]]:
    return [("residual", None, True), ("silu", "silu", False)]


def shapes(
    blocks: list[tuple[int, int]],
    depths: list[int],
    ahead: tuple[bool, ...] = (False,),
    registers: tuple[int, ...] = (0,),
) -> list[Tile]:
    return [
        Tile(*block, depth, early, most)
        for block in blocks
        for depth in depths
        for early in ahead
        for most in registers
    ]


class Layers:
    """A model of ``sets`` layers with one stream, each with inputs of its own."""

    def __init__(self, sets: int, dim: int, rows: int, tokens: int, **spec: Any) -> None:
        self.backend = build(
            StateSpec(
                num_layers=sets,
                streams=[Stream("s", dim)],
                kernel_size=K,
                num_slots=rows,
                max_requests=rows,
                **spec,
            )
        )
        pool = self.backend.pool
        for layer in pool.layers:
            layer.normal_()
        slots = torch.randperm(rows) + 1
        self.rows = (torch.randperm(rows) + 1).cuda()
        pool.req_to_slot[self.rows] = slots.to(torch.int32).cuda()
        self.x = torch.randn(sets, tokens, dim, dtype=torch.bfloat16, device="cuda")
        self.weight = torch.randn(sets, dim, K, dtype=torch.bfloat16, device="cuda")
        self.sets = sets

    def calls(
        self, batch: ForwardBatch, activation: str | None, residual: bool
    ) -> Callable[[Any], list[Callable[[], Any]]]:
        convolutions: Any = self.backend._impl._convolutions

        def make(tile: Any) -> list[Callable[[], Any]]:
            self.backend.init_forward_metadata(batch)
            meta = self.backend.forward_metadata

            def one(i: int) -> Callable[[], Any]:
                x, weight = self.x[i], self.weight[i]
                if tile is None:
                    return lambda: self.backend.short_conv(
                        x,
                        weight,
                        layer_id=i,
                        stream="s",
                        forward_batch=batch,
                        activation=activation,
                        residual=residual,
                    )
                silu = activation is not None
                return lambda: convolutions.run(
                    meta, i, ("s",), (x,), (weight,), (None,), silu, residual, tile
                )

            return [one(i) for i in range(self.sets)]

        return make


def decode_cases() -> list[Timed]:
    found = []
    aims = {
        (1, 6144): 0.95,
        (32, 1024): 0.95,
        (32, 6144): 0.98,
        (256, 1024): 0.98,
        (256, 6144): 1.00,
        (1024, 6144): 0.96,
    }
    for (rows, dim), aim in aims.items():
        bytes_ = SIZE * dim * (8 * rows + K)
        layers = Layers(sets_for(bytes_), dim, rows, rows)
        batch = ForwardBatch.decode(layers.rows)
        depths, ahead = [1], (True, False)
        blocks = [(512, 8), (256, 4), (512, 4), (128, 1), (128, 2), (1024, 8)]
        if rows * dim > 1 << 20:
            blocks, depths = [(256, 1), (256, 2), (512, 2), (512, 4), (1024, 4)], [2, 4]
        for name, activation, residual in flavours():
            calls = layers.calls(batch, activation, residual)
            found.append(
                Timed(
                    f"decode ({rows}, {dim}) {name}",
                    bytes_,
                    aim,
                    calls,
                    shapes(blocks, depths, ahead),
                    layers.backend,
                    rows == 32,
                )
            )
    return found


def extend_cases() -> list[Timed]:
    found = []
    aims = {
        (2048, 1024): 0.75,
        (2048, 6144): 0.85,
        (16384, 1024): 0.88,
        (16384, 6144): 0.92,
        (65536, 1024): 0.90,
        (65536, 6144): 0.95,
    }
    for (tokens, dim), aim in aims.items():
        rows = {2048: 2, 16384: 8, 65536: 16}[tokens]
        bytes_ = SIZE * dim * (2 * tokens + 6 * rows + K)
        layers = Layers(sets_for(bytes_), dim, rows, tokens)
        cuts = torch.randperm(tokens - 1)[: rows - 1].sort().values + 1
        edges = torch.cat([torch.tensor([0]), cuts, torch.tensor([tokens])])
        batch = ForwardBatch.extend(
            layers.rows,
            edges.diff().cuda(),
            torch.tensor([64, 0] * (rows // 2)).cuda(),
            num_tokens=tokens,
        )
        blocks = [(256, 2), (512, 4)]
        depths = {2048: [4, 6, 8], 16384: [8, 12], 65536: [12, 16]}[tokens]
        for name, activation, residual in flavours():
            calls = layers.calls(batch, activation, residual)
            found.append(
                Timed(
                    f"extend T={tokens} D={dim} {name}",
                    bytes_,
                    aim,
                    calls,
                    shapes(blocks, depths, registers=(0, 72, 64)),
                    layers.backend,
                )
            )
    return found


def verify_cases() -> list[Timed]:
    rows, dim, drafts = 256, 6144, 4
    bytes_ = SIZE * dim * ((K - 1 + 3 * drafts) * rows + K)
    layers = Layers(sets_for(bytes_), dim, rows, rows * drafts, max_draft_tokens=drafts)
    batch = ForwardBatch.target_verify(layers.rows, None, drafts)
    found = []
    for name, activation, residual in flavours():
        calls = layers.calls(batch, activation, residual)
        blocks = [(256, 2), (512, 4), (256, 1), (512, 2)]
        tiles = shapes(blocks, [4], (True, False), registers=(0, 56, 64))
        title = f"verify + keep, B={rows} dtn={drafts} D={dim} {name}"
        found.append(Timed(title, bytes_, 13.0, calls, tiles, layers.backend))
    return found


def layout_cases() -> list[Timed]:
    """Verify of a layer, and the commit of all layers, in each layout of verify windows."""
    found = []
    for rows, dim, drafts in ((256, 6144, 4), (256, 6144, 8), (32, 6144, 4), (256, 2048, 4)):
        for layout in ("inputs", "dedup", "dense"):
            sets = max(sets_for(SIZE * dim * rows * 3 * drafts), 24)
            layers = Layers(
                sets,
                dim,
                rows,
                rows * drafts,
                max_draft_tokens=drafts,
                window_layout=layout,
            )
            batch = ForwardBatch.target_verify(layers.rows, None, drafts)
            case = f"B={rows} dtn={drafts} D={dim} {layout}"
            size = layers.backend.pool.windows.nbytes / sets / 1e6
            calls = layers.calls(batch, None, True)
            found.append(
                Timed(f"verify, {case}: {size:.2f} MB a layer", 0, 0, calls, [], layers.backend)
            )
            steps = torch.randint(0, drafts, (rows,), device="cuda")

            def make(
                _: Tile | None, layers: Layers = layers, batch: Any = batch, steps: Any = steps
            ) -> list[Callable[[], Any]]:
                layers.backend.init_forward_metadata(batch)
                return [
                    lambda: layers.backend.update_mamba_state_after_mtp_verify(
                        steps, req_pool_indices=layers.rows
                    )
                ]

            found.append(Timed(f"commit of {sets} layers, {case}", 0, 0, make, [], layers.backend))
    return found


def commit_cases() -> list[Timed]:
    rows, layers, drafts = 256, 66, 4
    found = []
    for dims in ((6144,), (1024, 1024, 6144, 6144)):
        spec = StateSpec(
            num_layers=layers,
            streams=[Stream(f"s{i}", dim) for i, dim in enumerate(dims)],
            kernel_size=K,
            num_slots=rows,
            max_requests=rows,
            max_draft_tokens=drafts,
        )
        backend = build(spec)
        names = (torch.randperm(rows) + 1).cuda()
        backend.pool.req_to_slot[names] = (torch.randperm(rows) + 1).to(torch.int32).cuda()
        backend.init_forward_metadata(ForwardBatch.target_verify(names, None, drafts))
        steps = torch.randint(0, drafts, (rows,), device="cuda")
        commits: Any = backend._impl._commits

        def make(
            tile: Tile | None, commits: Any = commits, names: Any = names, steps: Any = steps
        ) -> list[Callable[[], Any]]:
            return [
                lambda: commits.run(
                    names, steps, None, None, drafts=drafts, slots=False, tree=False, tile=tile
                )
            ]

        blocks = [(512, 2), (1024, 4), (2048, 8)]
        found.append(
            Timed(
                f"commit, {layers} layers, B={rows}, D={'+'.join(map(str, dims))}",
                SIZE * 2 * (K - 1) * sum(dims) * rows * layers,
                0.95,
                make,
                shapes(blocks, [1]),
                backend,
            )
        )
    return found


def metadata_cases() -> list[Timed]:
    found = []

    ragged = [
        RaggedTile(*shape)
        for shape in (
            (2, 512, 256, 4, 8),
            (4, 512, 256, 4, 1),
            (4, 1024, 256, 4, 1),
            (4, 2048, 256, 4, 1),
            (8, 1024, 256, 4, 1),
            (8, 2048, 256, 4, 2),
            (16, 2048, 256, 4, 1),
            (16, 4096, 256, 4, 2),
            (16, 8192, 256, 8, 1),
            (32, 4096, 256, 4, 2),
            (32, 4096, 256, 8, 1),
            (32, 4096, 256, 8, 2),
            (32, 8192, 128, 8, 1),
            (32, 8192, 256, 8, 1),
            (32, 8192, 256, 8, 2),
            (32, 8192, 256, 16, 1),
            (32, 8192, 512, 16, 1),
            (64, 8192, 256, 8, 1),
            (64, 8192, 256, 16, 1),
        )
    ]

    def add(name: str, aim: float, backend: sconv.Backend, batch: ForwardBatch) -> None:
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        implementation: Any = backend._impl

        def make(tile: RaggedTile | None) -> list[Callable[[], Any]]:
            if tile is None:
                return [lambda: backend.init_forward_metadata_in_graph(batch)] * 64
            buffers = implementation._buffers
            meta = buffers.step(batch, batch.num_tokens, padded=True)
            fill = implementation._metadata.fill_ragged
            return [lambda: fill(meta, batch, buffers, tile)] * 64

        tiles = ragged if batch.forward_mode.is_ragged else []
        found.append(Timed(name, 0, aim, make, tiles, backend))

    def backend_for(rows: int, tokens: int, drafts: int = 1) -> tuple[sconv.Backend, Any]:
        backend = build(
            StateSpec(
                num_layers=1,
                streams=[Stream("s", 64)],
                kernel_size=K,
                num_slots=rows,
                max_requests=rows,
                max_draft_tokens=drafts,
            )
        )
        backend.init_graph_state(rows, tokens)
        names = (torch.randperm(rows) + 1).cuda()
        backend.pool.req_to_slot[names] = (torch.randperm(rows) + 1).to(torch.int32).cuda()
        return backend, names

    for rows in (32, 256, 1024):
        backend, names = backend_for(rows, rows)
        add(f"metadata decode B={rows}", 1.7, backend, ForwardBatch.decode(names))
    tokens = 16384
    for rows in (64, 1264, 4096):
        even = torch.full((rows,), tokens // rows)
        even[: tokens - int(even.sum())] += 1
        long = torch.ones(rows, dtype=torch.int64)
        long[rows // 2] = tokens - rows + 1
        prefixes = torch.randint(0, 2, (rows,)) * 64
        for kind, lengths, aim in (("even", even, 2.5), ("one long row", long, 4.0)):
            backend, names = backend_for(rows, tokens)
            batch = ForwardBatch.extend(names, lengths.cuda(), prefixes.cuda(), num_tokens=tokens)
            add(f"metadata extend T={tokens} B={rows} {kind}", aim, backend, batch)
    backend, names = backend_for(256, 1024, 4)
    batch = ForwardBatch.target_verify(names, None, 4)
    add("metadata verify B=256 dtn=4", 1.7, backend, batch)
    return found


class Step:
    """66 layers of Inkling's four convolutions, decoding 32 rows, metadata in the graph."""

    LAYERS, ROWS = 66, 32
    DIMS: ClassVar = {"k": 1024, "v": 1024, "attn": 6144, "mlp": 6144}

    def __init__(self) -> None:
        self.backend = build(
            StateSpec(
                num_layers=self.LAYERS,
                streams=[Stream(name, dim) for name, dim in self.DIMS.items()],
                kernel_size=K,
                num_slots=self.ROWS,
                max_requests=self.ROWS,
            )
        )
        self.backend.init_graph_state(self.ROWS, self.ROWS)
        names = (torch.randperm(self.ROWS) + 1).cuda()
        slots = (torch.randperm(self.ROWS) + 1).to(torch.int32).cuda()
        self.backend.pool.req_to_slot[names] = slots
        self.batch = ForwardBatch.decode(names)
        self.x = {
            name: torch.randn(self.LAYERS, self.ROWS, dim, dtype=torch.bfloat16, device="cuda")
            for name, dim in self.DIMS.items()
        }
        self.weight = {
            name: torch.randn(self.LAYERS, dim, K, dtype=torch.bfloat16, device="cuda")
            for name, dim in self.DIMS.items()
        }
        self.backend.init_forward_metadata_out_graph(self.batch, in_capture=True)

    def metadata(self) -> None:
        self.backend.init_forward_metadata_in_graph(self.batch)

    def convolve(self, *, group: bool = True) -> list[Any]:
        kept, short_conv = [], self.backend.short_conv
        for layer in range(self.LAYERS):
            if group:
                kept += self.backend.short_conv_group(
                    [self.x["k"][layer], self.x["v"][layer]],
                    [self.weight["k"][layer], self.weight["v"][layer]],
                    layer_id=layer,
                    streams=["k", "v"],
                    forward_batch=self.batch,
                )
            for name in ("attn", "mlp") if group else self.DIMS:
                kept.append(
                    short_conv(
                        self.x[name][layer],
                        self.weight[name][layer],
                        layer_id=layer,
                        stream=name,
                        forward_batch=self.batch,
                    )
                )
        return kept
