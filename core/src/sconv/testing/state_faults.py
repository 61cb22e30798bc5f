"""Faults of a scheduler, each put into the middle of a right schedule.

Each entry of :data:`FAULTS` makes what an engine might do wrong with the requests of a
:class:`~sconv.testing.fuzzer.Fuzzer`, and returns the call that checked mode must refuse. What
comes before that call is legal, or cannot be seen.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ..errors import BatchError, MetadataError, SconvError, SlotError
from ..hookspecs import hookimpl
from ..step.batch import ForwardBatch
from .comparison import assert_same_bits
from .fuzzer import Fuzzer, Request

__all__ = ["FAULTS", "StateFault", "assert_found", "inject"]

Call = Callable[[], object]


@dataclass(frozen=True)
class StateFault:
    """One fault.

    Attributes:
        make: Makes it; returns the call to refuse, or None if the requests do not allow it now.
        error: What the call must raise.
        match: A pattern that its message has.
        layout: The window layout that it needs, None = any.
    """

    make: Callable[[Fuzzer], Call | None]
    error: type[SconvError]
    match: str
    layout: str | None = None


def inject(fuzzer: Fuzzer, fault: StateFault, after: int, *, most: int = 400) -> Call:
    """Run a right schedule for a while, then on until the fault can be made, and make it.

    Args:
        fuzzer: A fresh one.
        fault: Which.
        after: Events before the first try.
        most: Events until it must have been made.

    Returns:
        The call to refuse.
    """
    fuzzer.run(after)
    while fuzzer.steps < most:
        # The schedule around it has whatever is in flight committed by now.
        if (call := fault.make(fuzzer)) is not None:
            return call
        fuzzer.run(fuzzer.steps + 1)
    raise AssertionError("the schedule never allowed the fault")


def assert_found(fuzzer: Fuzzer, fault: StateFault, *, after: int) -> None:
    """Make a fault and raise AssertionError unless it is refused, and nothing has changed.

    Args:
        fuzzer: A fresh one, of a backend in checked mode.
        fault: Which.
        after: Events before it.
    """
    call = inject(fuzzer, fault, after)
    before = _everything(fuzzer)
    found = "it was not found"
    try:
        call()
    except fault.error as error:
        found = str(error)
    assert re.search(fault.match, found), f"{fault.match!r} was expected: {found}"
    for old, new in zip(before, _everything(fuzzer), strict=True):
        assert_same_bits(new, old, "what a refused call left")


def _everything(fuzzer: Fuzzer) -> list[Tensor]:
    pool = fuzzer.pool
    live = torch.tensor([*pool.live_slots(), pool.num_free], dtype=torch.int64, device="cpu")
    found = [*pool.layers, *pool.windows.layers, pool.req_to_slot, live]
    return [tensor.cpu().clone() for tensor in found]


def _decodable(fuzzer: Fuzzer, count: int = 1, tokens: int = 1) -> list[Request] | None:
    found = [request for request in fuzzer.ready() if len(request.tokens) >= tokens]
    return found[:count] if len(found) >= count else None


def _decode(fuzzer: Fuzzer, rows: list[Request], *, off: int = 0) -> ForwardBatch:
    return ForwardBatch.decode(
        fuzzer.ints([request.row for request in rows]),
        fuzzer.ints([len(request.tokens) + off for request in rows]),
    )


def _prepare(fuzzer: Fuzzer, batch: ForwardBatch) -> Call:
    return lambda: fuzzer.backend.init_forward_metadata(batch)


def _layer(fuzzer: Fuzzer, batch: ForwardBatch, layer: int) -> None:
    tokens = batch.num_tokens or 0
    fuzzer.convolve(batch, layer, fuzzer.inputs(layer, [[1]] * tokens))


def _wrong_length(fuzzer: Fuzzer) -> Call | None:
    rows = _decodable(fuzzer, tokens=2)
    off = fuzzer.rng.choice((-1, 1))
    return None if rows is None else _prepare(fuzzer, _decode(fuzzer, rows, off=off))


def _wrong_prefix(fuzzer: Fuzzer) -> Call | None:
    rows = [r for r in fuzzer.running if r.prompt and r.tokens]
    if not rows:
        return None
    row = rows[0]
    return _prepare(
        fuzzer,
        ForwardBatch.extend(
            slots=fuzzer.ints([row.slot]),
            extend_seq_lens=fuzzer.ints([2]),
            extend_prefix_lens=fuzzer.ints([len(row.tokens) + 1]),
        ),
    )


def _fork_of_nothing(fuzzer: Fuzzer) -> Call | None:
    if fuzzer.pool.num_free < 2:
        return None
    slot = fuzzer.pool.alloc(1)
    return lambda: fuzzer.pool.fork(slot)


def _hit_on_nothing(fuzzer: Fuzzer) -> Call | None:
    rows = _decodable(fuzzer)
    if rows is None or not fuzzer.unused_rows or fuzzer.pool.num_free < 1:
        return None
    slot = fuzzer.pool.alloc(1)
    batch = ForwardBatch.decode(
        fuzzer.ints([rows[0].row]),
        fuzzer.ints([len(rows[0].tokens)]),
        mamba_track_mask=fuzzer.ints([0]) > 0,
        mamba_track_indices=fuzzer.ints(slot.tolist()),
    )
    fuzzer.backend.init_forward_metadata(batch)
    for layer in range(fuzzer.spec.num_layers):
        _layer(fuzzer, batch, layer)
    fuzzer.pool.assign(fuzzer.unused_rows[0], slot)
    hit = ForwardBatch.extend(
        fuzzer.ints(fuzzer.unused_rows[:1]), fuzzer.ints([2]), fuzzer.ints([5])
    )
    return _prepare(fuzzer, hit)


def _first_step_decodes(fuzzer: Fuzzer) -> Call | None:
    if fuzzer.pool.num_free < 1:
        return None
    slot = fuzzer.pool.alloc(1)
    return _prepare(fuzzer, ForwardBatch.decode(slots=slot.to(fuzzer.backend.device)))


def _freed_slot(fuzzer: Fuzzer) -> Call | None:
    rows = _decodable(fuzzer)
    if rows is None:
        return None
    batch = ForwardBatch.decode(slots=fuzzer.ints([rows[0].slot]))
    fuzzer.pool.free(rows[0].slot)
    return _prepare(fuzzer, batch)


def _freed_in_step(fuzzer: Fuzzer) -> Call | None:
    rows = _decodable(fuzzer)
    if rows is None:
        return None
    batch = _decode(fuzzer, rows)
    fuzzer.backend.init_forward_metadata(batch)
    _layer(fuzzer, batch, 0)
    fuzzer.pool.free(rows[0].slot)
    return lambda: _layer(fuzzer, batch, 1)


def _restored_in_step(fuzzer: Fuzzer) -> Call | None:
    rows = _decodable(fuzzer)
    if rows is None:
        return None
    kept, batch = fuzzer.pool.export(rows[0].slot), _decode(fuzzer, rows)
    fuzzer.backend.init_forward_metadata(batch)
    if fuzzer.rng.random() < 0.5:
        _layer(fuzzer, batch, 0)
    fuzzer.pool.restore(rows[0].slot, kept)
    return lambda: _layer(fuzzer, batch, 1)


def _skipped_layer(fuzzer: Fuzzer) -> Call | None:
    rows = _decodable(fuzzer)
    if rows is None:
        return None
    batch = _decode(fuzzer, rows)
    fuzzer.backend.init_forward_metadata(batch)
    _layer(fuzzer, batch, fuzzer.rng.randrange(2))
    return _prepare(fuzzer, _decode(fuzzer, rows, off=1))


def _layer_twice(fuzzer: Fuzzer) -> Call | None:
    rows = _decodable(fuzzer)
    if rows is None:
        return None
    batch, layer = _decode(fuzzer, rows), fuzzer.rng.randrange(2)
    fuzzer.backend.init_forward_metadata(batch)
    for each in range(layer + 1):
        _layer(fuzzer, batch, each)
    return lambda: _layer(fuzzer, batch, layer)


def _verify(fuzzer: Fuzzer, rows: list[Request], *, layers: int = 2) -> None:
    batch = ForwardBatch.target_verify(
        fuzzer.ints([r.row for r in rows]), fuzzer.ints([len(r.tokens) for r in rows]), 2
    )
    fuzzer.backend.init_forward_metadata(batch)
    for layer in range(layers):
        _layer(fuzzer, batch, layer)


def _commit(fuzzer: Fuzzer, rows: list[Request]) -> Call:
    last, names = fuzzer.ints([1] * len(rows)), fuzzer.ints([r.row for r in rows])
    return lambda: fuzzer.backend.update_mamba_state_after_mtp_verify(last, req_pool_indices=names)


def _commit_of_others(fuzzer: Fuzzer) -> Call | None:
    rows = _decodable(fuzzer, 3)
    if rows is None:
        return None
    _verify(fuzzer, rows)
    return _commit(fuzzer, [rows[0], rows[2]])


def _commit_after_reuse(fuzzer: Fuzzer) -> Call | None:
    rows = _decodable(fuzzer, 2)
    if rows is None:
        return None
    _verify(fuzzer, rows)
    fuzzer.pool.free(rows[1].slot)
    slots = fuzzer.pool.alloc(fuzzer.pool.num_free)  # The freed one is the last of them.
    fuzzer.pool.assign(rows[1].row, slots[-1:])
    return _commit(fuzzer, rows)


def _half_verify(fuzzer: Fuzzer) -> Call | None:
    rows = _decodable(fuzzer, 2)
    if rows is None:
        return None
    _verify(fuzzer, rows, layers=fuzzer.rng.randrange(2))
    return _commit(fuzzer, rows)


def _commit_twice(fuzzer: Fuzzer) -> Call | None:
    rows = _decodable(fuzzer, 2)
    if rows is None:
        return None
    _verify(fuzzer, rows)
    _commit(fuzzer, rows)()
    return _commit(fuzzer, rows)


def _missing_commit(fuzzer: Fuzzer) -> Call | None:
    rows = _decodable(fuzzer)
    if rows is None:
        return None
    _verify(fuzzer, rows)
    return _prepare(fuzzer, _decode(fuzzer, rows, off=2))


def _shared_slot(fuzzer: Fuzzer) -> Call | None:
    rows = _decodable(fuzzer)
    if rows is None:
        return None
    return _prepare(fuzzer, ForwardBatch.decode(slots=fuzzer.ints([rows[0].slot] * 2)))


def _shared_snapshot(fuzzer: Fuzzer) -> Call | None:
    rows = _decodable(fuzzer, 2)
    if rows is None or not fuzzer.pool.num_free:
        return None
    batch = ForwardBatch.decode(
        fuzzer.ints([r.row for r in rows]),
        mamba_track_indices=fuzzer.ints([int(fuzzer.pool.alloc(1))] * 2),
    )
    return _prepare(fuzzer, batch)


def _two_threads(fuzzer: Fuzzer) -> Call | None:
    """A second thread calls while the first is inside of a convolution."""
    rows = _decodable(fuzzer)
    if rows is None:
        return None
    batch = _decode(fuzzer, rows)
    refused: list[BaseException] = []

    def other() -> None:
        try:
            fuzzer.backend.init_forward_metadata(batch)
        except SconvError as error:
            refused.append(error)

    class Joins:
        @hookimpl(wrapper=True)
        def init_forward_metadata(self) -> object:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return (yield)

    def call() -> None:
        observer = Joins()
        fuzzer.backend.add_observer(observer)
        fuzzer.backend.init_forward_metadata(batch)
        fuzzer.backend.remove_observer(observer)
        if refused:
            raise refused[0]

    return call


def _interleaved_threads(fuzzer: Fuzzer) -> Call | None:
    """A second thread prepares its step between the layers of the first one's."""
    rows = _decodable(fuzzer, 2)
    if rows is None:
        return None
    mine, other = _decode(fuzzer, rows[:1]), _decode(fuzzer, rows[1:])
    fuzzer.backend.init_forward_metadata(mine)
    _layer(fuzzer, mine, 0)
    thread = threading.Thread(target=fuzzer.backend.init_forward_metadata, args=(other,))
    thread.start()
    thread.join()
    return lambda: _layer(fuzzer, mine, 1)


