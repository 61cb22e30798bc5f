"""One step in checked mode: what it says of its rows, and how much of it has run.

A step is read when it is prepared, so that refilling the tensors of a static batch changes nothing
of it, and its effect is recorded when its last convolution has run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..errors import BatchError, MetadataError
from ..state.pool import ConvStatePool
from ..state.shadow import Content, PoolShadow
from ..state.spec import StateSpec
from ..step.batch import ForwardBatch, ForwardMode
from ..step.draft_tree import parents_from_links
from ..step.metadata import ShortConvMetadata
from ..step.value_checks import slots_of

__all__ = ["CheckedStep", "Row", "Snapshot", "plan_step"]


@dataclass(slots=True)
class Row:
    """One row with a slot.

    Attributes:
        index: Its place in the batch.
        slot: Row of the pool.
        owner: The slot's owner when the step was prepared.
        writes: Writes of the slot that the step knows of, its own included.
        before: Tokens in its state before the step, None = unknown.
        after: Tokens afterwards, None = unknown.
        moves: Whether the step writes the slot.
    """

    index: int
    slot: int
    owner: int
    writes: int
    before: int | None
    after: int | None
    moves: bool


@dataclass(slots=True)
class Snapshot:
    """One snapshot that is due.

    Attributes:
        slot: Row of the pool that receives it.
        owner: The slot's owner when the step was prepared.
        length: Tokens in it, None = unknown.
    """

    slot: int
    owner: int
    length: int | None


@dataclass(slots=True, eq=False)
class CheckedStep:
    """A prepared step.

    Attributes:
        batch: What it was prepared with.
        shadow: The slots.
        convolutions: Every layer and stream of the model.
        rows: The rows that have a slot and read it.
        snapshots: Those that are due.
        names: What the batch names its rows by.
        meta: The step's metadata, once it is known.
        captured: It is recorded, not run: nothing of it is checked.
        put_aside: The engine has read the metadata, and may put the step back later.
        thread: Who prepared it.
        ran: The convolutions that have run.
        parents: Parent of each node of each row of a tree; empty for chains.
        missed: Slots that were named for a snapshot that is not due.
    """

    batch: ForwardBatch
    shadow: PoolShadow
    convolutions: Sequence[tuple[int, str]]
    rows: list[Row]
    snapshots: list[Snapshot]
    names: list[int]
    meta: ShortConvMetadata | None = None
    captured: bool = False
    put_aside: bool = False
    thread: int = field(default_factory=threading.get_ident)
    ran: set[tuple[int, str]] = field(default_factory=set)
    parents: list[list[int]] = field(default_factory=list)
    missed: list[int] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every convolution has run."""
        return len(self.ran) == len(self.convolutions)

    @property
    def mode(self) -> str:
        """The mode, with its article."""
        name = self.batch.forward_mode.value
        return f"{'an' if name[0] in 'aeiou' else 'a'} {name} step"

    def progress(self) -> str:
        """Say how much of the step has run, and which convolution is missing first."""
        layer_id, stream = next(each for each in self.convolutions if each not in self.ran)
        return (
            f"{self.mode} ran {len(self.ran)} of {len(self.convolutions)} convolutions, "
            f"{stream!r} of layer {layer_id} not"
        )

    def check_may_run(self, layer_id: int, streams: Sequence[str], batch: ForwardBatch) -> None:
        """Check that convolutions may run now.

        Raises:
            MetadataError: One ran already, a slot of the step is not what it was when the step was
                prepared, or another thread prepared a step of its own.
        """
        if self.captured:
            return
        if (
            self.thread != threading.get_ident()
            and batch is not self.batch
            and not self.batch.is_same_step(batch, values=False)
        ):
            raise MetadataError(
                "another thread has prepared a step since this one was: a backend belongs to one "
                "thread. Give each thread a backend of its own, or a lock around whole steps"
            )
        for stream in streams:
            if (layer_id, stream) in self.ran:
                raise MetadataError(
                    f"stream {stream!r} of layer {layer_id} was convolved in this step already, "
                    "and would advance its windows twice: call it once per step, and prepare "
                    "every step"
                )
        for row in self.rows:
            record = self.shadow[row.slot]
            if record.owner == row.owner and record.writes == row.writes:
                continue
            what = "written" if record.owner == row.owner else "freed or handed out again"
            raise MetadataError(
                f"slot {row.slot} of row {row.index} was {what} after this step was prepared "
                f"({record.note}): free, copy and restore slots before a step is prepared, or "
                "after its last layer"
            )
        for snapshot in self.snapshots:
            if self.shadow[snapshot.slot].owner != snapshot.owner:
                raise MetadataError(
                    f"slot {snapshot.slot} was freed or handed out again after this step was "
                    "prepared, and the step writes a snapshot there: free it before a step is "
                    "prepared, or after its last layer"
                )

    def has_run(self, layer_id: int, streams: Sequence[str]) -> None:
        """Record convolutions, and with the last one the effect of the step."""
        if self.captured:
            return
        first = not self.ran
        self.ran.update((layer_id, stream) for stream in streams)
        if self.complete:
            self._finish(count=first)
            return
        note = self.progress()
        for row in self._moving():
            self._write(row, Content.TORN, None, note, count=first)
        for snapshot in self.snapshots:
            record = self.shadow[snapshot.slot]
            record.content, record.length, record.note = Content.TORN, None, note

    def settle(self) -> None:
        """Take a step that was announced for a replay as run."""
        self.ran.update(self.convolutions)
        self._finish(count=True)

    def put_back(self) -> None:
        """Take the slots as they are now: the engine has put the step's metadata back."""
        for row in self.rows:
            row.writes = self.shadow[row.slot].writes

    def doubt(self, why: str) -> None:
        """Know nothing of what the step may have written."""
        for row in self.rows:
            self.shadow.doubt(row.slot, why)
        for snapshot in self.snapshots:
            self.shadow.doubt(snapshot.slot, why)

    def depth(self, row: int, node: int) -> int:
        """Return how many tokens of a verify step's row lead to a node, itself included."""
        if not self.batch.is_tree:
            return node + 1
        parents, depth = self.parents[row], 0
        while node >= 0:
            depth, node = depth + 1, parents[node]
        return depth

    def _moving(self) -> Iterator[Row]:
        return (row for row in self.rows if row.moves)

    def _finish(self, *, count: bool) -> None:
        for slot in self.missed:
            record = self.shadow[slot]
            if record.content is Content.UNWRITTEN:
                record.note = f"{self.mode} named it for a snapshot that was not due"
        note = f"last written by {self.mode}"
        for row in self._moving():
            self._write(row, Content.WRITTEN, row.after, note, count=count)
        for snapshot in self.snapshots:
            self.shadow[snapshot.slot].set(
                Content.WRITTEN, snapshot.length, f"a snapshot of {self.mode}"
            )

    def _write(
        self, row: Row, content: Content, length: int | None, note: str, *, count: bool
    ) -> None:
        record = self.shadow[row.slot]
        record.content, record.length, record.note = content, length, note
        record.writes += count
        row.writes = record.writes


