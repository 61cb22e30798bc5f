"""Layouts, strides, dtypes and arithmetic: faults that other systems had.

Names carry the id of the entry in docs/reference/known-faults.md. Outputs read as digits: 4321 is
token 4 after the window [1, 2, 3].
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sconv.torch_backend.state_rows
from sconv import (
    Available,
    Backend,
    BackendInfo,
    BatchError,
    Capabilities,
    ConvStatePool,
    ForwardBatch,
    ForwardMode,
    SpecError,
    StateSpec,
    Stream,
    backends,
    load_backend,
    reference,
)
from sconv.engine.loading import check_spec
from sconv.testing.digits import (
    digit_inputs,
    digit_spec,
    digit_weight,
    fill_pool,
    read_digits,
    read_window,
    run_digits,
    set_window,
)
from sconv.testing.harness import Harness, assert_same_bits
from sconv.testing.recording import record
from sconv.testing.steps import Step

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def cpu(**options: Any) -> Backend:
    return load_backend("cpu", spec=digit_spec(**options))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_layout_2_trees_get_windows_that_share_nothing() -> None:
    backend = cpu(max_draft_tokens=3, draft_topk=2)
    assert backend.pool.window_layout == "dense"
    fill_pool(backend.pool, {5: [1, 2, 3]}, {2: 5})
    parents = torch.tensor([[-1, 0, 0]], dtype=torch.int32)
    batch = ForwardBatch.target_verify(ints(2), ints(3), 3, parents=parents)
    run_digits(backend, batch, [4, 5, 6])
    kept = backend.pool.windows.layers[0][0, :, :, 0]
    assert kept.tolist() == [[2, 3, 4], [3, 4, 5], [3, 4, 6]]


@pytest.mark.parametrize("width", [3, 4, 6])
@pytest.mark.parametrize("channel_axis", [False, True])
def test_layout_3_the_window_is_at_the_end_of_a_wider_slot(width: int, channel_axis: bool) -> None:
    spec = digit_spec(dim=2, channel_axis=channel_axis)
    shape = (10, 2, width) if channel_axis else (10, width, 2)
    buffer = torch.full(shape, 777.0)
    backend = load_backend("cpu", spec=spec, pool=ConvStatePool.adopt(spec, [buffer]))
    batch = ForwardBatch.extend(None, ints(3), ints(0), slots=ints(6), num_tokens=3)
    assert run_digits(backend, batch, [1, 2, 3]) == [1000, 2100, 3210]
    slot = buffer[6, 0] if channel_axis else buffer[6, :, 0]
    assert slot.tolist() == [777.0] * (width - 3) + [1, 2, 3]
    assert run_digits(backend, ForwardBatch.decode(slots=ints(6)), [4]) == [4321]
    assert slot.tolist() == [777.0] * (width - 3) + [2, 3, 4]


@pytest.mark.parametrize("axis", ["time", "channel"])
def test_layout_7_no_size_decides_which_axis_is_which(axis: str) -> None:
    """As many tokens as channels, and as many channels as window columns."""
    spec = StateSpec(
        num_layers=1,
        streams=[Stream("a", 4)],
        kernel_size=5,
        num_slots=3,
        max_requests=2,
        dtype=torch.float32,
        window_axis=axis,  # type: ignore[arg-type]
    )
    backend = load_backend("cpu", spec=spec)
    x = torch.tensor([[10.0 * t + d for d in range(4)] for t in range(4)])
    weight = torch.randn(4, 5)
    batch = ForwardBatch.extend(None, ints(4), ints(0), slots=ints(2), num_tokens=4)
    before = reference.time_axis(backend.pool.conv(0, "a"), axis).clone()
    backend.init_forward_metadata(batch)
    y = backend.short_conv(x, weight, layer_id=0, stream="a", forward_batch=batch)
    expected, pool = reference.extend(
        x=x, pool=before, weight=weight, slots=[2], lengths=[4], has_initial=[False]
    )
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    state = reference.time_axis(backend.pool.conv(0, "a"), axis)
    assert_same_bits(state[2], pool[2], "state")
    assert_same_bits(state[2], x, "four inputs are the window")


def test_layout_8_the_declared_shape_is_the_pools() -> None:
    """For every backend that runs here; sizes are different on purpose."""
    names = [info.name for info in backends() if isinstance(info.availability, Available)]
    assert "cpu" in names
    for name, axis in itertools.product(names, ("time", "channel")):
        spec = StateSpec(
            num_layers=2,
            streams=[Stream("a", 5)],
            kernel_size=4,
            num_slots=6,
            max_requests=2,
            window_axis=axis,  # type: ignore[arg-type]
        )
        pool = load_backend(name, spec=spec).pool
        assert spec.window_shape(1) == ((3, 5) if axis == "time" else (5, 3))
        assert tuple(pool.layers[1].shape) == (7, *spec.window_shape(1))
        assert tuple(pool.conv(1, "a").shape) == (7, *spec.window_shape(1))


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
def test_layout_9_a_slice_of_a_wider_projection(mode: ForwardMode) -> None:
    """Row stride 23; channels that are not contiguous are refused before anything runs."""
    dim = 6
    backend = cpu(dim=dim)
    slots = [2, 5, 7]
    projection = torch.randn(3, 3 * dim + 5)
    x = projection[:, dim : 2 * dim]
    assert x.stride() == (23, 1)
    results = []
    for values in (x, x.contiguous()):
        fill_pool(backend.pool, {slot: [1, 2, 3] for slot in slots})
        if mode is ForwardMode.DECODE:
            batch = ForwardBatch.decode(slots=ints(*slots))
        else:
            batch = ForwardBatch.extend(
                None, ints(2, 0, 1), ints(3, 3, 0), slots=ints(*slots), num_tokens=3
            )
        backend.init_forward_metadata(batch)
        y = backend.short_conv(
            values, digit_weight(dim), layer_id=0, stream="a", forward_batch=batch
        )
        results.append((y, backend.pool.layers[0].clone()))
    assert_same_bits(results[0][0], results[1][0], "outputs of a slice and of its copy")
    assert_same_bits(results[0][1], results[1][1], "state after a slice and after its copy")
    channel_first = torch.randn(dim, 3).T
    with pytest.raises(BatchError, match=r"x has strides \[1, 3\].*channels must be contiguous"):
        backend.short_conv(
            channel_first, digit_weight(dim), layer_id=0, stream="a", forward_batch=batch
        )
    assert_same_bits(backend.pool.layers[0], results[1][1], "state after a refused call")


@pytest.mark.parametrize("few", [0, 1 << 14], ids=["words", "elements"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_layout_10_rows_of_length_one_are_themselves(
    dtype: torch.dtype, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strides of a size-1 dimension are arbitrary, and no reshape may believe them."""
    monkeypatch.setattr(sconv.torch_backend.state_rows, "_FEW", few)
    dim = 4
    backend = cpu(dim=dim, dtype=dtype)
    windows = {2: [1, 2, 3], 5: [2, 3, 1], 7: [3, 1, 2]}
    x = digit_inputs([1, 2, 3], dim, dtype)
    odd = torch.as_strided(x.view(3, dim, 1), (3, dim, 1), (dim, 1, 1))
    packed = odd.transpose(1, 2).contiguous().view(3, dim)

    def run(values: Tensor, slots: list[int]) -> Tensor:
        fill_pool(backend.pool, windows)
        batch = ForwardBatch.decode(slots=ints(*slots))
        backend.init_forward_metadata(batch)
        return backend.short_conv(
            values, digit_weight(dim, dtype), layer_id=0, stream="a", forward_batch=batch
        )

    together = run(packed, [2, 5, 7])
    for row, slot in enumerate((2, 5, 7)):
        single = torch.as_strided(packed, (1, dim), (7, 1), row * dim)
        assert_same_bits(run(single, [slot])[0], together[row], f"row {row}")
        batch = ForwardBatch.decode(slots=ints(slot))
        backend.init_forward_metadata(batch)
        assert backend.pool.layers[0][slot, -1].tolist() == packed[row].tolist()


