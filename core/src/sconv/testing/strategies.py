"""Hypothesis strategies: random specs, and random steps on a pool with live and dead slots.

What hides faults is left out by default: identity slot maps, zeroed pools, one row per batch.
Values of tensors come from a seed, since shrinking floats explains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..state.pool import ConvStatePool
from ..state.spec import StateSpec, Stream, WindowLayout
from ..step.batch import ForwardMode
from .harness import assert_same_bits
from .steps import Step, grow_tree

__all__ = ["SENTINEL", "Adopted", "adopted_pools", "dtypes", "live_slots", "specs", "steps"]

DIMS: Final = (1, 3, 64, 130)
NUM_SLOTS: Final = 12
MAX_REQUESTS: Final = 9
MAX_ROWS: Final = 5
#: What an adopted buffer holds outside of the windows; exact in every dtype.
SENTINEL: Final = 777.0

dtypes = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))


@st.composite
def specs(draw: st.DrawFn, *, draft: bool = False) -> StateSpec:
    """Draw a spec: one or two layers, one to three streams of any width, perhaps per layer."""

    def streams() -> list[Stream]:
        dims = draw(st.lists(st.sampled_from(DIMS), min_size=1, max_size=3))
        return [Stream(f"s{number}", dim) for number, dim in enumerate(dims)]

    num_layers = draw(st.integers(1, 2))
    per_layer = num_layers > 1 and draw(st.booleans())
    draft_tokens, topk = 1, 1
    layout: WindowLayout = "auto"
    if draft:
        draft_tokens, topk = draw(st.integers(2, 5)), draw(st.sampled_from((1, 2)))
        # Dedup windows hold no trees.
        layouts: list[WindowLayout] = ["dense", "inputs", "dedup"]
        layout = draw(st.sampled_from(layouts if topk == 1 else layouts[:2]))
    return StateSpec(
        num_layers=num_layers,
        streams=[streams() for _ in range(num_layers)] if per_layer else streams(),
        kernel_size=draw(st.integers(2, 8)),
        num_slots=NUM_SLOTS,
        max_requests=MAX_REQUESTS,
        dtype=draw(dtypes),
        window_axis=draw(st.sampled_from(("time", "channel"))),
        max_draft_tokens=draft_tokens,
        draft_topk=topk,
        window_layout=layout,
        track_interval=draw(st.sampled_from((None, 5, 6))),
        chunk_size=draw(st.sampled_from((1, 2, 3))),
    )


@st.composite
def live_slots(draw: st.DrawFn) -> list[int]:
    """Draw the slots in use, in an order that is no identity; others stay free for snapshots."""
    slots = draw(st.permutations(range(1, NUM_SLOTS + 1)))
    return list(slots[: draw(st.integers(1, 7))])


@st.composite
def steps(
    draw: st.DrawFn,
    spec: StateSpec,
    live: Sequence[int],
    mode: ForwardMode,
    *,
    max_length: int = 9,
    dummies: bool = True,
) -> Step:
    """Draw one step of a mode.

    Args:
        draw: Hypothesis gives it.
        spec: The backend's.
        live: Slots in use; a snapshot goes to one that is not.
        mode: The mode.
        max_length: Most tokens of a row.
        dummies: Also draw rows without a slot, and rows on the dummy slot.
    """
    count = draw(st.integers(0, min(MAX_ROWS, len(live))))
    slots = list(draw(st.permutations(live))[:count])
    if dummies:
        for _ in range(draw(st.integers(0, 2))):
            slots.insert(draw(st.integers(0, len(slots))), draw(st.sampled_from((-1, 0))))
    rows = len(slots)

    def each(one: st.SearchStrategy[int]) -> tuple[int, ...]:
        return tuple(draw(st.lists(one, min_size=rows, max_size=rows)))

    before = each(st.integers(0, 12))
    common = {
        "mode": mode,
        "slots": tuple(slots),
        "before": before,
        "by_slots": draw(st.booleans()),
        "index_dtype": draw(st.sampled_from((torch.int32, torch.int64))),
    }
    if mode is ForwardMode.IDLE:
        common["slots"] = (-1,) * rows
        return Step(lengths=(0,) * rows, **common)  # type: ignore[arg-type]

    track: dict[str, Any] = {}
    if mode is not ForwardMode.TARGET_VERIFY and draw(st.booleans()):
        free = sorted(set(range(1, spec.num_slots + 1)) - set(live))
        targets = [slot if draw(st.booleans()) else -1 for slot in draw(st.permutations(free))]
        targets = (targets + [-1] * rows)[:rows]
        # The dummy's window means nothing, and so would its snapshot.
        track["track_slots"] = tuple(
            target if slot != 0 else -1 for slot, target in zip(slots, targets, strict=True)
        )
        if draw(st.booleans()):
            track["track_mask"] = tuple(draw(st.booleans()) for _ in range(rows))

    match mode:
        case ForwardMode.DECODE:
            return Step(lengths=(1,) * rows, **common, **track)  # type: ignore[arg-type]
        case ForwardMode.TARGET_VERIFY:
            dtn = draw(st.integers(1, spec.max_draft_tokens))
            parents = None
            if spec.draft_topk > 1 and draw(st.booleans()):
                parents = tuple(
                    grow_tree(lambda nodes: draw(st.sampled_from(nodes)), dtn, spec.draft_topk)
                    for _ in range(rows)
                )
            return Step(
                lengths=(dtn,) * rows,
                draft_tokens=dtn,
                parents=parents,
                links=draw(st.booleans()),
                **common,  # type: ignore[arg-type]
            )
        case ForwardMode.DRAFT_EXTEND:
            dtn = draw(st.integers(1, 5))
            return Step(
                lengths=(dtn,) * rows,
                draft_tokens=dtn,
                accepts=each(st.integers(-1, dtn + 1)),
                **common,  # type: ignore[arg-type]
                **track,
            )
        case _:
            lengths = each(st.integers(0, max_length))
            if "track_slots" in track and draw(st.booleans()):
                track["track_lengths"] = tuple(
                    draw(st.integers(-1, old + new + 2))
                    for old, new in zip(before, lengths, strict=True)
                )
            tail = draw(st.integers(0, 3))
            return Step(
                lengths=lengths,
                tail=tail,
                host_tokens=tail > 0 or draw(st.booleans()),
                **common,  # type: ignore[arg-type]
                **track,
            )


@dataclass(frozen=True)
class Adopted:
    """An engine's own memory and numbering.

    Attributes:
        pool: The pool that adopted it.
        buffers: What the engine allocated; the state is a part of each.
        slot_ids: The engine's id of each row of the pool, None = the same.
        null_id: An id that means "no slot".
    """

    pool: ConvStatePool
    buffers: list[Tensor]
    slot_ids: dict[int, int] | None
    null_id: int

    def outside(self) -> list[Tensor]:
        """Return where each buffer holds no window, as masks."""
        return [self._outside(buffer) for buffer in self.buffers]

    def assert_untouched(self, outside: Sequence[Tensor]) -> None:
        """Raise AssertionError unless everything outside of the windows is as it was allocated."""
        for buffer, place in zip(self.buffers, outside, strict=True):
            values = buffer[place]
            expected = torch.full_like(values, SENTINEL)
            assert_same_bits(values, expected, "memory beside the windows")

    def _outside(self, buffer: Tensor) -> Tensor:
        saved = buffer.clone()
        buffer.fill_(0)
        for layer in self.pool.layers:
            layer.fill_(1)
        place = buffer == 0
        buffer.copy_(saved)
        return place


@st.composite
def adopted_pools(draw: st.DrawFn, spec: StateSpec, device: torch.device | str = "cpu") -> Adopted:
    """Draw engine memory: stacked or per layer, slots wider than a window, padding all around it.

    Ids are the pool's rows, or virtual ones with a table or a function; "no slot" is -1, 0 or both.
    """
    extra = draw(st.sampled_from((0, 1, 3)))
    margin = draw(st.sampled_from((0, 2)))
    axis = 1 if spec.window_axis == "time" else 2
    rows = spec.num_slots + 1

    def buffer(layer_id: int, *lead: int) -> Tensor:
        shape = list(spec.window_shape(layer_id))
        shape[axis - 1] += extra
        shape[1] += margin
        shape[0] += margin
        wide = torch.full((*lead, rows + margin, *shape), SENTINEL, dtype=spec.dtype, device=device)
        return wide

    def part(wide: Tensor, layer_id: int) -> Tensor:
        shape = list(spec.window_shape(layer_id))
        shape[axis - 1] += extra
        return wide[..., :rows, : shape[0], : shape[1]]

    if spec.uniform and draw(st.booleans()):
        buffers = [buffer(0, spec.num_layers)]
        layers: Tensor | list[Tensor] = part(buffers[0], 0)
    else:
        buffers = [buffer(layer_id) for layer_id in range(spec.num_layers)]
        layers = [part(wide, layer_id) for layer_id, wide in enumerate(buffers)]

    null_slots = draw(st.sampled_from(((-1,), (0,), (-1, 0))))
    kind = draw(st.sampled_from(("same", "table", "function")))
    ids = None
    translate: Tensor | Callable[[Tensor], Tensor] | None = None
    if kind != "same":
        # Twice as many virtual ids as rows; most mean nothing.
        numbers = draw(st.permutations(range(1, 2 * spec.num_slots + 1)))
        ids = {0: 0, **{row: numbers[row - 1] for row in range(1, rows)}}
        table = torch.full((2 * spec.num_slots + 1,), -1, dtype=torch.int64, device=device)
        for row, number in ids.items():
            table[number] = row
        translate = table if kind == "table" else lambda known: table[known]
    late = draw(st.booleans())
    pool = ConvStatePool.adopt(
        spec,
        None if late else layers,
        device=device,
        null_slots=null_slots,
        virtual_to_physical=translate,
    )
    if late:
        pool.bind(layers)
    return Adopted(pool, buffers, ids, draw(st.sampled_from(null_slots)))
