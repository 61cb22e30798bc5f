"""What may be recorded, on every mode: no host sync, fixed addresses, and right after a replay.

A replay repeats operators on the memory of the recorded call. Capture and replay always differ in
slots, lengths, trees, snapshots and values, and memory is allocated in between.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from sconv import (
    Backend,
    ConvStatePool,
    ForwardBatch,
    ForwardMode,
    GraphBufferError,
    StateSpec,
    load_backend,
)
from sconv.testing.captures import (
    FREE,
    KINDS,
    LIVE,
    ROWS,
    captured_spec,
    captured_step,
    load_into,
    refill,
    sized_harness,
    tensors_of,
)
from sconv.testing.digits import digit_inputs, digit_spec, digit_weight, fill_pool, run_digits
from sconv.testing.harness import Harness
from sconv.testing.recording import HostSyncError, record


def spec_of(window_axis: str = "time", layout: str = "dense") -> StateSpec:
    return captured_spec(
        dtype=torch.bfloat16,
        window_axis=window_axis,
        draft_topk=1 if layout == "dedup" else 2,
        window_layout=layout,
    )


def build(axis: str = "time", layout: str = "dense") -> tuple[Backend, Harness]:
    backend = load_backend("cpu", spec=spec_of(axis, layout))
    return backend, sized_harness(backend)


def capture_and_replay(harness: Harness, kind: str, *, by_slots: bool = False) -> None:
    """Record one step, then replay it with others and compare each with the oracle."""
    backend = harness.backend
    first = captured_step(kind, 0, by_slots=by_slots)
    batch, inputs = harness.batch(first), harness.inputs(first.num_tokens)

    def step() -> dict[tuple[int, str], Tensor]:
        backend.init_forward_metadata_in_graph(batch)
        return harness.convolve(batch, inputs)

    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    recording = record(step)
    for seed in (1, 2, 3):
        other = captured_step(kind, seed, by_slots=by_slots)
        refill(harness)
        load_into(batch, harness.batch(other))
        for key, value in harness.inputs(other.num_tokens).items():
            inputs[key].copy_(value)
        before = harness.state()
        backend.init_forward_metadata_out_graph(batch)
        recording.replay()
        harness.check(other, inputs, before, recording.result)


@pytest.mark.parametrize("axis", ["time", "channel"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_equals_the_oracle(kind: str, axis: str) -> None:
    _, harness = build(axis)
    capture_and_replay(harness, kind)


def virtual_pool(*, function: bool) -> tuple[ConvStatePool, dict[int, int]]:
    """Engine memory whose ids are virtual, by a table or by a function that no graph records."""
    spec = spec_of()
    ids = {0: 0, **{row: 25 - row for row in range(1, 13)}}
    table = torch.full((26,), -1, dtype=torch.int64)
    for row, number in ids.items():
        table[number] = row
    layers = [torch.zeros(13, 3, 69, dtype=spec.dtype), torch.zeros(13, 3, 3, dtype=spec.dtype)]
    translate = (lambda known: table[known]) if function else table
    return ConvStatePool.adopt(spec, layers, virtual_to_physical=translate), ids


@pytest.mark.parametrize("by_slots", [False, True])
@pytest.mark.parametrize("function", [False, True], ids=["table", "function"])
@pytest.mark.parametrize("kind", ["decode", "extend", "tree", "draft_extend"])
def test_a_replay_translates_virtual_slots(kind: str, function: bool, by_slots: bool) -> None:
    pool, ids = virtual_pool(function=function)
    backend = load_backend("cpu", spec=pool.spec, pool=pool)
    harness = sized_harness(backend, seed=2, activation=None, slot_ids=ids)
    capture_and_replay(harness, kind, by_slots=by_slots)


@pytest.mark.parametrize("warm_up", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "idle"])
def test_metadata_refreshed_outside_of_a_graph_reaches_recorded_layers(
    kind: str, warm_up: bool
) -> None:
    """An engine may record the layers alone, after having run them once."""
    backend, harness = build()
    first = captured_step(kind, 0)
    batch, inputs = harness.batch(first), harness.inputs(first.num_tokens)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    if warm_up:
        harness.convolve(batch, inputs)
    recording = record(lambda: harness.convolve(batch, inputs))
    for seed in (1, 2):
        other = captured_step(kind, seed)
        refill(harness)
        load_into(batch, harness.batch(other))
        for key, value in harness.inputs(other.num_tokens).items():
            inputs[key].copy_(value)
        before = harness.state()
        backend.init_forward_metadata_out_graph(batch)
        backend.init_forward_metadata_in_graph(batch)
        recording.replay()
        harness.check(other, inputs, before, recording.result)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("chain", "dense"),
        ("chain", "inputs"),
        ("chain", "dedup"),
        ("tree", "dense"),
        ("tree", "inputs"),
        ("links", "inputs"),
    ],
)
@pytest.mark.parametrize("axis", ["time", "channel"])
def test_a_recorded_commit_equals_the_oracle(kind: str, layout: str, axis: str) -> None:
    backend, harness = build(axis, layout)
    assert backend.pool.window_layout == layout
    step = captured_step(kind, 1)
    rows = harness.request_rows(step)
    batch, inputs = step.batch(rows, harness.slot_id), harness.inputs(step.num_tokens)

    def verify() -> None:
        backend.init_forward_metadata_in_graph(batch)
        harness.convolve(batch, inputs)

    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    verified = record(verify)
    for value in inputs.values():
        value.copy_(torch.randn(value.shape))
    refill(harness)
    verified.replay()
    at_verify = harness.state()
    steps, tracks = torch.full((ROWS,), -1), torch.full((ROWS,), -1)
    track_steps = torch.full((ROWS,), -1)
    names = torch.tensor(rows)
    recording = record(
        lambda: backend.update_mamba_state_after_mtp_verify(
            steps, tracks, track_steps, req_pool_indices=names
        )
    )
    last, snapshots = [2, 0, -1, 1, 2], [1, 0, 0, -1, 2]
    slots = [FREE[2], -1, FREE[0], FREE[1], FREE[4]]
    commit = backend.update_mamba_state_after_mtp_verify

    def replay(*args: Tensor, req_pool_indices: Tensor) -> None:
        for static, value in zip((steps, tracks, track_steps), args, strict=True):
            static.copy_(value)
        recording.replay()

    harness.backend = _with_commit(backend, replay)  # type: ignore[assignment]
    assert commit is not replay
    harness.commit(
        step,
        inputs,
        at_verify,
        last,
        track_slots=slots,
        track_steps=snapshots,
        request_rows=rows,
    )


class _with_commit:  # noqa: N801
    """A backend whose commit is another callable."""

    def __init__(self, backend: Backend, commit: Callable[..., None]) -> None:
        self._backend = backend
        self.update_mamba_state_after_mtp_verify = commit

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)


@pytest.mark.parametrize("translate", ["none", "table", "function"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_mode_needs_a_value_on_the_host(kind: str, translate: str) -> None:
    pool, ids = None, None
    if translate != "none":
        pool, ids = virtual_pool(function=translate == "function")
    backend = load_backend("cpu", spec=spec_of(), pool=pool)
    harness = sized_harness(backend, x_dtype=torch.float32, activation=None, slot_ids=ids)
    step = captured_step(kind, 1)
    batch, inputs = harness.batch(step), harness.inputs(step.num_tokens)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        backend.init_forward_metadata_in_graph(batch)
        outputs = harness.convolve(batch, inputs)
        if step.mode is ForwardMode.TARGET_VERIFY:
            none = torch.full((ROWS,), -1)
            backend.update_mamba_state_after_mtp_verify(none, none, none, req_pool_indices=none)
    for key, y in outputs.items():
        assert (y.shape, y.dtype) == (inputs[key].shape, inputs[key].dtype)
    # Nothing fake stayed behind.
    harness.run(captured_step(kind, 2))


def test_a_hook_that_reads_a_value_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import sconv.torch_backend.fill_metadata

    fill = sconv.torch_backend.fill_metadata._fill_writes

    def reads(meta: object, batch: ForwardBatch) -> None:
        fill(meta, batch)  # type: ignore[arg-type]
        assert int(meta.cu[-1]) >= 0  # type: ignore[attr-defined]

    monkeypatch.setattr(sconv.torch_backend.fill_metadata, "_fill_writes", reads)
    backend, harness = build()
    batch = harness.batch(captured_step("extend", 1))
    backend.init_forward_metadata_out_graph(batch)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(DataDependentOutputException),
    ):
        backend.init_forward_metadata_in_graph(batch)
    with pytest.raises(HostSyncError):
        record(lambda: backend.init_forward_metadata_in_graph(batch))


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_stays_at_its_address(kind: str) -> None:
    """For one batch size, whatever other sizes and modes ran in between."""
    backend, harness = build()
    found = []
    for seed in (0, 1):
        batch = harness.batch(captured_step(kind, seed))
        backend.init_forward_metadata_out_graph(batch)
        backend.init_forward_metadata_in_graph(batch)
        meta = backend.conv_state_metadata(0, batch)
        found.append({name: value.data_ptr() for name, value in tensors_of(meta).items()})
        for other in ("extend", "tree", "draft_extend", "decode"):
            between = harness.batch(captured_step(other, 5))
            backend.init_forward_metadata_out_graph(between)
            backend.init_forward_metadata_in_graph(between)
        junk = [torch.ones(1 << 12) for _ in range(50)]
        del junk
    assert found[0] == found[1]
    assert {"cache_indices", "cu", "si", "track_conv_indices", "writes"} <= found[0].keys()


def test_another_batch_size_starts_at_the_same_address() -> None:
    backend, _ = build()
    starts = set()
    for rows in (1, 3, ROWS):
        batch = ForwardBatch.decode(slots=torch.tensor(LIVE[:rows]))
        backend.init_forward_metadata_out_graph(batch)
        backend.init_forward_metadata_in_graph(batch)
        meta = backend.conv_state_metadata(0, batch)
        starts.add(tuple(value.data_ptr() for value in tensors_of(meta).values()))
    assert len(starts) == 1


def test_a_batch_larger_than_the_buffers_says_both_sizes() -> None:
    backend = load_backend("cpu", spec=digit_spec(max_requests=8))
    backend.init_graph_state(2, 4)
    with pytest.raises(GraphBufferError) as rows:
        backend.init_forward_metadata_out_graph(ForwardBatch.decode(slots=torch.tensor([1, 2, 3])))
    assert (rows.value.have, rows.value.need) == (
        {"max_bs": 2, "max_num_tokens": 4},
        {"max_bs": 3, "max_num_tokens": 3},
    )
    long = ForwardBatch.extend(
        None, torch.tensor([5]), torch.tensor([0]), slots=torch.tensor([1]), num_tokens=5
    )
    with pytest.raises(GraphBufferError, match=r"have .*max_num_tokens=4, need .*max_num_tokens=5"):
        backend.init_forward_metadata_out_graph(long)
    with pytest.raises(GraphBufferError):
        backend.init_forward_metadata_in_graph(long)


def test_buffers_come_before_a_capture() -> None:
    backend = load_backend("cpu", spec=digit_spec())
    batch = ForwardBatch.decode(slots=torch.tensor([1]))
    with pytest.raises(GraphBufferError, match="call init_graph_state before the first capture"):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
    with pytest.raises(GraphBufferError, match="at least one row"):
        backend.init_graph_state(0, 8)
    backend.init_graph_state(4, 8)
    backend.init_graph_state(4, 8)
    backend.init_graph_state(2, 3)
    with pytest.raises(GraphBufferError, match=r"have max_bs=4.*need max_bs=5"):
        backend.init_graph_state(5, 8)


def test_a_padded_batch_may_have_more_rows_than_requests() -> None:
    backend = load_backend("cpu", spec=digit_spec(max_requests=2, max_draft_tokens=2))
    backend.init_graph_state(4, 8)
    fill_pool(backend.pool, {3: [1, 2, 3]}, {1: 3})
    rows = torch.tensor([1, 2, 2, 2])
    batch = ForwardBatch.target_verify(rows, rows, 2)
    assert run_digits(backend, batch, [4, 5] * 4) == [4321, 5432] + [0] * 6


def test_an_eager_step_leaves_the_static_buffers_alone() -> None:
    """An engine may run an eager step between the preparation of a replay and the replay."""
    backend = load_backend("cpu", spec=digit_spec())
    backend.init_graph_state(2, 2)
    fill_pool(backend.pool, {3: [1, 2, 3], 4: [4, 5, 6], 6: [7, 8, 9]})
    batch, x = ForwardBatch.decode(slots=torch.tensor([3, 4])), digit_inputs([4, 7])
    backend.init_forward_metadata_out_graph(batch)
    backend.init_forward_metadata_in_graph(batch)
    prepared = backend.forward_metadata
    assert run_digits(backend, ForwardBatch.decode(slots=torch.tensor([6, -1])), [0, 0]) == [987, 0]
    backend.forward_metadata = prepared
    y = backend.short_conv(
        x, digit_weight(), layer_id=0, stream="a", forward_batch=batch, residual=False
    )
    assert y[:, 0].tolist() == [4321, 7654]