def test_layout_11_an_export_sees_what_a_replay_wrote() -> None:
    """Transfers are the engine's; the list of what to send is explicit and needs no hook to run."""
    backend = cpu(num_layers=2)
    pool = backend.pool
    pool.alloc(3)
    backend.init_graph_state(1, 1)
    fill_pool(pool, {1: [9, 9, 9], 2: [1, 2, 3], 3: [0, 0, 0]})
    slots, x = ints(1), digit_inputs([9])
    batch = ForwardBatch.decode(slots=slots)

    def step() -> None:
        backend.init_forward_metadata_in_graph(batch)
        for layer_id in range(2):
            backend.short_conv(
                x, digit_weight(), layer_id=layer_id, stream="a", forward_batch=batch
            )

    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    recording = record(step)
    slots.copy_(ints(2))
    x.copy_(digit_inputs([4]))
    recording.replay()
    sent = pool.export(2)
    assert [part[0, :, 0].tolist() for part in sent] == [[2, 3, 4], [2, 3, 4]]
    pool.restore(3, sent)
    assert [read_window(pool, 3, layer_id=layer_id) for layer_id in range(2)] == [[2, 3, 4]] * 2


def lazy(elements: int) -> Tensor:
    """Zeros in bfloat16 whose pages exist once they are touched."""
    return torch.from_numpy(np.zeros(elements, dtype=np.int16)).view(torch.bfloat16)


