"""One request gives one answer: however its tokens are cut, and whoever shares its batches.

State is equal bit for bit, and so are outputs where the state is as exact as the activations: every
mode of this backend sums the taps in one order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sconv import Backend, ForwardBatch, ForwardMode, StateSpec, Stream, load_backend
from sconv.testing.harness import Harness, assert_same_bits
from sconv.testing.steps import Step, rows_of

LENGTH = 7
#: Chunk lengths of one request's tokens.
CUTS = [[7], [3, 4], [1, 1, 5], [2, 1, 1, 3], [6, 1], [1] * 7]


def spec_of(dim: int, *, dtype: torch.dtype = torch.float32, axis: str = "time") -> StateSpec:
    return StateSpec(
        num_layers=1,
        streams=[Stream("a", dim)],
        kernel_size=4,
        num_slots=40,
        max_requests=40,
        dtype=dtype,
        window_axis=axis,  # type: ignore[arg-type]
        max_draft_tokens=4,
        draft_topk=2,
    )


class Model:
    """One convolution with weights of its own."""

    def __init__(
        self, dim: int, dtype: torch.dtype, *, bias: bool, activation: str | None, residual: bool
    ) -> None:
        self.weight = torch.randn(dim, 4).to(dtype)
        self.bias = torch.randn(dim).to(dtype) if bias else None
        self.activation, self.residual = activation, residual

    def __call__(self, backend: Backend, batch: ForwardBatch, x: Tensor) -> Tensor:
        backend.init_forward_metadata(batch)
        return backend.short_conv(
            x,
            self.weight,
            layer_id=0,
            stream="a",
            forward_batch=batch,
            bias=self.bias,
            activation=self.activation,
            residual=self.residual,
        )


def poisoned(spec: StateSpec) -> Backend:
    backend = load_backend("cpu", spec=spec)
    backend.pool.layers[0].fill_(float("nan"))
    return backend


def prefill(
    backend: Backend,
    model: Model,
    tokens: dict[int, Tensor],
    done: dict[int, int],
    order: list[int],
    lengths: dict[int, int],
) -> dict[int, Tensor]:
    """Extend some slots, in some order, by their next tokens; return their outputs."""
    x = torch.cat([tokens[slot][done[slot] : done[slot] + lengths[slot]] for slot in order])
    batch = ForwardBatch.extend(
        None,
        torch.tensor([lengths[slot] for slot in order]),
        torch.tensor([done[slot] for slot in order]),
        slots=torch.tensor(order),
        num_tokens=len(x),
    )
    y = model(backend, batch, x)
    parts = y.split([lengths[slot] for slot in order])
    for slot in order:
        done[slot] += lengths[slot]
    return dict(zip(order, parts, strict=True))


def decode(
    backend: Backend,
    model: Model,
    tokens: dict[int, Tensor],
    done: dict[int, int],
    order: list[int],
) -> dict[int, Tensor]:
    """Decode one token of some slots, in some order."""
    x = torch.stack([tokens[slot][done[slot]] for slot in order])
    y = model(backend, ForwardBatch.decode(slots=torch.tensor(order)), x)
    for slot in order:
        done[slot] += 1
    return dict(zip(order, y[:, None], strict=True))


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


VARIANTS = [
    pytest.param(3, torch.float32, {"bias": True, "activation": "silu", "residual": True}, id="3"),
    pytest.param(
        130, torch.float32, {"bias": True, "activation": "silu", "residual": True}, id="130"
    ),
    pytest.param(
        64, torch.bfloat16, {"bias": False, "activation": "silu", "residual": True}, id="64-bf16"
    ),
    # Wide enough for 32 rows to take another kernel than one row does.
    pytest.param(
        4112, torch.bfloat16, {"bias": False, "activation": None, "residual": True}, id="wide-bf16"
    ),
    pytest.param(
        4112, torch.float16, {"bias": False, "activation": None, "residual": False}, id="wide-fp16"
    ),
    pytest.param(
        4112, torch.float32, {"bias": False, "activation": "silu", "residual": False}, id="wide"
    ),
]


@pytest.mark.parametrize(("dim", "dtype", "options"), VARIANTS)
def test_kern_14_a_request_does_not_depend_on_its_neighbours(
    dim: int, dtype: torch.dtype, options: dict[str, object], threads: int
) -> None:
    """Alone and among 1, 7 and 31 others, in every cut, rows shuffled, others of other lengths."""
    rng = random.Random(dim)
    model = Model(dim, dtype, **options)  # type: ignore[arg-type]
    mine, found = torch.randn(LENGTH, dim).to(dtype) * 3, []
    for cut in CUTS if dim < 1000 else CUTS[:3]:
        for others in (0, 1, 7, 31):
            backend = poisoned(spec_of(dim, dtype=dtype))
            slots = rng.sample(range(1, 41), others + 1)
            slot = slots[0]
            tokens = {other: torch.randn(16, dim).to(dtype) for other in slots}
            tokens[slot] = mine
            done, y = dict.fromkeys(slots, 0), []
            for length in cut:
                rng.shuffle(slots)
                if length == 1 and done[slot] > 0:
                    y.append(decode(backend, model, tokens, done, slots)[slot])
                    continue
                lengths = {other: rng.randrange(3) for other in slots}
                lengths[slot] = length
                y.append(prefill(backend, model, tokens, done, slots, lengths)[slot])
            found.append((torch.cat(y), backend.pool.layers[0][slot].clone()))
    assert len(found) >= 12
    for y, state in found[1:]:
        assert_same_bits(y, found[0][0], f"outputs with {threads} threads")
        assert_same_bits(state, found[0][1], "state")


@pytest.mark.parametrize("axis", ["time", "channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_chunked_prefill_and_one_shot_are_equal(dtype: torch.dtype, axis: str) -> None:
    """Token by token, at every split point in two and in three, and in one go."""
    dim = 5
    model = Model(dim, dtype, bias=True, activation="silu", residual=True)
    tokens = {6: torch.randn(LENGTH, dim).to(dtype)}
    spec = spec_of(dim, dtype=dtype, axis=axis)

    def run(cut: list[int], *, stepwise: bool = False) -> tuple[Tensor, Tensor]:
        backend, done, y = poisoned(spec), {6: 0}, []
        for length in cut:
            if stepwise and done[6] > 0:
                y.append(decode(backend, model, tokens, done, [6])[6])
            else:
                y.append(prefill(backend, model, tokens, done, [6], {6: length})[6])
        return torch.cat(y), backend.pool.layers[0][6].clone()

    def run_from_cleared() -> tuple[Tensor, Tensor]:
        backend, done = poisoned(spec), {6: 0}
        backend.pool.alloc(6)
        backend.pool.clear(6)
        y = [decode(backend, model, tokens, done, [6])[6] for _ in range(LENGTH)]
        return torch.cat(y), backend.pool.layers[0][6].clone()

    y, state = run([LENGTH])
    cuts = [[first, LENGTH - first] for first in range(LENGTH + 1)]
    cuts += [
        [first, second, LENGTH - first - second]
        for first in range(LENGTH)
        for second in range(LENGTH - first)
    ]
    for cut in cuts:
        other_y, other_state = run(cut)
        assert_same_bits(other_state, state, f"state after {cut}")
        # A prefill of nothing starts nothing, so the chunk that follows it is the first.
        assert_same_bits(other_y, y, f"outputs of {cut}")
    for other_y, other_state in (run([1] * LENGTH, stepwise=True), run_from_cleared()):
        assert_same_bits(other_state, state, "state after decoding")
        assert_same_bits(other_y, y, "outputs of decoding")


@pytest.mark.parametrize("kept", range(-1, 4))
def test_a_committed_verify_equals_a_prefill_of_what_was_kept(kept: int) -> None:
    dim = 5
    model = Model(dim, torch.float32, bias=True, activation="silu", residual=True)
    prompt, drafts = torch.randn(2, dim), torch.randn(4, dim)
    tokens = {6: torch.cat([prompt, drafts])}

    speculative = poisoned(spec_of(dim))
    prefill(speculative, model, tokens, {6: 0}, [6], {6: 2})
    batch = ForwardBatch.target_verify(None, torch.tensor([2]), 4, slots=torch.tensor([6]))
    y = model(speculative, batch, drafts)
    speculative.update_mamba_state_after_mtp_verify(
        torch.tensor([kept]), req_pool_indices=torch.tensor([6])
    )

    plain = poisoned(spec_of(dim))
    expected = prefill(plain, model, tokens, {6: 0}, [6], {6: 2 + kept + 1})[6]
    assert_same_bits(speculative.pool.layers[0][6], plain.pool.layers[0][6], "state")
    assert_same_bits(y[: kept + 1], expected[2:], "outputs")


@pytest.mark.parametrize("kept", range(5))
def test_a_draft_extend_equals_a_prefill_of_what_was_kept(kept: int) -> None:
    dim = 5
    model = Model(dim, torch.float32, bias=True, activation="silu", residual=True)
    tokens = {6: torch.randn(6, dim)}
    drafted, done = poisoned(spec_of(dim)), {6: 0}
    prefill(drafted, model, tokens, done, [6], {6: 2})
    batch = ForwardBatch.draft_extend(
        None, torch.tensor([2]), 4, torch.tensor([kept]), slots=torch.tensor([6])
    )
    y = model(drafted, batch, tokens[6][2:])

    plain = poisoned(spec_of(dim))
    expected = prefill(plain, model, tokens, {6: 0}, [6], {6: 2 + kept})[6]
    assert_same_bits(drafted.pool.layers[0][6], plain.pool.layers[0][6], "state")
    assert_same_bits(y[:kept], expected[2:], "outputs")


@pytest.mark.parametrize("mode", [ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND])
def test_kern_14_draft_rows_do_not_depend_on_their_neighbours(mode: ForwardMode) -> None:
    live = [9, 2, 7, 4, 11]
    step = Step(
        mode,
        slots=tuple(live),
        lengths=(3,) * 5,
        before=(0, 3, 5, 2, 9),
        draft_tokens=3,
        parents=((-1, 0, 0),) * 5 if mode is ForwardMode.TARGET_VERIFY else None,
        accepts=(3, 0, 2, 1, 3),
        by_slots=True,
    )
    results: dict[int, list[tuple[Tensor, Tensor]]] = {slot: [] for slot in live}
    for order in ([0, 1, 2, 3, 4], [3, 1], [4, 2, 0], [2]):
        backend = load_backend("cpu", spec=spec_of(13))
        harness = Harness(backend, seed=4, live=live, activation="silu")
        inputs = torch.randn(5, 3, 13, generator=torch.Generator().manual_seed(1))
        part = rows_of(step, order)
        batch = harness.batch(part)
        backend.init_forward_metadata(batch)
        y = harness.convolve(batch, {(0, "a"): inputs[order].flatten(0, 1)})[0, "a"]
        for row, source in enumerate(order):
            slot = live[source]
            state = backend.pool.layers[0][slot].clone()
            results[slot].append((y[3 * row : 3 * row + 3], state))
    for slot, runs in results.items():
        for y, state in runs[1:]:
            assert_same_bits(y, runs[0][0], f"outputs of slot {slot}")
            assert_same_bits(state, runs[0][1], f"state of slot {slot}")
