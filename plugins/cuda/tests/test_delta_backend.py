"""The hook and the commit of a backend with recurrent state, against the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sconv
from sconv import BatchError, ForwardBatch, GatedDelta, SpecError, StateSpec, Stream
from sconv.reference import gated_delta as oracle
from sconv.testing.harness import assert_same_bits

Load = Callable[..., sconv.Backend]

FLOAT32 = 1e-6
GATES = ("scalar", "channel")


def _spec(gate: str, **delta: Any) -> StateSpec:
    return StateSpec(
        num_layers=2,
        streams=[Stream("qkv", 8)],
        kernel_size=4,
        num_slots=9,
        max_requests=6,
        dtype=torch.float32,
        max_draft_tokens=4,
        draft_topk=2,
        track_interval=4,
        recurrent=GatedDelta(2, 4, 16, 16, gate=gate, **delta),
    )


def _ready(load: Load, gate: str) -> tuple[sconv.Backend, list[Tensor]]:
    """Return a backend with random states, and copies of them."""
    backend = load(_spec(gate))
    recurrent = backend.pool.recurrent
    assert recurrent is not None
    for layer in recurrent.layers:
        layer.copy_(torch.randn_like(layer))
    return backend, [layer.clone() for layer in recurrent.layers]


def _tokens(count: int, gate: str, device: torch.device) -> dict[str, Tensor]:
    mixed = torch.randn(count, 8 * 16, device=device)
    q, k, v = mixed.split([32, 32, 64], 1)
    wide = (4, 16) if gate == "channel" else (4,)
    return {
        "q": q.unflatten(1, (2, 16)),
        "k": k.unflatten(1, (2, 16)),
        "v": v.unflatten(1, (4, 16)),
        "gate": torch.randn(count, *wide, device=device),
        "beta": torch.randn(count, 4, device=device),
        "A_log": torch.rand(4, device=device),
        "dt_bias": torch.randn(*wide, device=device),
    }


def _call(backend: sconv.Backend, batch: ForwardBatch, tokens: dict[str, Tensor]) -> Tensor:
    """Run both layers on the same tokens; return the second one's outputs."""
    backend.init_forward_metadata(batch)
    out = None
    for layer in range(2):
        out = backend.gated_delta(**tokens, layer_id=layer, forward_batch=batch)
    assert out is not None
    return out


def _close(found: Tensor, expected: Tensor) -> None:
    expected = expected.to(found.device)
    error = (found.double() - expected).norm() / expected.norm().clamp(min=1e-30)
    assert error <= FLOAT32, float(error)


def _states(backend: sconv.Backend) -> Tensor:
    assert backend.pool.recurrent is not None
    return backend.pool.recurrent.layers[1]


@pytest.mark.parametrize("gate", GATES)
def test_rows_of_any_length_and_their_snapshots(
    load: Load, device: torch.device, gate: str
) -> None:
    backend, before = _ready(load, gate)
    before[1][2] = float("nan")  # a stale slot, whose row starts afresh
    _states(backend)[2] = float("nan")
    slots, lengths, prefixes = [4, 2, 1, -1], [3, 2, 0, 1], [4, 0, 6, 1]
    tokens = _tokens(7, gate, device)
    batch = ForwardBatch.mixed(
        slots=torch.tensor(slots, device=device),
        extend_seq_lens=torch.tensor(lengths, device=device),
        extend_prefix_lens=torch.tensor(prefixes, device=device),
        num_tokens=7,
        mamba_track_indices=torch.tensor([7, 8, -1, 6], device=device),
        mamba_track_seqlens=torch.tensor([6, 2, -1, 2], device=device),
    )
    out = _call(backend, batch, tokens)
    expected, states = oracle.rows_delta(
        **tokens, pool=before[1], slots=slots, lengths=lengths,
        has_initial=[prefix > 0 for prefix in prefixes],
    )  # fmt: skip
    _close(out[:5], expected[:5])
    assert (out[5:] == 0).all()
    for slot, state in ((4, states[0][3]), (7, states[0][2]), (2, states[1][2])):
        _close(_states(backend)[slot], state)
    assert_same_bits(_states(backend)[8], _states(backend)[2], "snapshot of a whole row")
    for slot in (0, 1, 3, 5, 6, 9):
        assert_same_bits(_states(backend)[slot], before[1][slot], f"slot {slot}")