def run_far(pool: ConvStatePool, slots: list[int]) -> None:
    """Extend, decode and commit rows far into a pool, and compare with the oracle."""
    spec = pool.spec
    backend = load_backend("cpu", spec=spec, pool=pool)
    dim = spec.layer_dim(0)
    state = pool.conv(0, "a")
    weight = torch.randn(dim, 4, dtype=torch.bfloat16)
    near = [0, 1, *(slot - 2 for slot in slots)]
    before = state[near].clone()
    near_slots = list(range(1, len(slots) + 1))
    small = torch.zeros(len(slots) + 1, 3, dim, dtype=torch.bfloat16)

    def oracle_state() -> Tensor:
        return reference.time_axis(state[slots], spec.window_axis)

    x = torch.randn(2 * len(slots), dim, dtype=torch.bfloat16)
    lengths = [2] * len(slots)
    batch = ForwardBatch.extend(
        None, ints(*lengths), ints(*[0] * len(slots)), slots=ints(*slots), num_tokens=len(x)
    )
    backend.init_forward_metadata(batch)
    y = backend.short_conv(x, weight, layer_id=0, stream="a", forward_batch=batch)
    expected, small = reference.extend(
        x=x, pool=small, weight=weight, slots=near_slots, lengths=lengths,
        has_initial=[False] * len(slots),
    )  # fmt: skip
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-5)
    assert_same_bits(oracle_state(), small[1:], "state after extend")

    x = torch.randn(len(slots), dim, dtype=torch.bfloat16)
    batch = ForwardBatch.decode(slots=ints(*slots))
    backend.init_forward_metadata(batch)
    y = backend.short_conv(x, weight, layer_id=0, stream="a", forward_batch=batch)
    expected, small = reference.decode(x=x, pool=small, weight=weight, slots=near_slots)
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-5)
    assert_same_bits(oracle_state(), small[1:], "state after decode")

    x = torch.randn(2 * len(slots), dim, dtype=torch.bfloat16)
    batch = ForwardBatch.target_verify(None, ints(*lengths), 2, slots=ints(*slots))
    backend.init_forward_metadata(batch)
    backend.short_conv(x, weight, layer_id=0, stream="a", forward_batch=batch)
    backend.update_mamba_state_after_mtp_verify(
        ints(*[1] * len(slots)), req_pool_indices=ints(*slots)
    )
    _, small = reference.extend(
        x=x, pool=small, weight=weight, slots=near_slots, lengths=lengths,
        has_initial=[True] * len(slots),
    )  # fmt: skip
    assert_same_bits(oracle_state(), small[1:], "state after commit")
    assert_same_bits(state[near], before, "slots nearby")


