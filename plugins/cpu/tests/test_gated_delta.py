"""The gated delta rule in every mode, against the float64 oracle."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import sconv
from sconv import reference
from sconv.reference import gated_delta as oracle

GATES = ("scalar", "channel")
F32, BF16 = torch.float32, torch.bfloat16
#: Chains, two branches, and a comb; parents of five nodes.
TREES = [[-1, 0, 1, 2, 3], [-1, 0, 0, 1, 2], [-1, 0, 0, 0, 3], [-1, -1, 0, 1, 1]]
#: How far raw gates lie from zero: weak, usual, strong, and decays that underflow to zero.
STRENGTHS = (-6.0, 0.0, 4.0, 300.0)


def spec_of(
    gate: str = "channel", *, layers: int = 1, slots: int = 12, draft: int = 5, **delta: object
) -> sconv.StateSpec:
    sizes = {"key_heads": 2, "value_heads": 4 if gate == "scalar" else 2}
    sizes |= {"key_dim": 16, "value_dim": 8}
    return sconv.StateSpec(
        num_layers=layers,
        streams=[sconv.Stream("qkv", 6)],
        kernel_size=4,
        num_slots=slots,
        max_requests=8,
        dtype=F32,
        max_draft_tokens=draft,
        draft_topk=3 if draft > 1 else 1,
        recurrent=sconv.GatedDelta(gate=gate, **(sizes | delta)),  # type: ignore[arg-type]
    )


@dataclass
class Tokens:
    """The arguments of a call, for T packed tokens; q, k and v are views of one projection."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None = None

    def call(self, backend: sconv.Backend, batch: sconv.ForwardBatch, layer: int = 0) -> Tensor:
        return backend.gated_delta(
            self.q,
            self.k,
            self.v,
            self.gate,
            self.beta,
            self.A_log,
            self.dt_bias,
            layer_id=layer,
            forward_batch=batch,
            lower_bound=self.lower_bound,
        )

    def packed(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.gate, self.beta

    def at(self, index: list[int]) -> Tokens:
        q, k, v, gate, beta = (each[index] for each in self.packed())
        return replace(self, q=q, k=k, v=v, gate=gate, beta=beta)

    @property
    def constants(self) -> dict[str, object]:
        return {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "lower_bound": self.lower_bound,
        }


def tokens_of(
    spec: sconv.StateSpec,
    count: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = F32,
    strength: float = 0.0,
    lower_bound: float | None = None,
) -> Tokens:
    delta = spec.recurrent
    assert delta is not None
    random = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(7)
    h, hv, dk, dv = delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim
    qkv = torch.randn(count, 2 * h * dk + hv * dv, generator=random).to(dtype)
    q, k, v = qkv.split([h * dk, h * dk, hv * dv], dim=1)
    gate = torch.randn(count, *delta.gate_shape, generator=random) + strength
    return Tokens(
        q.unflatten(1, (h, dk)),
        k.unflatten(1, (h, dk)),
        v.unflatten(1, (hv, dv)),
        gate.to(dtype),
        torch.randn(count, hv, generator=random).to(dtype),
        torch.randn(hv, generator=fixed),
        torch.randn(*delta.gate_shape, generator=fixed),
        lower_bound,
    )


def load(spec: sconv.StateSpec, *, seed: int = 3) -> sconv.Backend:
    """A backend with random states; slots 1 to 8 belong to request rows 1 to 8."""
    backend = sconv.load_backend("cpu", spec=spec)
    backend.pool.alloc(spec.num_slots)
    rows = list(range(1, spec.max_requests + 1))
    backend.pool.assign(rows, rows)
    assert backend.pool.recurrent is not None
    generator = torch.Generator().manual_seed(seed)
    for layer in backend.pool.recurrent.layers:
        layer.copy_(torch.randn(layer.shape, generator=generator))
    return backend


def states(backend: sconv.Backend, layer: int = 0) -> Tensor:
    """The states of all slots, whatever is pending: ``[rows, HV, dv, dk]``."""
    recurrent = backend.pool.recurrent
    assert recurrent is not None
    every = torch.arange(recurrent.layers[0].shape[0])
    return recurrent.read(layer, every).to(recurrent.layers[0].dtype)


def bits(backend: sconv.Backend) -> list[Tensor]:
    """All that must not change by a step that keeps nothing."""
    recurrent = backend.pool.recurrent
    assert recurrent is not None
    held = [*recurrent.layers]
    if recurrent.records is not None and recurrent.records.by_slot:
        records = recurrent.records
        held.append(records.pending)
        for layer, slot in records.pending.nonzero().tolist():
            count = int(records.pending[layer, slot])
            held += [each[layer, slot, :, :count] for each in (records.u, records.k, records.g)]
    return [each.clone() for each in held]


def close(got: Tensor, want: Tensor, most: float = 1e-6) -> None:
    """Compare by the norm of the difference."""
    got, want = got.double(), want.double()
    assert torch.isfinite(got).all()
    error = (got - want).norm() / want.norm().clamp(min=1e-30)
    assert error <= most, float(error)


def ids(values: list[int]) -> Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("strength", STRENGTHS)
def test_decode_and_extend_are_the_oracles(gate: str, strength: float) -> None:
    spec = spec_of(gate)
    backend = load(spec)
    rows = [1, 3, 4, 0, 6, 2]
    lengths = [37, 1, 0, 2, 16, 3]
    prefix = [5, 0, 2, 0, 0, 9]
    tokens = tokens_of(spec, sum(lengths) + 2, strength=strength)
    batch = sconv.ForwardBatch.mixed(
        ids(rows), ids(lengths), ids(prefix), num_tokens=sum(lengths) + 2
    )
    before = states(backend)
    backend.init_forward_metadata(batch)
    out = tokens.call(backend, batch)
    want, after = oracle.rows_delta(
        *tokens.packed(),
        before,
        slots=rows,
        lengths=lengths,
        has_initial=[each > 0 for each in prefix],
        **tokens.constants,
    )
    for row in (0, 1, 4, 5):
        start = sum(lengths[:row])
        close(out[start : start + lengths[row]], want[start : start + lengths[row]])
        close(states(backend)[rows[row]], after[row][-1])
    assert not out[sum(lengths) :].any()
    assert torch.equal(states(backend)[4], before[4]), "a row of length 0 changes nothing"

    before = states(backend)
    tokens = tokens_of(spec, 3, seed=1, strength=strength)
    batch = sconv.ForwardBatch.decode(slots=ids([5, -1, 1]))
    backend.init_forward_metadata(batch)
    out = tokens.call(backend, batch)
    want, after = oracle.rows_delta(
        *tokens.packed(), before, slots=[5, -1, 1], lengths=[1, 1, 1], **tokens.constants
    )
    close(out, want)
    for row, slot in ((0, 5), (2, 1)):
        close(states(backend)[slot], after[row][-1])
    untouched = [2, 3, 4, 6, 7, 8]
    assert torch.equal(states(backend)[untouched], before[untouched])


def test_a_safe_gate_is_the_oracles() -> None:
    spec = spec_of("channel")
    backend = load(spec)
    tokens = tokens_of(spec, 20, lower_bound=-5.0)
    before = states(backend)
    batch = sconv.ForwardBatch.extend(ids([1]), ids([20]), ids([3]))
    backend.init_forward_metadata(batch)
    want, after = oracle.rows_delta(
        *tokens.packed(), before, slots=[1], lengths=[20], **tokens.constants
    )
    close(tokens.call(backend, batch), want)
    close(states(backend)[1], after[0][-1])


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("log", [0, 7])
def test_bfloat16_activations(gate: str, log: int) -> None:
    spec = spec_of(gate, key_dtype=BF16, log=log)
    backend = load(spec)
    tokens = tokens_of(spec, 5, dtype=BF16)
    before = states(backend)
    batch = sconv.ForwardBatch.target_verify(ids([2]), ids([9]), 5)
    backend.init_forward_metadata(batch)
    want, after = oracle.rows_delta(
        *tokens.packed(), before, slots=[2], lengths=[5], **tokens.constants
    )
    out = tokens.call(backend, batch)
    assert out.dtype is BF16
    close(out, want, 3e-3)  # rounded once, to bfloat16
    backend.update_mamba_state_after_mtp_verify(ids([4]), req_pool_indices=ids([2]))
    close(states(backend)[2], after[0][-1])


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("records", ["corrections", "snapshots"])
def test_a_state_in_bfloat16(gate: str, records: str) -> None:
    spec = spec_of(gate, dtype=BF16, records=records)
    backend = load(spec)
    tokens = tokens_of(spec, 5)
    before = states(backend)
    batch = sconv.ForwardBatch.target_verify(ids([2]), ids([9]), 5)
    backend.init_forward_metadata(batch)
    want, after = oracle.rows_delta(
        *tokens.packed(), before, slots=[2], lengths=[5], **tokens.constants
    )
    close(tokens.call(backend, batch), want)
    backend.update_mamba_state_after_mtp_verify(ids([3]), req_pool_indices=ids([2]))
    close(states(backend)[2], after[0][4], 4e-3)


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("layout", [0, 3, 11, "snapshots"])
@pytest.mark.parametrize("tree", [False, True])
def test_verify_and_commit_every_node(
    gate: str, layout: int | str, tree: bool, strength: float
) -> None:
    """Rows keep node n for every n, one after the other, so that a log passes every fill."""
    records = {"records": layout} if layout == "snapshots" else {"log": layout}
    spec = spec_of(gate, layers=2, **records)
    backend = load(spec)
    rows = [3, 1, 8, 5]
    parents = ids(TREES) if tree else None
    listed = TREES if tree else [[-1, 0, 1, 2, 3]] * 4
    mirror = [states(backend, layer).double() for layer in range(2)]
    for step in range(7):
        tokens = [tokens_of(spec, 20, seed=50 * step + n, strength=strength) for n in range(2)]
        batch = sconv.ForwardBatch.target_verify(ids(rows), ids([9] * 4), 5, parents=parents)
        backend.init_forward_metadata(batch)
        held = bits(backend)
        kept = [(step + row) % 6 - 1 for row in range(4)]
        for layer in range(2):
            out = tokens[layer].call(backend, batch, layer)
            for row, slot in enumerate(rows):
                want, after = oracle.row_delta(
                    *(each[5 * row : 5 * row + 5] for each in tokens[layer].packed()),
                    mirror[layer][slot],
                    parents=listed[row],
                    **tokens[layer].constants,
                )
                close(out[5 * row : 5 * row + 5], want, 2e-6)
                if kept[row] >= 0:
                    mirror[layer][slot] = after[kept[row]]
        assert all(map(torch.equal, held, bits(backend))), "verify leaves the state alone"
        backend.update_mamba_state_after_mtp_verify(ids(kept), req_pool_indices=ids(rows))
        for layer in range(2):
            for slot in range(1, 13):
                close(states(backend, layer)[slot], mirror[layer][slot], 2e-6)


@pytest.mark.parametrize("gate", GATES)
def test_a_tree_is_each_of_its_paths_alone(gate: str) -> None:
    spec = spec_of(gate)
    for parents in TREES:
        tokens = tokens_of(spec, 5)
        backend = load(spec)
        batch = sconv.ForwardBatch.target_verify(ids([2]), ids([9]), 5, parents=ids([parents]))
        backend.init_forward_metadata(batch)
        out = tokens.call(backend, batch)
        for node in range(5):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            alone = load(spec)
            for place in path:
                one = sconv.ForwardBatch.decode(ids([2]))
                alone.init_forward_metadata(one)
                last = tokens.at([place]).call(alone, one)
            close(out[node], last[0])


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("log", [0, 9])
def test_draft_extend_keeps_what_was_accepted(gate: str, log: int) -> None:
    spec = replace(spec_of(gate, log=log), track_interval=6, chunk_size=2)
    backend = load(spec)
    rows, seq_lens, accepts = [1, 2, 3, 4, 5], [4, 9, 0, 8, 7], [3, 0, 2, -1, 5]
    tokens = tokens_of(spec, 25)
    before = states(backend)
    batch = sconv.ForwardBatch.draft_extend(
        ids(rows), ids(seq_lens), 5, ids(accepts), mamba_track_indices=ids([9, 10, 11, -1, 12])
    )
    backend.init_forward_metadata(batch)
    out = tokens.call(backend, batch)
    want, after = oracle.rows_delta(
        *tokens.packed(),
        before,
        slots=rows,
        lengths=[5] * 5,
        has_initial=[each > 0 for each in seq_lens],
        **tokens.constants,
    )
    close(out, want)
    for row, kept in ((0, 3), (2, 2), (4, 5)):
        close(states(backend)[rows[row]], after[row][kept])
    assert torch.equal(states(backend)[[2, 4]], before[[2, 4]])
    close(states(backend)[9], after[0][2])  # 4 + 2 = 6
    close(states(backend)[12], after[4][5])  # 7 + 5 = 12
    assert torch.equal(states(backend)[[10, 11]], before[[10, 11]])


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("log", [0, 9])
def test_snapshots_of_decode_and_extend(gate: str, log: int) -> None:
    spec = spec_of(gate, log=log)
    backend = load(spec)
    tokens = tokens_of(spec, 60)
    before = states(backend)
    batch = sconv.ForwardBatch.extend(
        ids([1, 2, 3]),
        ids([40, 16, 4]),
        ids([0, 8, 8]),
        mamba_track_indices=ids([9, 10, 11]),
        mamba_track_seqlens=ids([33, 24, 8]),
    )
    backend.init_forward_metadata(batch)
    tokens.call(backend, batch)
    _, after = oracle.rows_delta(
        *tokens.packed(),
        before,
        slots=[1, 2, 3],
        lengths=[40, 16, 4],
        has_initial=[False, True, True],
        **tokens.constants,
    )
    close(states(backend)[9], after[0][33])
    close(states(backend)[10], after[1][16])
    assert torch.equal(states(backend)[11], before[3])
    close(states(backend)[1], after[0][40])

    tokens = tokens_of(spec, 2, seed=4)
    batch = sconv.ForwardBatch.decode(ids([1, 2]), mamba_track_indices=ids([-1, 12]))
    backend.init_forward_metadata(batch)
    tokens.call(backend, batch)
    assert torch.equal(states(backend)[12], states(backend)[2])


@pytest.mark.parametrize("log", [0, 4, 20])
@pytest.mark.parametrize("tree", [False, True])
def test_a_commit_takes_boundary_snapshots(log: int, tree: bool) -> None:
    spec = replace(spec_of(log=log), track_interval=5, chunk_size=1)
    backend = load(spec)
    parents = ids([TREES[1]] * 2) if tree else None
    mirror = states(backend).double()
    for step in range(3):
        tokens = tokens_of(spec, 10, seed=step)
        batch = sconv.ForwardBatch.target_verify(ids([1, 2]), ids([9, 9]), 5, parents=parents)
        backend.init_forward_metadata(batch)
        tokens.call(backend, batch)
        _, after = oracle.rows_delta(
            *tokens.packed(),
            mirror,
            slots=[1, 2],
            lengths=[5, 5],
            parents=[TREES[1 if tree else 0]] * 2,
            **tokens.constants,
        )
        backend.update_mamba_state_after_mtp_verify(
            ids([3, 4]), ids([9, -1]), ids([1, 1]), ids([1, 2])
        )
        mirror[[1, 2]], mirror[9] = torch.stack([after[0][4], after[1][5]]), after[0][2]
        for slot in range(1, 13):
            close(states(backend)[slot], mirror[slot])


@pytest.mark.parametrize("gate", GATES)
def test_rows_do_not_depend_on_each_other(gate: str) -> None:
    """Bit by bit, in every mode, for each row alone, and for the batch turned around."""
    spec = replace(spec_of(gate), max_requests=8)
    lengths = [21, 1, 16, 40, 3]
    tokens = tokens_of(spec, sum(lengths))
    starts = [sum(lengths[:row]) for row in range(5)]

    def run(mode: str, rows: list[int]) -> list[tuple[Tensor, Tensor]]:
        backend = load(spec)
        slots = ids([row + 1 for row in rows])
        counts = {"decode": [1] * 5, "extend": lengths}.get(mode, [3] * 5)
        index = [starts[r] + t for r in rows for t in range(min(counts[r], lengths[r]))]
        if mode not in ("extend", "decode"):
            index = [(starts[r] + t) % sum(lengths) for r in rows for t in range(3)]
        if mode == "decode":
            batch = sconv.ForwardBatch.decode(slots)
        elif mode == "extend":
            batch = sconv.ForwardBatch.extend(slots, ids([lengths[r] for r in rows]), slots)
        elif mode == "verify":
            batch = sconv.ForwardBatch.target_verify(slots, slots, 3)
        else:
            batch = sconv.ForwardBatch.draft_extend(slots, slots, 3, torch.full_like(slots, 2))
        backend.init_forward_metadata(batch)
        out = tokens.at(index).call(backend, batch)
        if mode == "verify":
            backend.update_mamba_state_after_mtp_verify(
                torch.ones_like(slots), req_pool_indices=slots
            )
        parts = out.split([counts[r] for r in rows])
        return [(part, states(backend)[row + 1]) for part, row in zip(parts, rows, strict=True)]

    for mode in ("decode", "extend", "verify", "draft_extend"):
        together = run(mode, [0, 1, 2, 3, 4])
        for rows in ([0], [1], [2], [3], [4], [4, 3, 2, 1, 0], [2, 0]):
            for row, (out, state) in zip(rows, run(mode, rows), strict=True):
                assert torch.equal(out, together[row][0]), (mode, rows)
                assert torch.equal(state, together[row][1]), (mode, rows)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("log", [0, 6])
def test_nan_in_stale_places_reaches_nothing(gate: str, log: int) -> None:
    spec = spec_of(gate, log=log)
    backend = load(spec)
    recurrent = backend.pool.recurrent
    assert recurrent is not None
    assert recurrent.records is not None
    recurrent.layers[0][[0, 3]] = float("nan")
    for each in (recurrent.records.u, recurrent.records.k, recurrent.records.g):
        each.fill_(float("nan"))
    clean = load(spec)

    def step(backend: sconv.Backend, padding: float) -> list[Tensor]:
        tokens = tokens_of(spec, 9)
        for each in tokens.packed():
            each[6:] = padding
        batch = sconv.ForwardBatch.extend(ids([1, 3]), ids([2, 4]), ids([4, 0]), num_tokens=9)
        backend.init_forward_metadata(batch)
        outs = [tokens.call(backend, batch)]
        tokens = tokens_of(spec, 15, seed=2)
        for each in tokens.packed():
            each[5:10] = padding
        batch = sconv.ForwardBatch.target_verify(slots=ids([1, -1, 3]), draft_token_num=5)
        backend.init_forward_metadata(batch)
        outs.append(tokens.call(backend, batch))
        backend.update_mamba_state_after_mtp_verify(
            ids([1, 4, 4]), req_pool_indices=ids([1, -1, 3])
        )
        return [*outs, states(backend)[[1, 3]]]

    for got, want in zip(step(backend, float("nan")), step(clean, 0.0), strict=True):
        assert torch.equal(got, want)


def test_a_later_draft_or_another_branch_does_not_show() -> None:
    spec = spec_of()
    tokens = tokens_of(spec, 5)
    outs = []
    for padding in (0.0, float("nan")):
        backend = load(spec)
        for each in tokens.packed():
            each[[3, 4]] = padding
        batch = sconv.ForwardBatch.target_verify(ids([1]), ids([9]), 5)
        backend.init_forward_metadata(batch)
        outs.append([tokens.call(backend, batch)[:3]])
        backend.update_mamba_state_after_mtp_verify(ids([2]), req_pool_indices=ids([1]))
        outs[-1].append(states(backend)[1])
        parents = ids([[-1, 0, 1, 0, 3]])
        batch = sconv.ForwardBatch.target_verify(ids([2]), ids([9]), 5, parents=parents)
        backend.init_forward_metadata(batch)
        outs[-1].append(tokens.call(backend, batch)[:3])
        backend.update_mamba_state_after_mtp_verify(ids([2]), req_pool_indices=ids([2]))
        outs[-1].append(states(backend)[2])
    assert all(map(torch.equal, *outs))


@pytest.mark.parametrize("log", [0, 6])
def test_rejected_padded_and_freed_rows_change_nothing(log: int) -> None:
    spec = spec_of(log=log)
    backend = load(spec)
    for kept in (2, 1):
        tokens = tokens_of(spec, 20, seed=kept)
        batch = sconv.ForwardBatch.target_verify(ids([1, 2, 3, 0]), ids([9, 9, 9, 0]), 5)
        backend.init_forward_metadata(batch)
        tokens.call(backend, batch)
        if kept == 1:
            backend.pool.free([3])
            held = bits(backend)
            backend.update_mamba_state_after_mtp_verify(
                ids([-1, 5, 2, 2]), req_pool_indices=ids([1, 2, 3, 0])
            )
            assert all(map(torch.equal, held, bits(backend)))
        else:
            backend.update_mamba_state_after_mtp_verify(
                ids([kept] * 4), req_pool_indices=ids([1, 2, 3, 0])
            )


@pytest.mark.parametrize("log", [0, 6])
def test_a_fresh_row_is_verified_and_committed_from_zeros(log: int) -> None:
    spec = spec_of(log=log)
    backend = load(spec)
    for seq_lens in ([9, 9], [0, 9]):
        before = states(backend)
        tokens = tokens_of(spec, 10, seed=seq_lens[0])
        batch = sconv.ForwardBatch.target_verify(ids([1, 2]), ids(seq_lens), 5)
        backend.init_forward_metadata(batch)
        want, after = oracle.rows_delta(
            *tokens.packed(),
            before,
            slots=[1, 2],
            lengths=[5, 5],
            has_initial=[each > 0 for each in seq_lens],
            **tokens.constants,
        )
        close(tokens.call(backend, batch), want)
        backend.update_mamba_state_after_mtp_verify(ids([2, 1]), req_pool_indices=ids([1, 2]))
        close(states(backend)[1], after[0][3])
        close(states(backend)[2], after[1][2])


def test_the_pool_carries_the_state_with_the_windows() -> None:
    spec = replace(spec_of(layers=2, log=6), num_slots=16)
    backend = load(spec)
    pool = backend.pool
    pool.free([13, 14, 15, 16])
    tokens = tokens_of(spec, 5)
    batch = sconv.ForwardBatch.target_verify(ids([1]), ids([9]), 5)
    backend.init_forward_metadata(batch)
    for layer in range(2):
        tokens.call(backend, batch, layer)
    backend.update_mamba_state_after_mtp_verify(ids([3]), req_pool_indices=ids([1]))
    assert pool.recurrent is not None
    assert pool.recurrent.records is not None
    assert pool.recurrent.records.pending[:, 1].tolist() == [4, 4]
    want = states(backend, 1)[1]
    (copied,) = pool.fork([1]).tolist()
    assert torch.equal(states(backend, 1)[copied], want)
    data = pool.export([1, 2])
    assert torch.equal(data.recurrent[1][0], want)
    pool.restore([7, 1], data)
    assert torch.equal(states(backend, 1)[7], want)
    assert pool.recurrent.records.pending[:, [1, 7]].tolist() == [[0, 0], [0, 0]]
    pool.clear([copied])
    assert not states(backend, 1)[copied].any()
    with pytest.raises(sconv.SlotError, match="not one recurrent tensor for each of 2"):
        pool.restore([7, 1], replace(data, recurrent=data.recurrent[:1]))
    with pytest.raises(sconv.SlotError, match=r"the recurrent state of layer 1 is .*float64"):
        pool.restore(
            [7, 1], replace(data, recurrent=[data.recurrent[0], data.recurrent[1].double()])
        )
    assert torch.equal(states(backend, 1)[7], want)


def test_an_engine_brings_states_with_gaps() -> None:
    spec = spec_of("scalar", layers=2)
    assert spec.recurrent is not None
    windows = torch.zeros(2, 13, 3, 6)
    memory = torch.randn(13, 2, 1000)
    shape = spec.recurrent.state_shape
    size = shape[0] * shape[1] * shape[2]
    recurrent = memory.transpose(0, 1)[:, :, 16 : 16 + size].unflatten(2, shape)
    pool = sconv.ConvStatePool.adopt(spec, windows, recurrent=recurrent)
    backend = sconv.load_backend("cpu", spec=spec, pool=pool)
    before = recurrent.clone()
    tokens = tokens_of(spec, 2)
    batch = sconv.ForwardBatch.decode(slots=ids([3, 5]))
    backend.init_forward_metadata(batch)
    out = tokens.call(backend, batch, 1)
    want, after = oracle.rows_delta(
        *tokens.packed(), before[1], slots=[3, 5], lengths=[1, 1], **tokens.constants
    )
    close(out, want)
    close(recurrent[1, [3, 5]], torch.stack([after[0][1], after[1][1]]))
    assert torch.equal(recurrent[0], before[0])
    assert pool.nbytes_by_part["recurrent"] == 2 * 13 * size * 4
    with pytest.raises(sconv.SpecError, match="give recurrent="):
        sconv.ConvStatePool.adopt(spec, windows)
    with pytest.raises(sconv.SpecError, match=r"recurrent layer 0 is \[12, 4, 8, 16\]"):
        sconv.ConvStatePool.adopt(spec, windows, recurrent=recurrent[:, 1:])
    with pytest.raises(sconv.SpecError, match="the state of one is contiguous"):
        sconv.ConvStatePool.adopt(
            spec, windows, recurrent=torch.zeros(2, 13, 4, 16, 8).transpose(3, 4)
        )


@pytest.mark.parametrize("log", [0, 3])
def test_an_engine_binds_states_later_and_again(log: int) -> None:
    spec = spec_of(log=log)
    assert spec.recurrent is not None
    pool = sconv.ConvStatePool.adopt(spec)
    backend = sconv.load_backend("cpu", spec=spec, pool=pool)
    backend.init_graph_state(20, 100)
    assert pool.recurrent is None
    for _ in range(2):
        made = torch.randn(1, 13, *spec.recurrent.state_shape)
        with pytest.raises(sconv.SpecError, match="give recurrent="):
            pool.bind(torch.zeros(1, 13, 3, 6))
        pool.bind(torch.zeros(1, 13, 3, 6), made)
        assert pool.recurrent is not None
        assert pool.recurrent.records is not None
        assert pool.recurrent.records.rows == 20, "what was reserved is reserved again"
        before = made[0].clone()
        tokens = tokens_of(spec, 1)
        batch = sconv.ForwardBatch.decode(slots=ids([3]))
        backend.init_forward_metadata(batch)
        close(
            tokens.call(backend, batch),
            oracle.row_delta(*tokens.packed(), before[3], **tokens.constants)[0],
        )
        assert not torch.equal(made[0, 3], before[3])
        pool.release()


def test_records_take_a_fortieth_of_snapshots() -> None:
    """The scratch of one request and layer, 4 drafts, KDA with 32 heads of 128 x 128."""
    delta = sconv.GatedDelta(32, 32, 128, 128, gate="channel")
    spec = sconv.StateSpec(
        1, [sconv.Stream("qkv", 8)], 4, 1, 1, max_draft_tokens=4, recurrent=delta
    )
    assert sconv.ConvStatePool(spec).nbytes_by_part["records"] == 196_608
    snapshots = replace(spec, recurrent=replace(delta, records="snapshots"))
    assert sconv.ConvStatePool(snapshots).nbytes_by_part["records"] == 8_388_608
    for each in (spec, snapshots, replace(spec, recurrent=replace(delta, log=16))):
        plan = sconv.plan(each, memory="100MB", layout="dense").best
        assert plan.nbytes <= 100_000_000
        pool = sconv.ConvStatePool(plan.spec)
        assert pool.nbytes == plan.nbytes


@pytest.mark.parametrize("log", [0, 5])
@pytest.mark.parametrize("gate", GATES)
def test_random_schedules(gate: str, log: int) -> None:
    """All modes, aborts, forks and exports in any order, against the oracle's states."""
    spec = spec_of(gate, log=log)
    backend = sconv.load_backend("cpu", spec=spec)
    pool = backend.pool
    draw = random.Random(11)
    mirror: dict[int, Tensor] = {}
    zero = torch.zeros(spec.recurrent.state_shape, dtype=torch.float64)  # type: ignore[union-attr]
    for step in range(60):
        live = sorted(mirror)
        action = draw.choice(["start", "abort", "fork", "move", *["step"] * 8])
        if action == "start" and len(live) < 8:
            (slot,) = pool.alloc(1).tolist()
            mirror[slot] = zero
            pool.clear([slot])
        elif action == "abort" and len(live) > 2:
            slot = draw.choice(live)
            pool.free([slot])
            del mirror[slot]
        elif action == "fork" and 0 < len(live) < 8:
            slot = draw.choice(live)
            mirror[int(pool.fork([slot]))] = mirror[slot]
        elif action == "move" and len(live) > 1:
            one, other = draw.sample(live, 2)
            pool.restore([other], pool.export([one]))
            mirror[other] = mirror[one]
        if action != "step" or not live:
            continue
        rows = draw.sample(live, draw.randint(1, len(live)))
        slots, count = ids(rows), len(rows)
        mode = draw.choice(["decode", "extend", "verify", "tree", "draft_extend"])
        lengths, fresh, parents = [5] * count, [False] * count, None
        kept = [draw.randint(-1, 4) for _ in rows]
        if mode == "decode":
            lengths, kept = [1] * count, [0] * count
            batch = sconv.ForwardBatch.decode(slots=slots)
        elif mode == "extend":
            lengths = [draw.choice([0, 1, 5, 16, 19]) for _ in rows]
            fresh = [draw.random() < 0.2 and each > 0 for each in lengths]
            kept = [each - 1 for each in lengths]
            prefix = ids([0 if each else 3 for each in fresh])
            batch = sconv.ForwardBatch.mixed(None, ids(lengths), prefix, slots=slots)
        elif mode == "draft_extend":
            batch = sconv.ForwardBatch.draft_extend(
                None, slots, 5, ids([each + 1 for each in kept]), slots=slots
            )
        else:
            if mode == "tree":
                parents = ids([draw.choice(TREES) for _ in rows])
            batch = sconv.ForwardBatch.target_verify(
                slots=slots, draft_token_num=5, parents=parents
            )
        tokens = tokens_of(spec, sum(lengths), seed=step)
        backend.init_forward_metadata(batch)
        out = tokens.call(backend, batch)
        if mode in ("verify", "tree"):
            backend.update_mamba_state_after_mtp_verify(ids(kept), req_pool_indices=slots)
        start = 0
        for row, slot in enumerate(rows):
            stop = start + lengths[row]
            want, after = oracle.row_delta(
                *(each[start:stop] for each in tokens.packed()),
                zero if fresh[row] else mirror[slot],
                parents=None if parents is None else parents[row],
                **tokens.constants,
            )
            if stop > start:
                close(out[start:stop], want, 3e-6)
            if kept[row] >= 0:
                mirror[slot] = after[kept[row]]
            start = stop
        for slot, state in mirror.items():
            if state.any():
                close(states(backend)[slot], state, 3e-6)


def test_the_oracle_by_hand() -> None:
    """One head of 1 x 1: decay to a half, strength a half, then what is read."""
    one = torch.ones(1, 1, 1)
    out, after = reference.gated_delta.row_delta(
        3 * one,
        one,
        6 * one,
        torch.zeros(1, 1),
        torch.zeros(1, 1),
        torch.full((1, 1, 1), 4.0),
        A_log=torch.zeros(1),
        scale=1.0,
        normalize_qk=False,
    )
    # softplus(0) = ln 2, so 4 decays to 2; half of the error 6 - 2 is added; 3 times 4 is read.
    assert after.item() == pytest.approx(4.0)
    assert out.item() == pytest.approx(12.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"q": torch.zeros(2, 3, 16)}, r"q has shape \[2, 3, 16\]: expected \[2, 2, 16\]"),
        ({"k": torch.zeros(2, 2, 16, dtype=BF16)}, "k is torch.bfloat16 and v torch.float32"),
        ({"v": torch.zeros(2, 8, 2).transpose(1, 2)}, "its channels must be contiguous"),
        ({"gate": torch.zeros(2, 2)}, r"gate has shape \[2, 2\]: expected \[2, 2, 16\]"),
        ({"beta": None}, "beta is None"),
        ({"A_log": torch.zeros(2, dtype=torch.int64)}, "A_log is torch.int64"),
        ({"lower_bound": 1.0}, "a log-decay is negative"),
    ],
)
def test_wrong_arguments_are_refused_and_change_nothing(
    wrong: dict[str, object], message: str
) -> None:
    spec = spec_of()
    backend = load(spec)
    batch = sconv.ForwardBatch.decode(slots=ids([1, 2]))
    backend.init_forward_metadata(batch)
    held = bits(backend)
    with pytest.raises(sconv.BatchError, match=message):
        replace(tokens_of(spec, 2), **wrong).call(backend, batch)  # type: ignore[arg-type]
    assert all(map(torch.equal, held, bits(backend)))