def plan_step(
    batch: ForwardBatch,
    spec: StateSpec,
    pool: ConvStatePool,
    shadow: PoolShadow,
    convolutions: Sequence[tuple[int, str]],
    *,
    captured: bool,
) -> CheckedStep:
    """Read a batch whose values are checked, and compare it with what the slots hold. Syncs.

    Args:
        batch: The step.
        spec: What the backend was built for.
        pool: Where slots are looked up.
        shadow: What is known of them.
        convolutions: Every layer and stream of the model.
        captured: The step is about to be captured, on rows that may be placeholders: what it says
            of their lengths is not looked at.

    Raises:
        BatchError: The message says which row, what it claims, and what its slot holds.
    """
    step = CheckedStep(batch, shadow, convolutions, [], [], [], captured=captured)
    if batch.forward_mode is ForwardMode.IDLE or batch.batch_size == 0:
        return step
    names = batch.slots if batch.req_pool_indices is None else batch.req_pool_indices
    step.names = _numbers(names) or []
    if batch.is_tree:
        parents = batch.parents
        if parents is None:
            assert batch.next_token is not None
            assert batch.next_sibling is not None
            parents = parents_from_links(batch.next_token, batch.next_sibling)
        step.parents = parents.tolist()
    targets = [-1] * batch.batch_size
    if batch.mamba_track_indices is not None:
        targets = pool.translate_(batch.mamba_track_indices.long().clone()).tolist()
    mask = _numbers(batch.mamba_track_mask)
    asked = _numbers(batch.mamba_track_seqlens)
    field_name = "seq_lens" if batch.extend_seq_lens is None else "extend_prefix_lens"
    held = _numbers(batch.seq_lens if batch.extend_seq_lens is None else batch.extend_prefix_lens)
    new = _numbers(batch.extend_seq_lens)
    accepts = _numbers(batch.num_accept_tokens)
    verify = batch.forward_mode is ForwardMode.TARGET_VERIFY
    for index, slot in enumerate(slots_of(batch, pool).tolist()):
        tokens = (batch.tokens_per_row or 0) if new is None else new[index]
        kept = tokens if accepts is None else accepts[index]
        # A row without a slot or tokens, or with a negative count, is padding.
        if slot <= 0 or tokens == 0 or kept < 0:
            continue
        claim = None if held is None else held[index]
        record = shadow[slot]
        before = claim if claim is not None else record.length
        if not captured:
            _check_row(index, slot, field_name, claim, shadow)
        after = None if before is None else before + kept
        step.rows.append(
            Row(index, slot, record.owner, record.writes, before, after, moves=not verify)
        )
        target = targets[index]
        if target <= 0:
            continue
        length = after
        if mask is not None and not mask[index]:
            length = -1
        elif asked is not None:
            length = asked[index]
        elif accepts is not None:
            length = _crossing(before, kept, spec.track_grid)
        if length == -1:
            step.missed.append(target)
            continue
        if not captured and not shadow.in_use(target):
            raise BatchError(
                f"row {index} is snapshot into slot {target}, which is not in use "
                f"({shadow[target].note}): hand it out first"
            )
        step.snapshots.append(Snapshot(target, shadow[target].owner, length))
    return step


