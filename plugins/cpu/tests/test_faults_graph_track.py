"""Capture, replay and prefix-cache snapshots: faults that other systems had.

Names carry the id of the entry in docs/reference/known-faults.md. Outputs read as digits: 4321 is
token 4 after the window [1, 2, 3]. A recording repeats operators on the memory of the recorded
call, as a graph does, with no Python in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sconv.torch_backend.fill_metadata
from sconv import (
    Backend,
    BatchError,
    ForwardBatch,
    ForwardMode,
    GraphBufferError,
    MetadataError,
    SlotError,
    crossing_steps,
    load_backend,
)
from sconv.testing.digits import (
    digit_inputs,
    digit_spec,
    digit_weight,
    fill_pool,
    read_digits,
    read_window,
    run_digits,
)
from sconv.testing.harness import assert_same_bits
from sconv.testing.recording import Recording, record


def cpu(**options: Any) -> Backend:
    return load_backend("cpu", spec=digit_spec(**options))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def metadata_tensors(backend: Backend, batch: ForwardBatch) -> dict[str, Tensor]:
    meta = backend.conv_state_metadata(0, batch)
    fields = {name: getattr(meta, name) for name in type(meta).__dataclass_fields__}
    return {name: value for name, value in fields.items() if isinstance(value, Tensor)}


def addresses(backend: Backend, batch: ForwardBatch) -> dict[str, int]:
    return {name: value.data_ptr() for name, value in metadata_tensors(backend, batch).items()}


def graph(backend: Backend, batch: ForwardBatch, x: Tensor) -> Recording:
    """Record the in-graph half of a step and its one convolution."""

    def step() -> Tensor:
        backend.init_forward_metadata_in_graph(batch)
        return backend.short_conv(
            x, digit_weight(), layer_id=0, stream="a", forward_batch=batch, residual=False
        )

    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    return record(step)


def capture_junk_replay(backend: Backend) -> tuple[Recording, dict[str, int], dict[str, int]]:
    """Capture at two rows with other slots, allocate in between, prepare and replay [3, 4]."""
    backend.init_graph_state(2, 2)
    fill_pool(backend.pool, {1: [7, 8, 9], 2: [8, 9, 0], 3: [1, 2, 3], 4: [4, 5, 6]})
    slots, x = ints(1, 2), digit_inputs([5, 5])
    batch = ForwardBatch.decode(slots=slots)
    recording = graph(backend, batch, x)
    captured = addresses(backend, batch)
    with pytest.raises(GraphBufferError, match="have max_bs=2, max_num_tokens=2, need max_bs=64"):
        backend.init_graph_state(64, 64)
    junk = [torch.full((1 << 18,), 7.0) for _ in range(64)]
    del junk
    slots.copy_(ints(3, 4))
    x.copy_(digit_inputs([4, 7]))
    backend.init_forward_metadata_out_graph(batch)
    backend.init_forward_metadata_in_graph(batch)
    replayed = addresses(backend, batch)
    recording.replay()
    return recording, captured, replayed


def test_graph_2_a_replay_reads_where_the_capture_wrote() -> None:
    backend = cpu()
    recording, captured, replayed = capture_junk_replay(backend)
    assert captured == replayed
    assert len(captured) >= 10
    assert read_digits(recording.result) == [4321, 7654]
    assert (read_window(backend.pool, 3), read_window(backend.pool, 4)) == ([2, 3, 4], [5, 6, 7])


def test_graph_7_the_address_test_is_red_for_a_hook_that_allocates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    static = sconv.step.metadata.MetadataBuffers.step
    kept = []

    def afresh(self: Any, batch: ForwardBatch, num_tokens: int, **options: Any) -> Any:
        fresh = sconv.plugin.MetadataBuffers(
            digit_spec(), self.max_bs, self.max_num_tokens, torch.device("cpu")
        )
        kept.append(fresh)
        return static(fresh, batch, num_tokens, **options)

    monkeypatch.setattr(sconv.step.metadata.MetadataBuffers, "step", afresh)
    _, captured, replayed = capture_junk_replay(cpu())
    assert captured != replayed


def test_graph_7_a_replay_is_wrong_for_a_batch_that_is_not_static() -> None:
    """The recorder itself can fail: what moves between capture and replay is not seen."""
    backend = cpu()
    backend.init_graph_state(2, 2)
    fill_pool(backend.pool, {1: [7, 8, 9], 2: [8, 9, 0], 3: [1, 2, 3], 4: [4, 5, 6]})
    x = digit_inputs([5, 5])
    recording = graph(backend, ForwardBatch.decode(slots=ints(1, 2)), x)
    batch = ForwardBatch.decode(slots=ints(3, 4))
    x.copy_(digit_inputs([4, 7]))
    backend.init_forward_metadata_out_graph(batch)
    recording.replay()
    assert read_digits(recording.result) != [4321, 7654]


def test_graph_3_batches_are_padded_to_a_captured_size() -> None:
    captured: dict[int, tuple[Tensor, Tensor, ForwardBatch, Recording, Tensor]] = {}
    backend = cpu()
    backend.init_graph_state(4, 4)
    fill_pool(backend.pool, {slot: [9, 9, 9] for slot in range(1, 10)})
    for size in (1, 2, 4):
        slots, x = ints(*range(1, size + 1)), digit_inputs([9] * size)
        batch = ForwardBatch.decode(slots=slots)
        recording = graph(backend, batch, x)
        indices = backend.conv_state_metadata(0, batch).cache_indices
        captured[size] = (slots, x, batch, recording, indices)

    windows = {3: [1, 2, 3], 5: [2, 3, 4], 7: [3, 4, 5], 8: [4, 5, 6]}
    for live, size in (([7, 3, 5], 4), ([8], 1), ([5, 8, 3, 7], 4), ([3, 7, 8], 4)):
        fill_pool(backend.pool, windows)
        eager = run_digits(backend, ForwardBatch.decode(slots=ints(*live)), live)
        state = backend.pool.layers[0].clone()
        fill_pool(backend.pool, windows)
        slots, x, batch, recording, indices = captured[size]
        slots.copy_(ints(*live, *[-1] * (size - len(live))))
        x.copy_(digit_inputs([*live, *[9] * (size - len(live))]))
        backend.init_forward_metadata_out_graph(batch)
        recording.replay()
        assert read_digits(recording.result) == eager + [0] * (size - len(live))
        assert_same_bits(backend.pool.layers[0][1:], state[1:], "state of a replay and of eager")
        assert indices.tolist()[len(live) :] == [-1] * (size - len(live))


STEPS: dict[str, Callable[[], ForwardBatch]] = {
    "decode": lambda: ForwardBatch.decode(slots=ints(3, 4)),
    "extend": lambda: ForwardBatch.extend(
        None, ints(1, 1), ints(3, 3), slots=ints(3, 4), num_tokens=2
    ),
    "mixed": lambda: ForwardBatch.mixed(
        None, ints(1, 1), ints(3, 3), slots=ints(3, 4), num_tokens=2
    ),
    "verify": lambda: ForwardBatch.target_verify(None, ints(3, 3), 1, slots=ints(3, 4)),
    "draft_extend": lambda: ForwardBatch.draft_extend(
        None, ints(3, 3), 1, ints(1, 1), slots=ints(3, 4)
    ),
}


@pytest.mark.parametrize("kind", STEPS)
def test_graph_5_nothing_is_read_before_both_halves_ran(kind: str) -> None:
    backend = cpu(max_draft_tokens=2)
    backend.init_graph_state(2, 2)
    fill_pool(backend.pool, {3: [1, 2, 3], 4: [4, 5, 6]})
    run_digits(backend, ForwardBatch.decode(slots=ints(4, 3)), [1, 1])
    batch, x = STEPS[kind](), digit_inputs([4, 7])
    backend.init_forward_metadata_out_graph(batch)
    with pytest.raises(MetadataError, match=r"no step is prepared.*both halves"):
        backend.conv_state_metadata(0, batch)
    with pytest.raises(MetadataError, match="no step is prepared"):
        backend.short_conv(x, digit_weight(), layer_id=0, stream="a", forward_batch=batch)
    backend.init_forward_metadata_in_graph(batch)
    assert backend.conv_state_metadata(0, batch).cache_indices.tolist() == [3, 4]


@pytest.mark.parametrize("kind", STEPS)
def test_graph_5_an_eager_step_is_both_halves(kind: str) -> None:
    backend = cpu(max_draft_tokens=2)
    fill_pool(backend.pool, {3: [1, 2, 3], 4: [4, 5, 6]})
    assert run_digits(backend, STEPS[kind](), [4, 7]) == [4321, 7654]


def test_graph_5_an_in_graph_half_alone_does_not_guess_the_token_count() -> None:
    backend = cpu()
    backend.init_graph_state(2, 8)
    unknown = ForwardBatch.extend(None, ints(1, 1), ints(3, 3), slots=ints(3, 4))
    with pytest.raises(MetadataError, match="token count is unknown"):
        backend.init_forward_metadata_in_graph(unknown)


def test_graph_6_an_idle_step_forgets_the_batch_before() -> None:
    backend = cpu()
    backend.init_graph_state(4, 4)
    fill_pool(backend.pool, {slot: [1, 2, 3] for slot in (3, 4, 5)})
    for prepare in ("eager", "static"):
        run_digits(backend, ForwardBatch.decode(slots=ints(3, 4, 5)), [1, 1, 1])
        state = backend.pool.layers[0].clone()
        idle = ForwardBatch.idle(1)
        if prepare == "eager":
            backend.init_forward_metadata(idle)
        else:
            backend.init_forward_metadata_out_graph(idle)
            backend.init_forward_metadata_in_graph(idle)
        meta = backend.conv_state_metadata(0, idle)
        assert (meta.forward_mode, meta.batch_size, meta.num_tokens) == (ForwardMode.IDLE, 1, 0)
        assert meta.cache_indices.tolist() == [-1]
        assert meta.query_start_loc.tolist() == [0, 0]
        assert meta.cache_mask.tolist() == [[[False]]]
        assert meta.track_cache_indices.tolist() == [-1]
        assert run_digits(backend, idle, [], prepare=False) == []
        assert_same_bits(backend.pool.layers[0], state, "the pool during an idle step")


def test_graph_8_a_step_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers of four convolutions, three steps."""
    lookups = []
    lookup = sconv.ConvStatePool.lookup_slots

    def counted(*args: Any, **kwargs: Any) -> None:
        lookups.append(args)
        lookup(*args, **kwargs)

    monkeypatch.setattr(sconv.ConvStatePool, "lookup_slots", counted)
    streams = ("k", "v", "attn", "mlp")
    backend = cpu(num_layers=4, streams=streams)
    fill_pool(backend.pool, {3: [1, 2, 3], 4: [4, 5, 6], 7: [2, 2, 2]})
    seen = []
    for step, slots in enumerate(([3, 4], [7, 3], [4, 7])):
        batch = ForwardBatch.decode(slots=ints(*slots))
        backend.init_forward_metadata(batch)
        handles = []
        for layer_id in range(4):
            for stream in streams:
                handles.append(backend.conv_state_metadata(layer_id, batch))
                run_digits(backend, batch, [1, 1], layer_id=layer_id, stream=stream, prepare=False)
        assert len(lookups) == step + 1
        assert all(handle is handles[0] for handle in handles)
        seen.append(metadata_tensors(backend, batch))
    assert [tensors["cache_indices"].tolist() for tensors in seen] == [[3, 4], [7, 3], [4, 7]]
    storages = [{t.untyped_storage().data_ptr() for t in tensors.values()} for tensors in seen]
    assert storages[0].isdisjoint(storages[1])
    assert storages[1].isdisjoint(storages[2])


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_track_1_snapshots_are_on_each_rows_own_grid(order: list[int]) -> None:
    rows = [([1, 2, 3, 4, 5], [2, 3, 4], 1, 7), ([6, 7, 8, 9, 1, 2, 3], [7, 8, 9], 2, 8)]
    backend = cpu(chunk_size=4)
    fill_pool(backend.pool, {})
    chosen = [rows[row] for row in order]
    batch = ForwardBatch.extend(
        None,
        ints(*[len(tokens) for tokens, *_ in chosen]),
        ints(0, 0),
        slots=ints(*[slot for _, _, slot, _ in chosen]),
        mamba_track_indices=ints(*[target for *_, target in chosen]),
        mamba_track_seqlens=ints(4, 4),
    )
    run_digits(backend, batch, [token for tokens, *_ in chosen for token in tokens])
    for _, window, _, target in chosen:
        assert read_window(backend.pool, target) == window


