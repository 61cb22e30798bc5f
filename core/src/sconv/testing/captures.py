"""Steps for tests that capture one and replay it with others: alike in shape, in nothing else.

All steps of a kind have the same number of rows and tokens and the same optional tensors, so that
one may be written into the tensors of another; slots, lengths, trees, snapshots and values differ.
"""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any, Final

import torch
from torch import Tensor

from ..engine.backend import Backend
from ..state.spec import StateSpec, Stream
from ..step.batch import ForwardBatch, ForwardMode
from .harness import Harness
from .steps import Step, grow_tree

__all__ = [
    "DRAFTS",
    "FREE",
    "KINDS",
    "LIVE",
    "ROWS",
    "TOKENS",
    "captured_spec",
    "captured_step",
    "load_into",
    "refill",
    "sized_harness",
    "tensors_of",
]

ROWS: Final = 5
#: Packed tokens of an extend, padding included.
TOKENS: Final = 17
#: Tokens per row of a verify or draft-extend step.
DRAFTS: Final = 3
#: Slots in use, in no order, and slots that receive snapshots.
LIVE: Final = (9, 2, 7, 4, 11, 5)
FREE: Final = (1, 3, 6, 8, 10, 12)
KINDS: Final = ("decode", "extend", "mixed", "draft_extend", "idle", "chain", "tree", "links")


def captured_spec(**changes: Any) -> StateSpec:
    """Return a spec of two layers with different streams, for steps of every kind."""
    given: dict[str, Any] = {
        "num_layers": 2,
        "streams": [[Stream("k", 5), Stream("v", 64)], [Stream("k", 3)]],
        "kernel_size": 4,
        "num_slots": 12,
        "max_requests": 8,
        "max_draft_tokens": DRAFTS,
        "draft_topk": 2,
        "track_interval": 4,
        "chunk_size": 2,
    }
    return StateSpec(**(given | changes))


def sized_harness(backend: Backend, **options: Any) -> Harness:
    """Size a backend's static buffers for these steps and fill its live slots."""
    backend.init_graph_state(ROWS, TOKENS)
    given: dict[str, Any] = {"seed": 1, "x_dtype": torch.bfloat16, "activation": "silu"}
    return Harness(backend, live=LIVE, **(given | options))


def captured_step(kind: str, seed: int, *, by_slots: bool = False) -> Step:
    """Draw a step of one of :data:`KINDS`: a mode, or a verify step of chains or trees."""
    rng = random.Random(seed)
    slots = rng.sample(LIVE, ROWS)
    for row in rng.sample(range(ROWS), 1 + seed % 2):
        slots[row] = rng.choice((-1, -1, 0))
    before = tuple(rng.choice((0, 2, 3, 7)) for _ in slots)
    common: dict[str, Any] = {"slots": tuple(slots), "before": before, "by_slots": by_slots}
    snapshot: dict[str, Any] = {
        "track_slots": tuple(
            target if slot > 0 and rng.random() < 0.7 else -1
            for slot, target in zip(slots, rng.sample(FREE, ROWS), strict=True)
        ),
        "track_mask": tuple(rng.random() < 0.8 for _ in slots),
    }
    match kind:
        case "decode":
            return Step(ForwardMode.DECODE, lengths=(1,) * ROWS, **common, **snapshot)
        case "extend" | "mixed":
            lengths = [0] * ROWS
            for _ in range(rng.randint(6, TOKENS)):
                lengths[rng.randrange(ROWS)] += 1
            ends = tuple(
                rng.choice((-1, old + rng.randint(0, new)))
                for old, new in zip(before, lengths, strict=True)
            )
            return Step(
                ForwardMode(kind),
                lengths=tuple(lengths),
                tail=TOKENS - sum(lengths),
                track_lengths=ends,
                **common,
                **snapshot,
            )
        case "draft_extend":
            return Step(
                ForwardMode.DRAFT_EXTEND,
                lengths=(DRAFTS,) * ROWS,
                draft_tokens=DRAFTS,
                accepts=tuple(rng.randint(-1, DRAFTS) for _ in slots),
                **common,
                **snapshot,
            )
        case "idle":
            return Step(ForwardMode.IDLE, (-1,) * ROWS, (0,) * ROWS, before)
        case _:
            parents = tuple(grow_tree(rng.choice, DRAFTS, 2) for _ in slots)
            return Step(
                ForwardMode.TARGET_VERIFY,
                lengths=(DRAFTS,) * ROWS,
                draft_tokens=DRAFTS,
                parents=None if kind == "chain" else parents,
                links=kind == "links",
                **common,
            )


def tensors_of(holder: Any) -> dict[str, Tensor]:
    """Return the fields of a batch, or of a step's metadata, that are tensors."""
    values = {field.name: getattr(holder, field.name) for field in fields(holder)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def load_into(batch: ForwardBatch, other: ForwardBatch) -> None:
    """Write another batch into the tensors of one that was captured."""
    mine, theirs = tensors_of(batch), tensors_of(other)
    assert mine.keys() == theirs.keys(), f"{mine.keys()} instead of {theirs.keys()}"
    for name, value in theirs.items():
        mine[name].copy_(value)


def refill(harness: Harness) -> None:
    """Write new values into the live slots."""
    for layer in harness.backend.pool.layers:
        layer[harness.live] = torch.randn(
            len(harness.live),
            *layer.shape[1:],
            generator=harness.generator,
            dtype=torch.float32,
            device="cpu",
        ).to(layer)
