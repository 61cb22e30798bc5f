"""Random steps of a configuration, as numbers for the oracle and as batches for the backend."""

from __future__ import annotations

import random
from typing import Any

import torch
from configs import DRAFTS, ROWS, TOKENS, Config
from harness import DEVICE
from oracle import Case
from torch import Tensor

import sconv
from sconv import ForwardBatch

__all__ = ["Draws"]


class Draws:
    """Draws cases of one configuration, and keeps the static tensors that its graphs read."""

    def __init__(self, config: Config, pool: sconv.ConvStatePool, seed: int) -> None:
        self.config, self.pool = config, pool
        self.random = random.Random(seed)
        self.static: dict[str, dict[str, Any]] = {}

    def case(self, mode: str, *, full: bool) -> tuple[Case, list[int]]:
        """Draw a step and its request rows; ``full`` ones have the shape of the graphs."""
        pick = self.random
        live = pick.sample(range(1, 25), 12)
        rows = ROWS if full else pick.randint(1, ROWS)
        slots = live[:rows]
        for _ in range(pick.randint(0, 2)):
            slots[pick.randrange(rows)] = -1
        names = pick.sample(range(1, 17), rows)
        pool = self.pool
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
                    if self.config.has("tree"):
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
                if case.parents is not None and self.config.has("links"):
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
