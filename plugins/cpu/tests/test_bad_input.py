"""Bad input gets an error that says what was wrong and what was expected, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sconv import (
    Backend,
    BatchError,
    ConvStatePool,
    ForwardBatch,
    GraphBufferError,
    MetadataError,
    PoolExhaustedError,
    SlotError,
    SpecError,
    load_backend,
)
from sconv.testing.digits import (
    digit_inputs,
    digit_spec,
    digit_weight,
    fill_pool,
    read_window,
    run_digits,
)
from sconv.testing.harness import assert_same_bits

DIM = 5


def ints(*values: int, dtype: torch.dtype = torch.int64, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def everything(backend: Backend) -> dict[str, Tensor]:
    pool = backend.pool
    tensors = {f"layer {number}": layer for number, layer in enumerate(pool.layers)}
    tensors |= {f"windows {number}": layer for number, layer in enumerate(pool.windows.layers)}
    tensors["req_to_slot"] = pool.req_to_slot
    tensors["live slots"] = ints(*pool.live_slots(), pool.num_free)
    return {name: value.clone() for name, value in tensors.items()}


@pytest.fixture
def backend() -> Iterator[Backend]:
    """A verify step is in flight, two requests are live; afterwards all is as it was."""
    spec = digit_spec(
        num_layers=2,
        streams=("a", "b"),
        dim=DIM,
        num_slots=6,
        max_requests=4,
        max_draft_tokens=3,
        track_interval=4,
    )
    made = load_backend("cpu", spec=spec)
    pool = made.pool
    pool.alloc(3)
    fill_pool(pool, {2: [1, 2, 3], 3: [4, 5, 6]}, {4: 2, 1: 3})
    for windows in pool.windows.layers:
        windows.fill_(0)
    batch = ForwardBatch.target_verify(ints(4, 1), ints(3, 3), 2)
    run_digits(made, batch, [4, 5, 7, 8])
    before = everything(made)
    yield made
    for name, value in everything(made).items():
        assert_same_bits(value, before[name], name)
    # What is in flight can still be committed, on the rows that it was made with.
    made.update_mamba_state_after_mtp_verify(ints(1, 0), req_pool_indices=ints(4, 1))
    assert (read_window(pool, 2), read_window(pool, 3)) == ([3, 4, 5], [5, 6, 7])


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
        r"extend_seq_lens holds -1: expected 0 or more",
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
def test_two_rows_with_one_slot_are_refused_when_checks_are_on(
    backend: Backend, slots: Tensor, shared: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCONV_CHECK", "1")
    batch = ForwardBatch.decode(slots=slots)
    if shared is None:
        backend.init_forward_metadata(batch)
        return
    with pytest.raises(BatchError, match=shared):
        backend.init_forward_metadata(batch)


def test_counts_past_the_step_are_refused_when_checks_are_on(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCONV_CHECK", "1")
    batch = ForwardBatch.draft_extend(ints(1), ints(3), 2, ints(3))
    with pytest.raises(BatchError, match="num_accept_tokens holds 3: a row has 2 tokens"):
        backend.init_forward_metadata(batch)


def calls() -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    """Calls of a decode step of two rows, each with one bad argument."""
    wide = torch.zeros(2, 2 * DIM)
    return {
        "too few tokens": (
            {"x": torch.zeros(1, DIM)},
            BatchError,
            r"x has shape \[1, 5\]: expected packed \[T, D\] = \[2, 5\] for stream 'a' of layer 0",
        ),
        "other channels": ({"x": torch.zeros(2, DIM + 1)}, BatchError, r"x has shape \[2, 6\]"),
        "three dimensions": (
            {"x": torch.zeros(2, 1, DIM)},
            BatchError,
            r"x has shape \[2, 1, 5\]: expected packed",
        ),
        "int activations": (
            {"x": torch.zeros(2, DIM, dtype=torch.int64)},
            BatchError,
            r"x is torch.int64: expected bfloat16, float16 or float32",
        ),
        "double activations": (
            {"x": torch.zeros(2, DIM, dtype=torch.float64)},
            BatchError,
            r"x is torch.float64",
        ),
        "x on another device": (
            {"x": torch.zeros(2, DIM, device="meta")},
            BatchError,
            r"x is on meta, the state is on cpu",
        ),
        "channels that are strided": (
            {"x": wide[:, ::2]},
            BatchError,
            r"x has strides \[10, 2\]: its channels must be contiguous",
        ),
        "a narrow weight": (
            {"weight": torch.zeros(DIM, 3)},
            BatchError,
            r"weight has shape \[5, 3\]: expected \[D, K\].*D=5, K=4",
        ),
        "a transposed weight": (
            {"weight": torch.zeros(4, DIM)},
            BatchError,
            r"weight has shape \[4, 5\]",
        ),
        "a dense weight": (
            {"weight": torch.zeros(DIM, DIM, 4)},
            BatchError,
            r"weight has shape \[5, 5, 4\]",
        ),
        "a double weight": (
            {"weight": torch.zeros(DIM, 4, dtype=torch.float64)},
            BatchError,
            r"weight is torch.float64",
        ),
        "a weight on another device": (
            {"weight": torch.zeros(DIM, 4, device="meta")},
            BatchError,
            r"weight is on meta",
        ),
        "a wide bias": (
            {"bias": torch.zeros(DIM + 1)},
            BatchError,
            r"bias has shape \[6\]: expected \[5\]",
        ),
        "a bias on another device": (
            {"bias": torch.zeros(DIM, device="meta")},
            BatchError,
            r"bias is on meta",
        ),
        "another activation": (
            {"activation": "relu"},
            BatchError,
            r"activation='relu': expected None, 'silu' or 'swish'",
        ),
        "no x": ({"x": None}, BatchError, r"x is None: expected a tensor \[T, D\]"),
        "x in a list": ({"x": [[0.0]]}, BatchError, r"x is a list: expected a tensor"),
        "x of numpy": (
            {"x": torch.zeros(2, DIM).numpy()},
            BatchError,
            r"x is a ndarray: expected a tensor",
        ),
        "no weight": ({"weight": None}, BatchError, r"weight is None: expected a tensor \[D, K\]"),
        "a weight in a list": ({"weight": [1.0]}, BatchError, r"weight is a list: expected"),
        "a weight of numpy": (
            {"weight": torch.zeros(DIM, 4).numpy()},
            BatchError,
            r"weight is a ndarray: expected a tensor",
        ),
        "a bias in a list": (
            {"bias": [0.0] * DIM},
            BatchError,
            r"bias is a list: expected a tensor \[D\], or None",
        ),
        "no batch": (
            {"forward_batch": None},
            BatchError,
            r"forward_batch is None: expected a sconv.ForwardBatch",
        ),
        "an engine's batch": (
            {"forward_batch": {"mode": "decode"}},
            BatchError,
            r"forward_batch is a dict: expected a sconv.ForwardBatch",
        ),
        "a residual that is no bool": (
            {"residual": 1},
            BatchError,
            r"residual=1: expected True or False",
        ),
        "a layer in a string": ({"layer_id": "0"}, SpecError, r"layer_id='0': expected an int"),
        "a layer that is a bool": ({"layer_id": True}, SpecError, r"layer_id=True: expected an"),
        "a layer in a tensor": ({"layer_id": ints(0)}, SpecError, r"layer_id=tensor\(\[0\]\): exp"),
        "no layer": ({"layer_id": None}, SpecError, r"layer_id=None: expected an int, 0 to 1"),
        "a stream by number": ({"stream": 1}, SpecError, r"stream=1: layer 0 has 'a', 'b'"),
        "a layer that does not exist": (
            {"layer_id": 2},
            SpecError,
            r"layer_id=2: this backend has layers 0 to 1",
        ),
        "a negative layer": ({"layer_id": -1}, SpecError, r"layer_id=-1"),
        "a stream that does not exist": (
            {"stream": "c"},
            SpecError,
            r"stream='c': layer 0 has 'a', 'b'",
        ),
        "another batch": (
            {"forward_batch": ForwardBatch.decode(ints(1))},
            MetadataError,
            r"the prepared step is decode with 2 rows, this batch is decode with 1",
        ),
        "other rows": (
            {"forward_batch": ForwardBatch.decode(ints(4, 1))},
            MetadataError,
            r"are decode with 2 rows each, and differ in their rows or lengths: prepare this",
        ),
        "other names of rows": (
            {"forward_batch": ForwardBatch.decode(slots=ints(1, 4))},
            MetadataError,
            r"differ in their rows or lengths",
        ),
        "another mode": (
            {"forward_batch": ForwardBatch.extend(ints(1, 4), ints(1, 1), ints(3, 3))},
            MetadataError,
            r"the prepared step is decode with 2 rows, this batch is extend with 2",
        ),
    }


@pytest.mark.parametrize("case", calls())
@pytest.mark.parametrize("group", [False, True], ids=["one", "group"])
def test_a_convolution_that_is_refused(backend: Backend, case: str, group: bool) -> None:
    """In a group the bad one is the last: those before it must not have run."""
    changed, error, message = calls()[case]
    batch = ForwardBatch.decode(ints(1, 4))
    backend.init_forward_metadata(batch)
    good: dict[str, Any] = {
        "x": torch.ones(2, DIM),
        "weight": digit_weight(DIM),
        "layer_id": 0,
        "stream": "a",
        "forward_batch": batch,
        "bias": None,
        "activation": None,
        "residual": True,
    }
    bad = {**good, **changed}

    def run_one() -> None:
        backend.short_conv(bad.pop("x"), bad.pop("weight"), **bad)

    def run_group() -> None:
        backend.short_conv_group(
            [good["x"], bad["x"]],
            [good["weight"], bad["weight"]],
            layer_id=bad["layer_id"],
            streams=["b" if bad["stream"] == "a" else "a", bad["stream"]],
            forward_batch=bad["forward_batch"],
            biases=[None, bad["bias"]],
            activation=bad["activation"],
            residual=bad["residual"],
        )

    with pytest.raises(error, match=message):
        (run_group if group else run_one)()


def test_a_group_that_does_not_match(backend: Backend) -> None:
    batch = ForwardBatch.decode(ints(1, 4))
    backend.init_forward_metadata(batch)
    x, weight = torch.ones(2, DIM), digit_weight(DIM)
    with pytest.raises(BatchError, match="2 inputs, 1 weights, 2 streams, 2 biases"):
        backend.short_conv_group(
            [x, x], [weight], layer_id=0, streams=["a", "b"], forward_batch=batch
        )
    with pytest.raises(BatchError, match=r"\['a', 'a'\] names a stream twice"):
        backend.short_conv_group(
            [x, x], [weight, weight], layer_id=0, streams=["a", "a"], forward_batch=batch
        )


@pytest.mark.parametrize("missing", ["xs", "weights", "streams", "biases"])
def test_a_group_that_is_no_sequence(backend: Backend, missing: str) -> None:
    batch = ForwardBatch.decode(ints(1, 4))
    backend.init_forward_metadata(batch)
    arguments: dict[str, Any] = {"xs": [], "weights": [], "streams": [], "biases": [], missing: 3}
    with pytest.raises(BatchError, match=rf"{missing}.* an int.*: expected sequences"):
        backend.short_conv_group(**arguments, layer_id=0, forward_batch=batch)


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


def test_a_convolution_before_any_step() -> None:
    fresh = load_backend("cpu", spec=digit_spec())
    batch = ForwardBatch.decode(slots=ints(1))
    with pytest.raises(MetadataError, match="no step is prepared: call init_forward_metadata"):
        fresh.short_conv(
            digit_inputs([1]), digit_weight(), layer_id=0, stream="a", forward_batch=batch
        )
    with pytest.raises(MetadataError, match="no step is prepared"):
        fresh.conv_state_metadata(0, batch)


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
        lambda pool: pool.restore(2, [part.half() for part in pool.export(3)]),
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