def far_spec(dim: int, axis: str) -> StateSpec:
    return StateSpec(
        num_layers=1,
        streams=[Stream("a", dim)],
        kernel_size=4,
        num_slots=8,
        max_requests=2,
        window_axis=axis,  # type: ignore[arg-type]
        max_draft_tokens=2,
    )


def test_kern_2_slots_past_two_to_the_31_elements() -> None:
    """4.3 GB of address space, of which a few pages exist."""
    buffer = lazy(87383 * 8192 * 3).view(87383, 8192, 3)
    run_far(ConvStatePool.adopt(far_spec(8192, "channel"), [buffer]), [87382, 87381])


def test_kern_2_a_wide_stride_from_slot_to_slot() -> None:
    buffer = lazy(3643 * 589824).view(3643, 589824)
    assert 3641 * buffer.stride(0) > 2**31
    view = torch.as_strided(buffer, (3643, 3, 512), (589824, 512, 1))
    run_far(ConvStatePool.adopt(far_spec(512, "time"), [view]), [3641])


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize(("x", "state", "weight"), list(itertools.product(FLOATS, repeat=3)))
def test_kern_4_every_mix_of_dtypes(
    x: torch.dtype, state: torch.dtype, weight: torch.dtype, resumes: bool
) -> None:
    """Weights 1, 4, 16, 64 and tokens up to 3: exact in all of them."""
    backend = cpu(dtype=state, dim=3)
    fill_pool(backend.pool, {6: [3, 1, 2]})
    batch = ForwardBatch.extend(
        None, ints(4), ints(3 if resumes else 0), slots=ints(6), num_tokens=4
    )
    backend.init_forward_metadata(batch)
    taps = digit_weight(3, torch.bfloat16).to(weight)
    values = digit_inputs([1, 2, 3, 1], 1, x).expand(4, 3).contiguous()
    y = backend.short_conv(
        values, taps, layer_id=0, stream="a", forward_batch=batch, residual=False
    )
    assert y.dtype is x
    first = 64 + 16 * 2 + 4 * 1 + 3 if resumes else 64
    assert read_digits(y)[0] == first
    assert read_digits(y)[3] == 121
    batch = ForwardBatch.decode(slots=ints(6))
    backend.init_forward_metadata(batch)
    y = backend.short_conv(
        values[:1], taps, layer_id=0, stream="a", forward_batch=batch, residual=False
    )
    assert read_digits(y) == [64 * 1 + 16 * 1 + 4 * 3 + 2]


def test_kern_5_state_is_cast_on_store() -> None:
    """A float16 model on the default state dtype, its snapshot included; or on one of its own."""
    spec = StateSpec(
        num_layers=1, streams=[Stream("a", 1)], kernel_size=4, num_slots=9, max_requests=8
    )
    assert spec.dtype is torch.bfloat16
    for backend in (load_backend("cpu", spec=spec), cpu(dtype=torch.float16)):
        fill_pool(backend.pool, {6: [1, 2, 3]})
        batch = ForwardBatch.decode(slots=ints(6), mamba_track_indices=ints(8))
        backend.init_forward_metadata(batch)
        y = backend.short_conv(
            digit_inputs([1], 1, torch.float16),
            digit_weight(1, torch.float16),
            layer_id=0,
            stream="a",
            forward_batch=batch,
            residual=False,
        )
        assert (y.dtype, read_digits(y)) == (torch.float16, [64 + 48 + 8 + 1])
        assert (read_window(backend.pool, 6), read_window(backend.pool, 8)) == ([2, 3, 1],) * 2
        assert backend.pool.conv(0, "a").dtype is backend.spec.dtype