def _check_row(index: int, slot: int, name: str, claim: int | None, shadow: PoolShadow) -> None:
    record = shadow[slot]
    if not shadow.in_use(slot):
        raise BatchError(
            f"row {index} names slot {slot}, which is not in use ({record.note}): hand it out "
            "first, or give -1 for no slot"
        )
    if claim == 0:
        return
    if record.content is Content.UNWRITTEN:
        raise BatchError(
            f"row {index} resumes slot {slot}, which its owner never wrote ({record.note}): "
            f"prefill it, clear it, copy a state there, or give {name}=0 for a fresh row"
        )
    if record.content is Content.TORN:
        raise BatchError(
            f"row {index} resumes slot {slot}, which holds half a step ({record.note}): every "
            "layer and stream runs once per step. Free the slot, or start it afresh"
        )
    if None not in (claim, record.length) and claim != record.length:
        raise BatchError(
            f"{name} holds {claim} for row {index}, and the state of slot {slot} has "
            f"{record.length} tokens ({record.note}): expected {record.length}, or 0 for a fresh "
            "row"
        )


def _crossing(before: int | None, kept: int, grid: int | None) -> int | None:
    """Return the length of the snapshot of a draft-extend row, -1 = none."""
    if grid is None or kept == 0:
        return -1
    assert before is not None
    boundary = (before + kept) // grid * grid
    return boundary if boundary > before else -1


def _numbers(values: Tensor | None) -> list[int] | None:
    return None if values is None else values.tolist()