def test_track_1_a_short_snapshot_takes_the_rest_from_the_rows_own_window() -> None:
    backend = cpu(chunk_size=4)
    fill_pool(backend.pool, {2: [7, 8, 9]})
    batch = ForwardBatch.extend(
        None,
        ints(5, 7),
        ints(0, 3),
        slots=ints(1, 2),
        mamba_track_indices=ints(7, 8),
        mamba_track_seqlens=ints(4, 5),
    )
    run_digits(backend, batch, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3])
    assert read_window(backend.pool, 7) == [2, 3, 4]
    assert read_window(backend.pool, 8) == [9, 6, 7]


@pytest.mark.parametrize("speculation", ["off", "chain", "tree"])
@pytest.mark.parametrize("recorded", [False, True])
def test_track_2_a_prefix_hit_resumes_the_window_under_speculation(
    speculation: str, recorded: bool
) -> None:
    options = {} if speculation == "off" else {"max_draft_tokens": 2}
    backend = cpu(track_interval=4, draft_topk=2 if speculation == "tree" else 1, **options)
    backend.init_graph_state(2, 4)
    pool = backend.pool
    pool.alloc(3)
    fill_pool(pool, {})

    def run(batch: ForwardBatch, tokens: list[int]) -> list[int]:
        if not recorded:
            return run_digits(backend, batch, tokens)
        saved = [layer.clone() for layer in pool.layers]
        recording = graph(backend, batch, digit_inputs(tokens))
        for layer, old in zip(pool.layers, saved, strict=True):
            layer.copy_(old)
        recording.replay()
        return read_digits(recording.result)

    prompt = ForwardBatch.extend(
        None, ints(4), ints(0), slots=ints(1), num_tokens=4, mamba_track_indices=ints(2)
    )
    run(prompt, [1, 2, 3, 4])
    pool.copy(2, 3)
    if speculation == "off":
        y = run(ForwardBatch.decode(slots=ints(3)), [5])
    else:
        tree = {} if speculation == "chain" else {"parents": ints(-1, 0).view(1, 2)}
        y = run(ForwardBatch.target_verify(None, ints(4), 2, slots=ints(3), **tree), [5, 6])
    assert y[0] == 5432