def test_kern_7_nothing_is_computed_in_half_precision() -> None:
    backend = cpu(dtype=torch.bfloat16)
    weight = torch.tensor([[0.0, 0, 0, 1]], dtype=torch.bfloat16)
    x = torch.tensor([[70000.0]], dtype=torch.bfloat16)
    for batch in (
        ForwardBatch.decode(slots=ints(6)),
        ForwardBatch.extend(None, ints(1), ints(0), slots=ints(6), num_tokens=1),
    ):
        backend.init_forward_metadata(batch)
        y = backend.short_conv(
            x, weight, layer_id=0, stream="a", forward_batch=batch, residual=False
        )
        assert y.item() == 70144
    assert backend.pool.conv(0, "a")[6, -1].item() == 70144


def test_kern_9_kernel_widths_outside_the_range_are_refused_by_name() -> None:
    def spec(kernel_size: int) -> StateSpec:
        return StateSpec(
            num_layers=1,
            streams=[Stream("a", 1)],
            kernel_size=kernel_size,
            num_slots=2,
            max_requests=1,
        )

    for width in (2, 8):
        load_backend("cpu", spec=spec(width))
    with pytest.raises(SpecError, match="kernel_size=1: expected at least 2"):
        spec(1)
    with pytest.raises(SpecError, match="kernel_size=9: the contract covers 2 to 8"):
        spec(9)
    narrow = BackendInfo(
        "npu",
        "npu",
        (1, 0),
        "nowhere:create",
        lambda: Available(1),
        capabilities=Capabilities(kernel_sizes=(3, 4)),
    )
    for width in (3, 4):
        check_spec(narrow, spec(width))
    for width in (2, 5):
        with pytest.raises(SpecError, match=rf"'npu'.*kernel_size={width} \(it takes 3 to 4\)"):
            check_spec(narrow, spec(width))


@pytest.mark.parametrize("mode", ["decode", "extend", "verify", "idle"])
def test_kern_10_inputs_are_neither_written_nor_returned(mode: str) -> None:
    backend = cpu(max_draft_tokens=2)
    fill_pool(backend.pool, {6: [1, 2, 3]})
    slots = ints(6)
    batch, tokens = {
        "decode": (ForwardBatch.decode(slots=slots), [4]),
        "extend": (
            ForwardBatch.extend(None, ints(1), ints(3), slots=slots, num_tokens=1),
            [4],
        ),
        "verify": (ForwardBatch.target_verify(None, ints(3), 1, slots=slots), [4]),
        "idle": (ForwardBatch.idle(), []),
    }[mode]
    backend.init_forward_metadata(batch)
    x, weight = digit_inputs(tokens), digit_weight()
    kept = weight.clone()
    y = backend.short_conv(x, weight, layer_id=0, stream="a", forward_batch=batch, residual=False)
    assert read_digits(y) == [4321] * len(tokens)
    assert x[:, 0].tolist() == tokens
    assert_same_bits(weight, kept, "the weight")
    memory = y.untyped_storage()._cdata
    assert memory != x.untyped_storage()._cdata
    assert memory != backend.pool.layers[0].untyped_storage()._cdata


def test_kern_8_and_pad_5_weights_at_the_end_of_their_memory() -> None:
    for dim in (1, 5, 130):
        backend = cpu(dim=dim)
        harness = Harness(backend, seed=dim, live=[7, 3])
        layer = harness.layers[0, "a"]
        tail = torch.full((dim + 1, 4), float("nan"))
        tail[1:] = layer.weight
        harness.layers[0, "a"] = type(layer)(tail[1:], layer.bias, "silu", True)
        harness.run(Step(ForwardMode.EXTEND, (3, 7), (5, 2), (0, 4)))
        harness.run(Step(ForwardMode.DECODE, (7, 3), (1, 1), (6, 5)))


def test_weights_may_have_a_channel_dimension_of_one() -> None:
    backend = cpu()
    set_window(backend.pool, 6, [1, 2, 3])
    batch = ForwardBatch.decode(slots=ints(6))
    backend.init_forward_metadata(batch)
    y = backend.short_conv(
        digit_inputs([4]),
        digit_weight().view(1, 1, 4),
        layer_id=0,
        stream="a",
        forward_batch=batch,
        residual=False,
    )
    assert read_digits(y) == [4321]