FAULTS: Final = {
    "wrong length": StateFault(_wrong_length, BatchError, r"seq_lens holds \d+ for row 0, and the"),
    "wrong prefix": StateFault(_wrong_prefix, BatchError, "extend_prefix_lens holds .* for row 0"),
    "fork of nothing": StateFault(_fork_of_nothing, SlotError, "fork: slot .* was never written"),
    "hit on nothing": StateFault(
        _hit_on_nothing, BatchError, "its owner never wrote .a decode step named it for a snapshot"
    ),
    "first step decodes": StateFault(_first_step_decodes, BatchError, "its owner never wrote"),
    "freed slot": StateFault(_freed_slot, BatchError, "row 0 names slot .*, which is not in use"),
    "freed in step": StateFault(_freed_in_step, MetadataError, "was freed or handed out again"),
    "restored in step": StateFault(
        _restored_in_step, MetadataError, "was written after this step was prepared"
    ),
    "skipped layer": StateFault(_skipped_layer, BatchError, "holds half a step"),
    "layer twice": StateFault(_layer_twice, MetadataError, "was convolved in this step already"),
    "commit of others": StateFault(_commit_of_others, BatchError, "for row 1, which was"),
    "commit after reuse": StateFault(
        _commit_after_reuse, BatchError, "is not its request's of the verify"
    ),
    "half a verify": StateFault(_half_verify, MetadataError, "the commit would keep windows"),
    "commit twice": StateFault(
        _commit_twice, BatchError, "was written since the verify step", layout="inputs"
    ),
    "missing commit": StateFault(_missing_commit, BatchError, "seq_lens holds .* for row 0"),
    "shared slot": StateFault(_shared_slot, BatchError, "two rows of the batch have one slot"),
    "shared snapshot": StateFault(_shared_snapshot, BatchError, "are snapshot into one slot"),
    "two threads": StateFault(_two_threads, MetadataError, "two threads use one backend"),
    "interleaved threads": StateFault(
        _interleaved_threads, MetadataError, "another thread has prepared a step"
    ),
}
