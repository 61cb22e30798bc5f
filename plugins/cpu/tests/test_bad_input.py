"""Bad input gets an error that says what was wrong and what was expected, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sconv import (
    Backend,
    BatchError,
    ConvStatePool,
    ExportedState,
    ForwardBatch,
    GraphBufferError,
    MetadataError,
    PoolExhaustedError,
    SlotError,
    load_backend,
)
from sconv.testing.digits import digit_spec


def ints(*values: int, dtype: torch.dtype = torch.int64, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


BATCHES: dict[str, tuple[Callable[[], ForwardBatch], str]] = {
    "rows and slots": (
        lambda: ForwardBatch.decode(ints(1), slots=ints(2)),
        r"by req_pool_indices or by slots: exactly one",
    ),
    "neither rows nor slots": (lambda: ForwardBatch.decode(), r"exactly one of them"),
    "rows in two dimensions": (
        lambda: ForwardBatch.decode(ints(1, 2).view(1, 2)),
        r"req_pool_indices has shape \[1, 2\]: expected \[B\]",
    ),
    "slots in no dimension": (
        lambda: ForwardBatch.decode(slots=torch.tensor(1)),
        r"slots has shape \[\]: expected \[B\]",
    ),
    "an extend without lengths": (
        lambda: ForwardBatch.extend(ints(1), None, ints(0)),
        r"extend and mixed need extend_seq_lens and extend_prefix_lens",
    ),
    "a mixed without prefixes": (
        lambda: ForwardBatch.mixed(ints(1), ints(2)),
        r"extend and mixed need extend_seq_lens and extend_prefix_lens",
    ),
    "no draft tokens": (
        lambda: ForwardBatch.target_verify(ints(1), ints(3), 0),
        r"draft_token_num=0: a row has at least its root",
    ),
    "draft tokens in a tensor": (
        lambda: ForwardBatch.target_verify(ints(1), ints(3), torch.tensor(2)),  # type: ignore[arg-type]
        r"draft_token_num=tensor\(2\): expected an int",
    ),
    "half of the links": (
        lambda: ForwardBatch.target_verify(ints(1), ints(3), 2, next_token=ints(1, -1).view(1, 2)),
        r"next_token and next_sibling come together",
    ),
    "two trees": (
        lambda: ForwardBatch.target_verify(
            ints(1),
            ints(3),
            2,
            parents=ints(-1, 0).view(1, 2),
            next_token=ints(1, -1).view(1, 2),
            next_sibling=ints(-1, -1).view(1, 2),
        ),
        r"parents or as next_token and next_sibling, not as both",
    ),
    "a draft-extend without counts": (
        lambda: ForwardBatch.draft_extend(ints(1), ints(3), 2),
        r"draft_extend needs seq_lens and num_accept_tokens",
    ),
    "draft tokens in float": (
        lambda: ForwardBatch.target_verify(ints(1), ints(3), 2.0),  # type: ignore[arg-type]
        r"draft_token_num=2\.0: expected an int",
    ),
    "slots in a list": (
        lambda: ForwardBatch.decode(slots=[1]),  # type: ignore[arg-type]
        r"slots is a list: expected a tensor \[B\]",
    ),
    "idle rows in a string": (
        lambda: ForwardBatch.idle("2"),  # type: ignore[arg-type]
        r"batch_size='2': expected an int",
    ),
    "negative idle rows": (lambda: ForwardBatch.idle(-1), r"batch_size=-1: expected 0 or more"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_a_batch_that_cannot_be_built(case: str) -> None:
    build, message = BATCHES[case]
    with pytest.raises(BatchError, match=message):
        build()


TREE = ints(-1, 0, -1, 0).view(2, 2)
STEPS: dict[str, tuple[ForwardBatch, str]] = {
    "float rows": (
        ForwardBatch.decode(torch.tensor([1.0])),
        r"req_pool_indices is torch.float32: expected int32 or int64",
    ),
    "rows on another device": (
        ForwardBatch.decode(ints(1, device="meta")),
        r"req_pool_indices is on meta, the state is on cpu",
    ),
    "a request row that does not exist": (
        ForwardBatch.decode(ints(1, 5)),
        r"req_pool_indices holds 5: expected 0 to 4",
    ),
    "a negative request row": (
        ForwardBatch.decode(ints(-1)),
        r"req_pool_indices holds -1: expected 0 to 4",
    ),
    "more rows than requests": (
        ForwardBatch.decode(ints(1, 2, 3, 4, 4)),
        r"the batch has 5 rows, this backend takes 4: raise max_requests",
    ),
    "a slot that does not exist": (
        ForwardBatch.decode(slots=ints(7)),
        r"slots holds 7: expected -1 to 6",
    ),
    "a slot below -1": (
        ForwardBatch.decode(slots=ints(-2)),
        r"slots holds -2: expected -1 to 6",
    ),
    "too few lengths": (
        ForwardBatch.decode(ints(4, 1), ints(3)),
        r"seq_lens has shape \[1\]: expected \[2\]",
    ),
    "bool lengths": (
        ForwardBatch.extend(ints(1), torch.tensor([True]), ints(0), num_tokens=1),
        r"extend_seq_lens is torch.bool: expected int32 or int64",
    ),
    "prefixes on another device": (
        ForwardBatch.extend(ints(1), ints(1), ints(0, device="meta"), num_tokens=1),
        r"extend_prefix_lens is on meta",
    ),
    "a list of lengths": (
        ForwardBatch.extend(ints(1), [1], ints(0), num_tokens=1),  # type: ignore[arg-type]
        r"extend_seq_lens is a list: expected a tensor on cpu",
    ),
    "a negative length": (
        ForwardBatch.extend(ints(1, 4), ints(2, -1), ints(0, 0), num_tokens=1),
        r"extend_seq_lens holds -1: expected 0 to",
    ),
    "more tokens than said": (
        ForwardBatch.extend(ints(1, 4), ints(2, 2), ints(0, 0), num_tokens=3),
        r"num_tokens=3, but extend_seq_lens add up to 4",
    ),
    "more draft tokens than windows": (
        ForwardBatch.target_verify(ints(1), ints(3), 4),
        r"draft_token_num=4.*max_draft_tokens=3",
    ),
    "parents of another width": (
        ForwardBatch.target_verify(ints(1, 4), ints(3, 3), 3, parents=TREE),
        r"parents has shape \[2, 2\]: expected \[2, 3\]",
    ),
    "float parents": (
        ForwardBatch.target_verify(ints(1, 4), ints(3, 3), 2, parents=TREE.float()),
        r"parents is torch.float32: expected int32 or int64",
    ),
    "links of another width": (
        ForwardBatch.target_verify(
            ints(1, 4), ints(3, 3), 2, next_token=TREE, next_sibling=TREE[:1]
        ),
        r"next_sibling has shape \[1, 2\]: expected \[2, 2\]",
    ),
    "too few counts": (
        ForwardBatch.draft_extend(ints(1, 4), ints(3, 3), 2, ints(1)),
        r"num_accept_tokens has shape \[1\]: expected \[2\]",
    ),
    "an int mask": (
        ForwardBatch.decode(ints(1), mamba_track_mask=ints(1), mamba_track_indices=ints(5)),
        r"mamba_track_mask is torch.int64: expected bool",
    ),
    "a snapshot slot that does not exist": (
        ForwardBatch.decode(ints(1), mamba_track_indices=ints(223)),
        r"mamba_track_indices holds 223: expected -1 to 6",
    ),
    "snapshot lengths of other rows": (
        ForwardBatch.extend(
            ints(1),
            ints(1),
            ints(0),
            num_tokens=1,
            mamba_track_indices=ints(5),
            mamba_track_seqlens=ints(1, 1),
        ),
        r"mamba_track_seqlens has shape \[2\]: expected \[1\]",
    ),
}


@pytest.mark.parametrize("case", STEPS)
@pytest.mark.parametrize("prepare", ["eager", "out of graph"])
def test_a_step_that_is_refused(backend: Backend, case: str, prepare: str) -> None:
    batch, message = STEPS[case]
    if prepare == "eager":
        with pytest.raises(BatchError, match=message):
            backend.init_forward_metadata(batch)
        return
    backend.init_graph_state(4, 12)
    with pytest.raises(BatchError, match=message):
        backend.init_forward_metadata_out_graph(batch)


def test_a_step_larger_than_the_buffers(backend: Backend) -> None:
    backend.init_graph_state(2, 4)
    with pytest.raises(GraphBufferError, match=r"have .*max_bs=2.*need .*max_bs=3"):
        backend.init_forward_metadata_out_graph(ForwardBatch.decode(ints(1, 2, 3)))
    tokens = ForwardBatch.extend(ints(1, 4), ints(2, 3), ints(0, 0))
    with pytest.raises(GraphBufferError, match=r"max_num_tokens=4, need .*max_num_tokens=5"):
        backend.init_forward_metadata_out_graph(tokens)


@pytest.mark.parametrize(
    ("slots", "shared"),
    [(ints(2, 3, 2), r"two rows of the batch have one slot: \[2, 2, 3\]"), (ints(0, 0, 2), None)],
)
@pytest.mark.usefixtures("checked")
def test_two_rows_with_one_slot_are_refused_when_checks_are_on(
    backend: Backend, slots: Tensor, shared: str | None
) -> None:
    batch = ForwardBatch.decode(slots=slots)
    if shared is None:
        backend.init_forward_metadata(batch)
        return
    with pytest.raises(BatchError, match=shared):
        backend.init_forward_metadata(batch)


@pytest.mark.usefixtures("checked")
def test_counts_past_the_step_are_refused_when_checks_are_on(backend: Backend) -> None:
    batch = ForwardBatch.draft_extend(ints(1), ints(3), 2, ints(3))
    with pytest.raises(BatchError, match="num_accept_tokens holds 3: a row has 2 tokens"):
        backend.init_forward_metadata(batch)


@pytest.mark.parametrize("given", [None, {"mode": "decode"}, [1]])
@pytest.mark.parametrize("prepare", ["", "_out_graph", "_in_graph"])
def test_a_step_that_is_no_batch(backend: Backend, given: Any, prepare: str) -> None:
    backend.init_graph_state(4, 12)
    with pytest.raises(BatchError, match=r"forward_batch is .*: expected a sconv.ForwardBatch"):
        getattr(backend, f"init_forward_metadata{prepare}")(given)


@pytest.mark.parametrize("sizes", [{"max_bs": "4"}, {"max_num_tokens": 4.0}, {"max_bs": True}])
def test_static_buffers_of_no_number(backend: Backend, sizes: dict[str, Any]) -> None:
    (name, value), *_ = sizes.items()
    with pytest.raises(BatchError, match=rf"{name}={value!r}: expected an int"):
        backend.init_graph_state(**({"max_bs": 4, "max_num_tokens": 12} | sizes))


COMMITS: dict[str, tuple[dict[str, Any], str]] = {
    "float steps": (
        {"last": torch.tensor([1.0, 0.0])},
        r"last_correct_step_indices is torch.float32: expected int32 or int64",
    ),
    "too few steps": (
        {"last": ints(1)},
        r"last_correct_step_indices has shape \[1\]: expected \[2\]",
    ),
    "steps on another device": (
        {"last": ints(1, 0, device="meta")},
        r"last_correct_step_indices is on meta, the state is on cpu",
    ),
    "steps in a list": (
        {"last": [1, 0]},
        r"last_correct_step_indices is a list: expected a tensor on cpu",
    ),
    "no steps": ({"last": None}, r"last_correct_step_indices is None: expected a tensor on cpu"),
    "rows in a list": ({"rows": [4, 1]}, r"req_pool_indices is a list: expected a tensor on cpu"),
    "rows in no dimension": (
        {"rows": torch.tensor(4)},
        r"req_pool_indices has shape \[\]: expected \[B\]",
    ),
    "rows in float": (
        {"rows": torch.tensor([4.0, 1.0])},
        r"req_pool_indices is torch.float32",
    ),
    "rows of more requests than were verified": (
        {"last": ints(0, 0, 0), "rows": ints(4, 1, 2)},
        r"the commit has 3 rows, the last verify step had 2",
    ),
    "a request row that does not exist": (
        {"rows": ints(4, 5)},
        r"req_pool_indices holds 5: expected 0 to 4",
    ),
    "snapshot slots without steps": (
        {"mamba_track_indices": ints(5, -1)},
        r"mamba_track_indices and mamba_steps_to_track come together",
    ),
    "too few snapshot steps": (
        {"mamba_track_indices": ints(5, -1), "mamba_steps_to_track": ints(0)},
        r"mamba_steps_to_track has shape \[1\]: expected \[2\]",
    ),
    "bool snapshot slots": (
        {
            "mamba_track_indices": torch.tensor([True, False]),
            "mamba_steps_to_track": ints(0, 0),
        },
        r"mamba_track_indices is torch.bool",
    ),
}


@pytest.mark.parametrize("case", COMMITS)
def test_a_commit_that_is_refused(backend: Backend, case: str) -> None:
    changed, message = COMMITS[case]
    arguments = {"last": ints(1, 0), "rows": ints(4, 1), **changed}
    with pytest.raises(BatchError, match=message):
        backend.update_mamba_state_after_mtp_verify(
            arguments.pop("last"), req_pool_indices=arguments.pop("rows"), **arguments
        )


def test_a_commit_without_a_verify_step() -> None:
    fresh = load_backend("cpu", spec=digit_spec(max_draft_tokens=2))
    with pytest.raises(MetadataError, match="nothing to commit: no verify step was prepared"):
        fresh.update_mamba_state_after_mtp_verify(ints(0), req_pool_indices=ints(1))


SLOTS: dict[str, tuple[Callable[[ConvStatePool], object], type[Exception], str]] = {
    "more slots than are free": (
        lambda pool: pool.alloc(4),
        PoolExhaustedError,
        r"alloc\(4\): 3 of 6 slots are free",
    ),
    "a negative count": (lambda pool: pool.alloc(-1), SlotError, r"alloc\(-1\): expected"),
    "a count in float": (
        lambda pool: pool.alloc(1.0),  # type: ignore[arg-type]
        SlotError,
        r"alloc\(1.0\): expected",
    ),
    "a slot that was never handed out": (
        lambda pool: pool.free([2, 5]),
        SlotError,
        r"free: slot 5 is not in use",
    ),
    "a slot twice": (lambda pool: pool.free([2, 2]), SlotError, r"\[2, 2\] names a slot twice"),
    "the dummy": (lambda pool: pool.free([2, 0]), SlotError, r"slot 0 is outside 1\.\.6"),
    "no slot": (lambda pool: pool.free(-1), SlotError, r"-1 means no slot"),
    "a slot past the pool": (lambda pool: pool.free(ints(7)), SlotError, r"slot 7 is outside"),
    "float slots": (
        lambda pool: pool.free(torch.tensor([2.0])),
        SlotError,
        r"got a torch.float32 tensor of shape \[1\]",
    ),
    "a word": (lambda pool: pool.free("two"), SlotError, r"got 'two'"),  # type: ignore[arg-type]
    "clearing a free slot": (lambda pool: pool.clear([2, 6]), SlotError, r"clear: slot 6"),
    "copying a free slot": (lambda pool: pool.copy(6, 2), SlotError, r"copy: slot 6"),
    "copying to a free slot": (lambda pool: pool.copy(2, 6), SlotError, r"copy: slot 6"),
    "copying in a circle": (
        lambda pool: pool.copy([2, 3], [3, 2]),
        SlotError,
        r"slots \[2, 3\] are source and destination",
    ),
    "copying two to one": (
        lambda pool: pool.copy([2, 3], [1, 1]),
        SlotError,
        r"names a slot twice",
    ),
    "copying one to two": (
        lambda pool: pool.copy([2], [1, 3]),
        SlotError,
        r"1 sources for 2 destinations",
    ),
    "forking a free slot": (lambda pool: pool.fork([2, 6]), SlotError, r"fork: slot 6"),
    "forking more than fits": (
        lambda pool: pool.fork([2, 2, 2, 2]),
        PoolExhaustedError,
        r"alloc\(4\): 3 of 6",
    ),
    "a row that does not exist": (
        lambda pool: pool.assign(5, 1),
        SlotError,
        r"request row 5 is outside 1\.\.4",
    ),
    "the dummy row": (lambda pool: pool.assign(0, 1), SlotError, r"row 0 is the dummy"),
    "a row twice": (
        lambda pool: pool.assign([2, 2], [1, 3]),
        SlotError,
        r"\[2, 2\] names a request row twice",
    ),
    "more rows than slots": (
        lambda pool: pool.assign([2, 3], [1]),
        SlotError,
        r"2 request rows for 1 slots",
    ),
    "another request's slot": (
        lambda pool: pool.assign([2, 3], [1, 2]),
        SlotError,
        r"a slot of \[1, 2\] belongs to another request row",
    ),
    "a free slot for a row": (lambda pool: pool.assign(2, 6), SlotError, r"assign: slot 6"),
    "restoring to a free slot": (
        lambda pool: pool.restore(6, pool.export(2)),
        SlotError,
        r"restore: slot 6",
    ),
    "restoring another dtype": (
        lambda pool: pool.restore(
            2,
            ExportedState(pool.spec.fingerprint, [part.half() for part in pool.export(3)]),
        ),
        SlotError,
        r"restore: layer 0 is \[1, 3, 10\] torch.float16",
    ),
    "restoring too many": (
        lambda pool: pool.restore(2, pool.export([2, 3])),
        SlotError,
        r"restore: layer 0 is \[2, 3, 10\]",
    ),
    "a second binding": (
        lambda pool: pool.bind(pool.layers),
        RuntimeError,
        r"bind: this pool has its state",
    ),
}


@pytest.mark.parametrize("case", SLOTS)
def test_a_slot_operation_that_is_refused(backend: Backend, case: str) -> None:
    call, error, message = SLOTS[case]
    with pytest.raises(error, match=message):
        call(backend.pool)