def test_track_2_a_snapshot_that_is_gone_is_a_miss() -> None:
    pool = cpu().pool
    pool.alloc(2)
    pool.free(2)
    with pytest.raises(SlotError, match="fork: slot 2 is not in use"):
        pool.fork(2)
    assert pool.num_free == pool.spec.num_slots - 1


def test_track_4_positions_of_another_grid_are_refused() -> None:
    """One grid counts all snapshots; an index made with another block size is no slot."""
    node = crossing_steps(ints(14336 - 1), ints(1), 7168)
    assert node.tolist() == [0]
    assert (14336 - 1) // 7168 == 1
    backend = cpu(num_slots=3)
    batch = ForwardBatch.decode(
        slots=ints(1), mamba_track_indices=ints((14336 - 1) // 64), mamba_track_mask=None
    )
    with pytest.raises(BatchError, match="mamba_track_indices holds 223: expected -1 to 3"):
        backend.init_forward_metadata(batch)


def test_track_5_a_row_has_state_only_if_its_own_prefix_was_restored() -> None:
    """Attention hit 8 tokens, the convolution none: its prefix is 0 whatever the slot holds."""
    backend = cpu()
    fill_pool(backend.pool, {5: [7, 8, 9]}, {1: 5})
    batch = ForwardBatch.extend(ints(1), ints(4), ints(0))
    assert run_digits(backend, batch, [1, 2, 3, 4]) == [1000, 2100, 3210, 4321]
    meta = backend.conv_state_metadata(0, batch)
    assert meta.has_initial_state.tolist() == [False]


def test_track_7_an_export_has_every_layer_and_a_part_of_it_is_a_miss() -> None:
    """Layers 0 and 2 have one convolution, layer 1 has two."""
    one, two = [sconv.Stream("a", 3)], [sconv.Stream("a", 3), sconv.Stream("b", 2)]
    spec = sconv.StateSpec(
        num_layers=3,
        streams=[one, two, one],
        kernel_size=4,
        num_slots=4,
        max_requests=4,
        dtype=torch.float32,
    )
    pool = load_backend("cpu", spec=spec).pool
    pool.alloc(3)
    for layer in pool.layers:
        layer.normal_()
    saved = pool.export(2)
    assert [part.shape[2] for part in saved] == [3, 5, 3]
    pool.restore(3, saved)
    for layer in pool.layers:
        assert_same_bits(layer[3], layer[2], "a restored slot")
    before = [layer.clone() for layer in pool.layers]
    for part in range(3):
        with pytest.raises(SlotError, match="restore: 2 tensors for 3 layers"):
            pool.restore(1, replace(saved, layers=[*saved][:part] + [*saved][part + 1 :]))
    with pytest.raises(SlotError, match=r"restore: layer 0 is \[1, 3, 5\]"):
        pool.restore(1, replace(saved, layers=[saved[1], saved[0], saved[2]]))
    for layer, old in zip(pool.layers, before, strict=True):
        assert_same_bits(layer, old, "state after a refused restore")
