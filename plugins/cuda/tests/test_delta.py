"""The kernels of the gated delta rule against plain loops in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

pytest.importorskip("triton", reason="the kernels need triton, which has wheels for Linux alone")

from sconv.testing.harness import assert_same_bits

# Interpreted kernels are slow; test_delta_backend.py asks the same of the hook.
pytestmark = pytest.mark.slow

FLOAT32 = 1e-6
#: Outputs are rounded to bfloat16; 2^-9 is the most that one of them can be off.
BFLOAT16_OUTPUT = 2e-3

SAFE_BOUND = -5.0
GATES = [(False, False), (True, False), (True, True)]


class Step(NamedTuple):
    """Heads, inputs and states of one layer."""

    heads: Any
    inputs: Any
    state: Tensor


def _random_step(
    tokens: int,
    *,
    channel: bool,
    safe: bool = False,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (16, 32),
    rows: int = 6,
    dtype: torch.dtype = torch.float32,
    strength: float = 1.0,
    packed: bool = True,
    device: torch.device | str = "cpu",
) -> Step:
    """Draw a step; q, k and v are views of one packed projection if ``packed``."""
    from sconv_cuda.delta.inputs import Heads, Inputs

    (h, hv), (dk, dv) = heads, dims
    mixed = torch.randn(tokens, 2 * h * dk + hv * dv, device=device).to(dtype)
    q, k, v = mixed.split([h * dk, h * dk, hv * dv], 1)
    if not packed:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    wide = (hv, dk) if channel else (hv,)
    inputs = Inputs(
        q=q.unflatten(1, (h, dk)),
        k=k.unflatten(1, (h, dk)),
        v=v.unflatten(1, (hv, dv)),
        gate=(torch.randn(tokens, *wide, device=device) * strength).to(dtype),
        beta=torch.randn(tokens, hv, device=device).to(dtype),
        A_log=torch.rand(hv, device=device) * 2.5,
        dt_bias=torch.randn(*wide, device=device),
        scale=dk**-0.5,
        lower_bound=SAFE_BOUND if safe else None,
        normalize=True,
    )
    state = torch.randn(rows, hv, dv, dk, device=device)
    return Step(Heads(h, hv, dk, dv, channel), inputs, state)


def _by_loops(
    step: Step, first: int, count: int, state: Tensor, parents: list[int] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Return outputs ``[count, HV, dv]`` and the state after each token, in float64.

    Args:
        step: The inputs.
        first: Packed index of the row's first token.
        count: Its tokens.
        state: ``[HV, dv, dk]`` before the row.
        parents: Of each token within the row, -1 = the state before; None = a chain.
    """
    heads, inputs = step.heads, step.inputs
    outputs, states = [], []
    for t in range(count):
        at = first + t
        parent = t - 1 if parents is None else parents[t]
        s = state.double() if parent < 0 else states[parent]
        group = heads.values // heads.keys
        q = inputs.q[at].double().repeat_interleave(group, 0)
        k = inputs.k[at].double().repeat_interleave(group, 0)
        if inputs.normalize:
            q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt()
            k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        x = inputs.gate[at].double()
        if inputs.dt_bias is not None:
            x = x + inputs.dt_bias.double()
        rate = inputs.A_log.double().exp()
        if heads.channel:
            rate = rate[:, None]
        if inputs.lower_bound is None:
            g = -rate * softplus(x)
        else:
            g = inputs.lower_bound * torch.sigmoid(rate * x)
        decay = g.exp()[:, None, :] if heads.channel else g.exp()[:, None, None]
        s = s * decay
        beta = inputs.beta[at].double().sigmoid()[:, None]
        u = beta * (inputs.v[at].double() - (s @ k[:, :, None])[:, :, 0])
        s = s + u[:, :, None] * k[:, None, :]
        outputs.append((s @ (q * inputs.scale)[:, :, None])[:, :, 0])
        states.append(s)
    if not outputs:
        return state.new_zeros(0, heads.values, heads.value_dim).double(), []
    return torch.stack(outputs), states


def _ancestors_of(parents: list[list[int]]) -> Tensor:
    """Return ``[B, N, N]`` bool: whether s is on the path to t, t included."""
    count = len(parents[0])
    found = torch.zeros(len(parents), count, count, dtype=torch.bool)
    for row, links in enumerate(parents):
        for t in range(count):
            node = t
            while node >= 0:
                found[row, t, node] = True
                node = links[node]
    return found


def _off(found: Tensor, expected: Tensor) -> float:
    """Return the relative error, NaN if a number is NaN."""
    size = expected.double().norm()
    return float((found.double() - expected.double()).norm() / size.clamp(min=1e-30))


def _launcher(device: torch.device) -> Any:
    from sconv_cuda.launch import Launcher

    return Launcher(device)