def test_keys_that_records_cannot_hold_are_refused() -> None:
    spec = spec_of(key_dtype=BF16)
    backend = load(spec)
    batch = sconv.ForwardBatch.target_verify(ids([1]), ids([9]), 5)
    backend.init_forward_metadata(batch)
    with pytest.raises(sconv.BatchError, match=r"give GatedDelta key_dtype=torch.float32"):
        tokens_of(spec, 5).call(backend, batch)


def test_a_spec_without_a_recurrent_state_has_no_gated_delta() -> None:
    backend = sconv.load_backend("cpu", spec=replace(spec_of(), recurrent=None))
    batch = sconv.ForwardBatch.decode(slots=ids([1]))
    backend.init_forward_metadata(batch)
    with pytest.raises(sconv.SpecError, match="the spec has no recurrent state"):
        tokens_of(spec_of(), 1).call(backend, batch)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"value_heads": 3}, "value_heads=3 is not a multiple of key_heads=2"),
        ({"gate": "both"}, "gate='both': expected 'scalar' or 'channel'"),
        ({"dtype": torch.float16}, "a recurrent state is float32 or bfloat16"),
        ({"log": -1}, "log=-1: expected at least 0"),
        ({"log": 4, "records": "snapshots"}, "log=4 needs records='corrections'"),
        ({"key_dim": 1.5}, "key_dim=1.5: expected an int"),
    ],
)
def test_a_wrong_recurrent_state_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(sconv.SpecError, match=message):
        sconv.GatedDelta(
            **({"key_heads": 2, "value_heads": 2, "key_dim": 8, "value_dim": 8} | wrong)
        )  # type: ignore[arg-type]
