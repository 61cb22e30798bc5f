"""What checked mode finds, by the reports of it, and what it must let pass.

Weights are 1, 10, 100, 1000: an output reads from the current token backwards. Beside each finding
stands what the same calls do without checks.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sconv
from sconv import Backend, BatchError, ForwardBatch, MetadataError, SlotError, load_backend
from sconv.testing.digits import digit_spec, fill_pool, read_window, run_digits
from sconv.testing.recording import record


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def loaded(**options: object) -> Backend:
    given: dict[str, object] = {"max_draft_tokens": 4, "num_slots": 6, "track_interval": 4}
    return load_backend("cpu", spec=digit_spec(**(given | options)))  # type: ignore[arg-type]


def prefill(backend: Backend, slot: int, tokens: list[int]) -> None:
    batch = ForwardBatch.extend(
        slots=ints(slot), extend_seq_lens=ints(len(tokens)), extend_prefix_lens=ints(0)
    )
    backend.init_forward_metadata(batch)
    run_layers(backend, batch, tokens)


def run_layers(backend: Backend, batch: ForwardBatch, tokens: list[int]) -> list[int]:
    """Run every convolution of a prepared step; return what the last one gives."""
    y: list[int] = []
    for layer_id in range(backend.spec.num_layers):
        for stream in backend.spec.layer_streams(layer_id):
            y = run_digits(
                backend, batch, tokens, layer_id=layer_id, stream=stream.name, prepare=False
            )
    return y


def decode(backend: Backend, slot: int, held: int | None, token: int) -> list[int]:
    lengths = None if held is None else ints(held)
    batch = ForwardBatch.decode(None, lengths, slots=ints(slot))
    backend.init_forward_metadata(batch)
    return run_layers(backend, batch, [token])


def test_track_9_a_length_that_is_not_the_states_is_refused(checked: None) -> None:
    backend = loaded()
    slot = int(backend.pool.alloc(1))
    prefill(backend, slot, [1, 2, 3, 4, 5])
    with pytest.raises(BatchError, match=r"seq_lens holds 4 for row 0, .* slot 1 has 5 tokens"):
        decode(backend, slot, 4, 5)
    assert read_window(backend.pool, slot) == [3, 4, 5]
    assert decode(backend, slot, 5, 6) == [6543]


def test_track_9_is_silent_without_checks() -> None:
    backend = loaded()
    slot = int(backend.pool.alloc(1))
    prefill(backend, slot, [1, 2, 3, 4, 5])
    assert decode(backend, slot, 4, 5) == [5543]


@pytest.mark.parametrize("how", ["fork", "copy", "resume"])
def test_track_8_a_hit_on_a_snapshot_that_was_not_taken_is_refused(how: str, checked: None) -> None:
    """A decode of two tokens names the slot, and crosses no boundary."""
    backend = loaded()
    pool = backend.pool
    own, cached, new = pool.alloc(3).tolist()
    prefill(backend, own, [1, 2])
    batch = ForwardBatch.draft_extend(
        None, ints(2), 1, ints(1), slots=ints(own), mamba_track_indices=ints(cached)
    )
    backend.init_forward_metadata(batch)
    run_layers(backend, batch, [3])
    named = "a draft_extend step named it for a snapshot that was not due"
    hits = {
        "fork": (SlotError, lambda: pool.fork(cached)),
        "copy": (SlotError, lambda: pool.copy(cached, new)),
        "resume": (BatchError, lambda: decode(backend, cached, 4, 4)),
    }
    error, hit = hits[how]
    with pytest.raises(error, match=f"slot {cached}.*{named}"):
        hit()
    assert pool.num_free == 3
    # The next token crosses it.
    batch = ForwardBatch.draft_extend(
        None, ints(3), 1, ints(1), slots=ints(own), mamba_track_indices=ints(cached)
    )
    backend.init_forward_metadata(batch)
    run_layers(backend, batch, [4])
    assert decode(backend, cached, 4, 5) == [5432]


@pytest.mark.parametrize("how", ["free", "reuse", "restore"])
def test_slot_14_a_slot_that_changes_hands_within_a_step_is_refused(
    how: str, checked: None
) -> None:
    backend = loaded(num_layers=2)
    pool = backend.pool
    slot = int(pool.alloc(1))
    prefill(backend, slot, [1, 2, 3])
    kept = pool.export(slot)
    batch = ForwardBatch.decode(None, ints(3), slots=ints(slot))
    backend.init_forward_metadata(batch)
    run_digits(backend, batch, [4], prepare=False)
    if how == "restore":
        pool.restore(slot, kept)
    else:
        pool.free(slot)
    if how == "reuse":
        assert pool.alloc(6)[-1] == slot
        pool.clear(slot)
    was = "written" if how == "restore" else "freed or handed out again"
    with pytest.raises(MetadataError, match=f"slot {slot} of row 0 was {was} after this step was"):
        run_digits(backend, batch, [4], layer_id=1, prepare=False)
    assert read_window(pool, slot, layer_id=1) == ([0, 0, 0] if how == "reuse" else [1, 2, 3])


def test_layout_15_a_layer_called_twice_is_refused(checked: None) -> None:
    backend = loaded(num_layers=2)
    slot = int(backend.pool.alloc(1))
    prefill(backend, slot, [1, 2, 3])
    batch = ForwardBatch.decode(None, ints(3), slots=ints(slot))
    backend.init_forward_metadata(batch)
    assert run_digits(backend, batch, [4], prepare=False) == [4321]
    with pytest.raises(MetadataError, match="stream 'a' of layer 0 was convolved in this step alr"):
        run_digits(backend, batch, [5], prepare=False)
    assert read_window(backend.pool, slot) == [2, 3, 4]


@pytest.mark.parametrize("reader", ["decode", "fork", "export"])
def test_layout_15_a_state_with_a_skipped_layer_is_refused(reader: str, checked: None) -> None:
    backend = loaded(num_layers=2)
    slot = int(backend.pool.alloc(1))
    prefill(backend, slot, [1, 2, 3])
    batch = ForwardBatch.decode(None, ints(3), slots=ints(slot))
    backend.init_forward_metadata(batch)
    run_digits(backend, batch, [4], prepare=False)
    readers = {
        "decode": lambda: decode(backend, slot, 4, 5),
        "fork": lambda: backend.pool.fork(slot),
        "export": lambda: backend.pool.export(slot),
    }
    half = r"half a step.*a decode step ran 1 of 2 convolutions, 'a' of layer 1 not"
    with pytest.raises((BatchError, SlotError), match=half):
        readers[reader]()
    # An engine that gave the step up starts the request again.
    prefill(backend, slot, [1, 2, 3, 4])
    assert decode(backend, slot, 4, 5) == [5432]


def verified(layout: str = "dense") -> Backend:
    backend = load_backend(
        "cpu",
        spec=sconv.StateSpec(
            num_layers=1,
            streams=[sconv.Stream("a", 1)],
            kernel_size=4,
            num_slots=6,
            max_requests=4,
            dtype=torch.float32,
            max_draft_tokens=2,
            window_layout=layout,  # type: ignore[arg-type]
        ),
    )
    pool = backend.pool
    pool.assign([1, 2, 3], pool.alloc(3))
    prompt = ForwardBatch.extend(ints(1, 2, 3), ints(3, 3, 3), ints(0, 0, 0))
    run_digits(backend, prompt, [1, 2, 3] * 3)
    batch = ForwardBatch.target_verify(ints(1, 2, 3), ints(3, 3, 3), 2)
    run_digits(backend, batch, [4, 5, 6, 7, 8, 9])
    return backend


def commit(backend: Backend, rows: Tensor, last: Tensor) -> None:
    backend.update_mamba_state_after_mtp_verify(last, req_pool_indices=rows)


def test_spec_15_a_commit_of_other_rows_is_refused(checked: None) -> None:
    backend = verified()
    with pytest.raises(BatchError, match="req_pool_indices names 3 for row 1, which was 2 in the"):
        commit(backend, ints(1, 3), ints(1, 1))
    assert read_window(backend.pool, 3) == [1, 2, 3]
    commit(backend, ints(1, 2, 3), ints(1, -1, 1))
    assert [read_window(backend.pool, slot) for slot in (1, 2, 3)] == [
        [3, 4, 5],
        [1, 2, 3],
        [3, 8, 9],
    ]


def test_a_second_commit_is_refused_where_it_starts_from_a_moved_state(checked: None) -> None:
    backend = verified("inputs")
    commit(backend, ints(1, 2, 3), ints(-1, -1, -1))
    commit(backend, ints(1, 2, 3), ints(0, -1, 0))
    with pytest.raises(BatchError, match="slot 1 of row 0 was written since the verify step"):
        commit(backend, ints(1, 2, 3), ints(1, 1, 1))
    assert read_window(backend.pool, 1) == [2, 3, 4]
    commit(backend, ints(1, 2, 3), ints(-1, 1, -1))
    dense = verified("dense")
    for last in (ints(0, 0, 0), ints(1, 1, 1)):
        commit(dense, ints(1, 2, 3), last)
    run_digits(dense, ForwardBatch.decode(ints(1, 2, 3), ints(5, 5, 5)), [6, 8, 1])


def test_a_verify_step_without_its_commit_is_no_fault(checked: None) -> None:
    """An abort: the rows hold what they held, and another request may have the slot."""
    backend = verified()
    run_digits(backend, ForwardBatch.decode(ints(1), ints(3)), [4])
    backend.pool.free([2])
    backend.init_forward_metadata(ForwardBatch.target_verify(ints(1, 3), ints(4, 3), 2))
    with pytest.raises(MetadataError, match="ran 0 of 1 convolutions"):
        commit(backend, ints(1, 3), ints(0, 0))
    commit(backend, ints(1, 3), ints(-1, -1))


def test_what_was_written_past_the_pool_is_unknown_and_passes(checked: None) -> None:
    backend = loaded()
    slot = int(backend.pool.alloc(1))
    with pytest.raises(BatchError, match="its owner never wrote"):
        decode(backend, slot, 3, 4)
    fill_pool(backend.pool, {slot: [1, 2, 3]})
    assert decode(backend, slot, 3, 4) == [4321]
    # From here on it is known again.
    with pytest.raises(BatchError, match="seq_lens holds 3 for row 0"):
        decode(backend, slot, 3, 4)


def test_an_engine_may_say_what_it_wrote(checked: None) -> None:
    backend = loaded()
    pool = backend.pool
    slot = int(pool.alloc(1))
    pool.layers[0].data[slot] = torch.tensor([[1.0], [2.0], [3.0]])  # As a kernel of its own would.
    pool.mark_written(slot, 7)
    with pytest.raises(BatchError, match=r"has 7 tokens \(the engine wrote it\)"):
        decode(backend, slot, 3, 4)
    assert decode(backend, slot, 7, 4) == [4321]
    with pytest.raises(SlotError, match="expected one number of tokens"):
        pool.mark_written([slot], [1, 2])


def test_a_cleared_slot_holds_nothing_and_may_decode(checked: None) -> None:
    backend = loaded()
    slot = int(backend.pool.alloc(1))
    backend.pool.clear(slot)
    with pytest.raises(BatchError, match=r"has 0 tokens \(it was cleared\)"):
        decode(backend, slot, 3, 4)
    assert decode(backend, slot, None, 4) == [4000]
    assert decode(backend, slot, 1, 5) == [5400]


def test_slots_of_an_engine_are_unknown_until_a_step_tells(checked: None) -> None:
    spec = digit_spec()
    pool = sconv.ConvStatePool.adopt(spec, torch.zeros(1, 10, 3, 1), null_slots=(-1, 0))
    backend = load_backend("cpu", spec=spec, pool=pool)
    assert decode(backend, 4, 9, 1) == [1000]
    assert decode(backend, 4, 10, 2) == [2100]
    with pytest.raises(BatchError, match="slot 4 has 11 tokens"):
        decode(backend, 4, 10, 2)
    prefill(backend, 4, [3, 4])
    assert decode(backend, 4, 2, 5) == [5430]


@pytest.mark.parametrize("function", [False, True], ids=["table", "function"])
def test_virtual_ids_are_followed_to_their_rows(function: bool, checked: None) -> None:
    table = ints(0, 5, 3, -1)
    spec = digit_spec()
    pool = sconv.ConvStatePool.adopt(
        spec,
        torch.zeros(1, 10, 3, 1),
        virtual_to_physical=(lambda known: table[known]) if function else table,
    )
    backend = load_backend("cpu", spec=spec, pool=pool)
    prefill(backend, 1, [1, 2, 3])
    table.copy_(ints(0, -1, 5, 3))  # The allocator moves a request to another id, not its state.
    with pytest.raises(BatchError, match="the state of slot 5 has 3 tokens"):
        decode(backend, 2, 2, 4)
    assert decode(backend, 2, 3, 4) == [4321]
    pool.clear(5)
    assert decode(backend, 2, 0, 4) == [4000]


def test_a_hybrid_passes_through_what_is_found(checked: None) -> None:
    class Attention:
        forward_metadata = None

        def init_graph_state(self, max_bs: int, max_num_tokens: int) -> None: ...
        def init_forward_metadata(self, forward_batch: object) -> None: ...
        def init_forward_metadata_out_graph(
            self, forward_batch: object, in_capture: bool = False
        ) -> None: ...
        def init_forward_metadata_in_graph(self, forward_batch: object) -> None: ...

    backend = loaded()
    both = sconv.HybridBackend(Attention(), backend)
    slot = int(backend.pool.alloc(1))
    prefill(backend, slot, [1, 2, 3])
    with pytest.raises(BatchError, match="seq_lens holds 2 for row 0"):
        both.init_forward_metadata(ForwardBatch.decode(None, ints(2), slots=ints(slot)))
    batch = ForwardBatch.decode(None, ints(3), slots=ints(slot))
    both.init_forward_metadata(batch)
    x, weight = torch.ones(1, 1), torch.ones(1, 4)
    both.short_conv(x, weight, layer_id=0, stream="a", forward_batch=batch)
    with pytest.raises(MetadataError, match="was convolved in this step already"):
        both.short_conv(x, weight, layer_id=0, stream="a", forward_batch=batch)


@pytest.mark.parametrize("kind", ["decode", "verify"])
def test_a_length_of_0_starts_a_slot_afresh_whatever_it_held(kind: str, checked: None) -> None:
    backend = loaded()
    slot = int(backend.pool.alloc(1))
    prefill(backend, slot, [7, 8, 9])
    if kind == "decode":
        assert decode(backend, slot, 0, 4) == [4000]
        assert decode(backend, slot, 1, 5) == [5400]
        return
    batch = ForwardBatch.target_verify(None, ints(0), 2, slots=ints(slot))
    backend.init_forward_metadata(batch)
    assert run_layers(backend, batch, [4, 5]) == [4000, 5400]
    commit(backend, ints(slot), ints(1))
    assert decode(backend, slot, 2, 6) == [6540]


def test_an_announced_replay_counts_and_a_capture_is_unknown(checked: None) -> None:
    backend = loaded()
    backend.init_graph_state(1, 4)
    slot = int(backend.pool.alloc(1))
    backend.pool.assign(1, slot)
    rows, lengths = ints(0), ints(0)
    batch = ForwardBatch.decode(rows, lengths)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)

    def step() -> None:
        backend.init_forward_metadata_in_graph(batch)
        run_layers_of_zeros(backend, batch)

    captured = record(step)
    prefill(backend, slot, [1, 2, 3])
    rows.fill_(1)
    for held in (3, 4):
        lengths.fill_(held)
        backend.init_forward_metadata_out_graph(batch)
        captured.replay()
    assert read_window(backend.pool, slot) == [3, 0, 0]
    with pytest.raises(BatchError, match="seq_lens holds 4 for row 0, and the state of slot 1 has"):
        backend.init_forward_metadata_out_graph(batch)
    lengths.fill_(5)
    backend.init_forward_metadata_out_graph(batch)


def run_layers_of_zeros(backend: Backend, batch: ForwardBatch) -> None:
    x, weight = torch.zeros(1, 1), torch.ones(1, 4)
    backend.short_conv(x, weight, layer_id=0, stream="a", forward_batch=batch)


def test_two_backends_may_share_a_pool_but_not_a_step(checked: None) -> None:
    first = loaded(num_layers=2)
    second = load_backend("cpu", spec=first.spec, pool=first.pool)
    slot = int(first.pool.alloc(1))
    prefill(first, slot, [1, 2, 3])
    assert decode(second, slot, 3, 4) == [4321]
    batch = ForwardBatch.decode(None, ints(4), slots=ints(slot))
    first.init_forward_metadata(batch)
    run_digits(first, batch, [5], prepare=False)
    with pytest.raises(BatchError, match="holds half a step"):
        decode(second, slot, 4, 5)


def test_a_step_that_is_put_aside_and_back_is_no_fault(checked: None) -> None:
    backend = loaded()
    slot = int(backend.pool.alloc(1))
    extend = ForwardBatch.extend(None, ints(3), ints(0), slots=ints(slot))
    verify = ForwardBatch.target_verify(None, ints(3), 2, slots=ints(slot))
    backend.init_forward_metadata(extend)
    first = backend.forward_metadata
    backend.init_forward_metadata(verify)
    second = backend.forward_metadata
    backend.forward_metadata = first
    run_layers(backend, extend, [1, 2, 3])
    backend.forward_metadata = second
    assert run_layers(backend, verify, [4, 5]) == [4321, 5432]
    commit(backend, ints(slot), ints(1))
    assert decode(backend, slot, 5, 6) == [6543]


def test_a_backend_that_was_loaded_without_checks_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = loaded()
    monkeypatch.setenv("SCONV_CHECK", "1")
    assert type(backend) is Backend
    assert backend.pool.shadow is None
    assert "checked" in repr(loaded())