def _records(step: Step, rows: int, places: int, layers: int = 1) -> Any:
    from sconv_cuda.delta.inputs import Records

    heads, device = step.heads, step.state.device
    nan = float("nan")
    wide = (heads.key_dim,) if heads.channel else ()
    lead = (layers, rows)
    return Records(
        torch.full((*lead, heads.values, places, heads.value_dim), nan, device=device),
        torch.full((*lead, heads.keys, places, heads.key_dim), nan, device=device),
        torch.full((*lead, heads.values, places, *wide), nan, device=device),
    )


def _layer(records: Any, layer: int = 0) -> Any:
    return type(records)(records.u[layer], records.k[layer], records.g[layer])


def _verify(step: Step, slots: Tensor, records: Any, drafts: int, tree: Any, **more: Any) -> Tensor:
    from sconv_cuda.delta.verify import verify

    device = step.state.device
    return verify(
        _launcher(device), step.heads, step.inputs, step.state, slots,
        torch.ones(slots.shape[0], dtype=torch.bool, device=device), records,
        drafts=drafts, tree=tree, **more,
    )  # fmt: skip


def _commit(step: Step, records: Any, slots: Tensor, nodes: list[int], **more: Any) -> None:
    from sconv_cuda.delta.commit import StateTable, commit

    device = step.state.device
    source = {
        "map_index": slots,
        "map_size": 0,
        "physical_index": slots,
        "physical_step": 1,
        "physical_size": 0,
        "LOOKUP": False,
        "NULL_ZERO": True,
        "TRANSLATE": False,
    }
    commit(
        _launcher(device), step.heads, StateTable.build((step.state,)), records, slots,
        torch.tensor(nodes, device=device),
        torch.ones(slots.shape[0], dtype=torch.bool, device=device), source=source, **more,
    )  # fmt: skip