@pytest.mark.parametrize("gate", GATES)
def test_decode_skips_rows_without_a_slot(load: Load, device: torch.device, gate: str) -> None:
    backend, before = _ready(load, gate)
    slots = [5, -1, 3]
    tokens = _tokens(3, gate, device)
    out = _call(backend, ForwardBatch.decode(slots=torch.tensor(slots, device=device)), tokens)
    expected, states = oracle.rows_delta(**tokens, pool=before[1], slots=slots, lengths=[1, 1, 1])
    _close(out, expected)
    for row, slot in ((0, 5), (2, 3)):
        _close(_states(backend)[slot], states[row][1])
    for slot in (0, 1, 2, 4, 9):
        assert_same_bits(_states(backend)[slot], before[1][slot], f"slot {slot}")


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("parents", [None, [-1, 0, 0, 2]])
def test_verify_writes_nothing_and_the_commit_moves_all_layers(
    load: Load, device: torch.device, gate: str, parents: list[int] | None
) -> None:
    backend, before = _ready(load, gate)
    slots, nodes, tracked = [3, 5, -1, 1], [3, 1, 0, -1], [2, 0, 1, 0]
    tokens = _tokens(16, gate, device)
    ids = torch.tensor(slots, device=device)
    links = None if parents is None else torch.tensor([parents] * 4, device=device)
    batch = ForwardBatch.target_verify(
        slots=ids,
        seq_lens=torch.tensor([4, 0, 3, 7], device=device),
        draft_token_num=4,
        parents=links,
    )
    out = _call(backend, batch, tokens)
    expected, states = oracle.rows_delta(
        **tokens, pool=before[1], slots=slots, lengths=[4] * 4,
        has_initial=[True, False, True, True],
        parents=None if parents is None else [parents] * 4,
    )  # fmt: skip
    _close(out, expected)
    assert_same_bits(_states(backend), before[1], "state before the commit")
    backend.update_mamba_state_after_mtp_verify(
        torch.tensor(nodes, device=device),
        torch.tensor([7, -1, 8, 9], device=device),
        torch.tensor(tracked, device=device),
        req_pool_indices=ids,
    )
    for slot, state in ((3, states[0][4]), (5, states[1][2]), (7, states[0][3])):
        _close(_states(backend)[slot], state)
    for slot in (0, 1, 2, 4, 6, 8, 9):
        assert_same_bits(_states(backend)[slot], before[1][slot], f"slot {slot}")


@pytest.mark.parametrize("gate", GATES)
def test_draft_extend_keeps_what_was_accepted(load: Load, device: torch.device, gate: str) -> None:
    backend, before = _ready(load, gate)
    slots = [4, 6, 2]
    tokens = _tokens(9, gate, device)
    batch = ForwardBatch.draft_extend(
        slots=torch.tensor(slots, device=device),
        seq_lens=torch.tensor([5, 3, 0], device=device),
        draft_token_num=3,
        num_accept_tokens=torch.tensor([2, 0, 3], dtype=torch.int32, device=device),
    )
    out = _call(backend, batch, tokens)
    expected, states = oracle.rows_delta(
        **tokens, pool=before[1], slots=slots, lengths=[3] * 3, has_initial=[True, True, False]
    )
    _close(out, expected)
    _close(_states(backend)[4], states[0][2])
    _close(_states(backend)[2], states[2][3])
    assert_same_bits(_states(backend)[6], before[1][6], "row that kept nothing")


def test_a_bfloat16_state_is_rounded_once(load: Load, device: torch.device) -> None:
    backend = load(_spec("channel", dtype=torch.bfloat16))
    _states(backend).copy_(torch.randn_like(_states(backend)))
    before = _states(backend).clone()
    slots, tokens = torch.tensor([3, 1], device=device), _tokens(8, "channel", device)
    batch = ForwardBatch.target_verify(slots=slots, seq_lens=slots, draft_token_num=4)
    out = _call(backend, batch, tokens)
    expected, states = oracle.rows_delta(**tokens, pool=before, slots=[3, 1], lengths=[4, 4])
    _close(out, expected)
    backend.update_mamba_state_after_mtp_verify(
        torch.tensor([3, 2], device=device), req_pool_indices=slots
    )
    for slot, state in ((3, states[0][4]), (1, states[1][3])):
        found = _states(backend)[slot].double()
        nearest = state.to(device).to(torch.bfloat16).double()
        assert (found != nearest).double().mean() <= 0.01, "float32 errors turn few roundings"


@pytest.mark.parametrize(
    ("delta", "word"), [({"log": 4}, "log"), ({"records": "snapshots"}, "records")]
)
def test_what_is_not_served_is_refused(load: Load, delta: dict[str, Any], word: str) -> None:
    with pytest.raises(SpecError, match=word):
        load(_spec("scalar", **delta))


def test_warmup_walks_through_all_modes(load: Load) -> None:
    backend, before = _ready(load, "channel")
    backend.warmup()
    assert_same_bits(_states(backend), before[1], "state")


@pytest.mark.parametrize("gate", GATES)
def test_a_number_of_drafts_that_is_not_a_power_of_two_is_refused(load: Load, gate: str) -> None:
    backend, _ = _ready(load, gate)
    rows = torch.tensor([1, 2], device=backend.device)
    backend.pool.assign([1, 2], backend.pool.alloc(2))
    prepared = ForwardBatch.target_verify(rows, draft_token_num=4)
    backend.init_forward_metadata(prepared)
    with pytest.raises(BatchError, match="verifies 1, 2, 4, 8, 16 or 32 draft tokens a row"):
        backend.init_forward_metadata(ForwardBatch.target_verify(rows, draft_token_num=3))
    assert backend.conv_state_metadata(0, prepared).batch is prepared