def _tree(drafts: int, rows: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(drafts)
    return [
        [-1, *(int(torch.randint(0, t, (1,), generator=generator)) for t in range(1, drafts))]
        for _ in range(rows)
    ]


@pytest.mark.parametrize(("channel", "safe"), GATES)
@pytest.mark.parametrize(
    ("drafts", "tree", "strength"),
    [(1, False, 1.0), (3, False, 30.0), (4, True, 1.0), (9, True, 30.0)],
)
def test_verify_and_commit_equal_plain_loops(
    device: torch.device, drafts: int, tree: bool, channel: bool, safe: bool, strength: float
) -> None:
    from sconv_cuda.delta.paths import node_bits, paths_of

    step = _random_step(
        4 * drafts, channel=channel, safe=safe, strength=strength, device=device, rows=8
    )
    before = step.state.clone()
    parents = _tree(drafts, 4) if tree else None
    paths = None
    if parents:
        ancestors = _ancestors_of(parents).to(device)
        paths = paths_of(ancestors, node_bits(drafts, device))
    slots = torch.tensor([3, -1, 5, 1], dtype=torch.int32, device=device)
    records = _records(step, 5, drafts + 1)
    out = _verify(step, slots, _layer(records), drafts, paths)
    assert_same_bits(step.state, before, "state")
    assert (out[drafts : 2 * drafts] == 0).all()
    assert torch.isnan(records.u[0, 1]).all()
    assert torch.isnan(records.u[0, 4]).all()

    expected = before.double()
    nodes, snapshots = [drafts - 1, 0, -1, drafts // 2], [6, 7, 2, -1]
    for row, slot in enumerate([3, -1, 5, 1]):
        if slot < 0:
            continue
        links = parents[row] if parents else None
        outputs, states = _by_loops(step, row * drafts, drafts, before[slot], links)
        assert _off(out[row * drafts : (row + 1) * drafts], outputs) <= FLOAT32
        if nodes[row] >= 0:
            expected[slot] = states[nodes[row]]
        # A row that keeps nothing has passed no boundary either.
        if nodes[row] >= 0 and snapshots[row] >= 0:
            expected[snapshots[row]] = states[0]
    _commit(
        step, records, slots, nodes, drafts=drafts, tree=paths,
        targets=torch.tensor(snapshots, device=device),
        track_steps=torch.zeros(4, dtype=torch.int64, device=device),
    )  # fmt: skip
    assert _off(step.state, expected) <= FLOAT32
    for slot in (0, 2, 4, 5, 7):
        assert_same_bits(step.state[slot], before[slot], f"slot {slot}")


@pytest.mark.parametrize("channel", [False, True])
def test_bfloat16_activations_round_the_output_alone(device: torch.device, channel: bool) -> None:
    step = _random_step(8, channel=channel, dtype=torch.bfloat16, device=device)
    before = step.state.clone()
    slots = torch.tensor([2, 4], dtype=torch.int32, device=device)
    records = _records(step, 2, 4)
    out = _verify(step, slots, _layer(records), 4, None)
    _commit(step, records, slots, [3, 3], drafts=4, tree=None)
    for row, slot in enumerate([2, 4]):
        outputs, states = _by_loops(step, 4 * row, 4, before[slot])
        assert _off(out[4 * row : 4 * row + 4], outputs) <= BFLOAT16_OUTPUT
        assert _off(step.state[slot], states[-1]) <= FLOAT32


@pytest.mark.parametrize("channel", [False, True])
def test_a_nan_in_a_later_draft_reaches_no_earlier_one_pad_1(
    device: torch.device, channel: bool
) -> None:
    step = _random_step(4, channel=channel, device=device)
    slots = torch.tensor([2], dtype=torch.int32, device=device)
    whole = _verify(step, slots, _layer(_records(step, 1, 4)), 4, None)
    for tensor in step.inputs.q, step.inputs.k, step.inputs.v, step.inputs.gate, step.inputs.beta:
        tensor[3] = float("nan")
    parts = _verify(step, slots, _layer(_records(step, 1, 4)), 4, None)
    assert_same_bits(parts[:3], whole[:3], "outputs before the NaN")
    assert torch.isnan(parts[3]).any()


def test_a_row_does_not_depend_on_its_batch_or_tile_kern_14(device: torch.device) -> None:
    from sconv_cuda.delta.verify import VerifyTile

    step = _random_step(12, channel=True, dims=(64, 64), device=device)
    records = _records(step, 3, 4)
    slots = torch.tensor([3, 5, 1], dtype=torch.int32, device=device)
    together = _verify(step, slots, _layer(records), 4, None)
    inputs = step.inputs
    last = replace(
        inputs,
        **{name: getattr(inputs, name)[8:] for name in ("q", "k", "v", "gate", "beta")},
    )
    alone = step._replace(inputs=last)
    for tile in (None, VerifyTile(64, 32, 4, 2), VerifyTile(16, 32, 1, 3)):
        kept = _records(step, 1, 4)
        found = _verify(alone, slots[2:], _layer(kept), 4, None, tile=tile)
        assert_same_bits(found, together[8:], "outputs")
        assert_same_bits(kept.u[0, 0], records.u[0, 2], "corrections")


@pytest.mark.parametrize(("channel", "safe"), GATES)
def test_decode_equals_plain_loops(device: torch.device, channel: bool, safe: bool) -> None:
    from sconv_cuda.delta.recurrence import Rows, recur

    step = _random_step(4, channel=channel, safe=safe, device=device)
    step.state[1].fill_(float("nan"))
    before = step.state.clone()
    rows = Rows(
        torch.tensor([3, -1, 1, 2], dtype=torch.int32, device=device),
        None,
        torch.tensor([True, True, False, True], device=device),
        targets=torch.tensor([5, 4, -1, -1], device=device),
    )
    out = recur(_launcher(device), step.heads, step.inputs, step.state, rows)
    assert (out[1] == 0).all()
    for row, slot in ((0, 3), (2, 1), (3, 2)):
        start = torch.zeros_like(before[slot]) if slot == 1 else before[slot]
        outputs, states = _by_loops(step, row, 1, start)
        assert _off(out[row : row + 1], outputs) <= FLOAT32
        assert _off(step.state[slot], states[0]) <= FLOAT32
    assert_same_bits(step.state[5], step.state[3], "snapshot")
    assert_same_bits(step.state[4], before[4], "slot that nobody asked for")


@pytest.mark.parametrize("channel", [False, True])
def test_ragged_rows_equal_plain_loops(device: torch.device, channel: bool) -> None:
    from sconv_cuda.delta.recurrence import Rows, recur

    slots, kept = [4, 1, -1, 2], [3, 0, 2, 1]
    step = _random_step(11, channel=channel, rows=9, device=device)
    before = step.state.clone()
    rows = Rows(
        torch.tensor(slots, dtype=torch.int32, device=device),
        torch.tensor([0, 3, 3, 5, 9], dtype=torch.int32, device=device),
        torch.tensor([True, True, True, False], device=device),
        torch.tensor(kept, dtype=torch.int32, device=device),
        torch.tensor([7, -1, 8, 6], device=device),
        torch.tensor([1, 0, 3, -1], device=device),
    )
    out = recur(_launcher(device), step.heads, step.inputs, step.state, rows)
    assert (out[3:5] == 0).all()
    assert (out[9:] == 0).all()
    outputs, states = _by_loops(step, 0, 3, before[4])
    assert _off(out[:3], outputs) <= FLOAT32
    assert _off(step.state[4], states[2]) <= FLOAT32
    assert _off(step.state[7], states[1]) <= FLOAT32
    outputs, states = _by_loops(step, 5, 4, torch.zeros_like(before[2]))
    assert _off(out[5:9], outputs) <= FLOAT32
    assert _off(step.state[2], states[0]) <= FLOAT32
    assert (step.state[6] == 0).all()
    for slot in (0, 1, 3, 5, 8):
        assert_same_bits(step.state[slot], before[slot], f"slot {slot}")
